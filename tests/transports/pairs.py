"""A trainer of several ranks that updates some workers over one transport, one update after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from inference_plugin.transports.base import Delivery, Target, Transport
from inference_plugin.transports.base import Sender as TransportSender
from inference_plugin.transports.delta import TRANSPORT as DELTA
from inference_plugin.wire.config import Config
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.messages import Abort, Begin, Begun, Done, GroupOpened, OpenGroup, Sealed, Sender
from inference_plugin.wire.tensors import bytes_view
from tests.support.worker import Worker
from tests.transports.cases import assert_equal_bytes, manifest_for, whole_slices

FAR_S = 3600.0

Cut = Callable[[dict[str, torch.Tensor]], Iterator[Any]]


class Pair:
    """A trainer's ranks and the workers that they send to."""

    timeout_s = FAR_S

    def __init__(
        self, workers: Sequence[Worker], *, ranks: int = 1, cut: Cut = whole_slices, transport: Transport = DELTA
    ) -> None:
        self.workers = list(workers)
        self.cut = cut
        self.transport = transport
        self.senders = [self.new_sender() for _ in range(ranks)]
        self.number = 0
        self.needs: Sequence[Box] | None = None
        """What the workers are sent; by default what their installer needs."""

    def new_sender(self) -> TransportSender:
        sender = self.transport.sender()
        sender.config = Config.from_environment()
        return sender

    def write(self, tensors: dict[str, torch.Tensor], *, only: Sequence[int] | None = None) -> tuple[list[Piece], int]:
        """Begins an update and writes it; returns its pieces, and the bytes that travelled. `only`: the ranks that write."""
        self.number += 1
        self.txn, self.manifest = f"t{self.number}", manifest_for(tensors)
        self.senders[0].meet((), len(self.senders), self.timeout_s, "auto")
        names = self.names = self.senders[0].allocate(self.manifest, frozenset())
        targets = tuple(self._begun(worker, names) for worker in self.workers)
        slices = list(self.cut(tensors))
        pieces, sent = [], 0
        for rank, sender in enumerate(self.senders):
            if only is not None and rank not in only:
                continue
            mine = iter(slices[rank :: len(self.senders)])
            until_s = time.monotonic() + self.timeout_s
            written, stats = sender.write(
                Delivery(self.txn, "policy", rank, self.manifest, names, mine, targets, until_s)
            )
            for error in stats.lost.values():
                raise error
            pieces += written
            sent += stats.sent_bytes
            self.messages, self.held_bytes = stats.messages, stats.held_bytes
        return pieces, sent

    def seal(self, worker: Worker, pieces: list[Piece]) -> None:
        with worker.channel() as channel:
            while not channel.request(worker.seal(self.txn, pieces), Sealed, timeout_s=30).done:
                pass

    def update(self, tensors: dict[str, torch.Tensor]) -> int:
        """Commits on all workers, and looks at what they hold. Returns the bytes that travelled."""
        pieces, sent = self.write(tensors)
        for worker in self.workers:
            self.seal(worker, pieces)
        for worker in self.workers:
            worker.commit(self.txn, self.number)
            assert_equal_bytes(worker.installer.installed, tensors)
        return sent

    def abort(self) -> None:
        for worker in self.workers:
            with worker.channel() as channel:
                channel.request(Abort("policy", self.txn), Done, timeout_s=30)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()

    def _begun(self, worker: Worker, names: bytes) -> Target:
        probe = self.senders[0].probe()
        with worker.channel() as channel:
            channel.request(OpenGroup("policy", self.manifest, self.transport.name, probe), GroupOpened, timeout_s=30)
            request = Begin("policy", self.txn, self.number, Sender("s"), FAR_S, self.manifest.fingerprint, names)
            begun = channel.request(request, Begun, timeout_s=30)
        needs = worker.installer.needs if self.needs is None else tuple(self.needs)
        return msgspec.structs.replace(worker.target(self.manifest, needs), landing=begun.landing)


def changed(tensors: dict[str, torch.Tensor], seed: int, share: float = 0.01) -> dict[str, torch.Tensor]:
    """About that share of the elements, and one at least where there is any, with other bits."""
    chance = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in tensors.items():
        whole = tensor.contiguous().clone()
        if whole.numel():
            items = bytes_view(whole).view(whole.numel(), whole.element_size())
            hit = torch.rand(whole.numel(), generator=chance) < share
            hit[torch.randint(whole.numel(), (1,), generator=chance)] = True
            items[hit] ^= 1
        result[name] = whole
    return result
