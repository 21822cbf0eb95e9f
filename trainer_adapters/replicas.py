"""The manager rank's view of one replica: its channels, the terms that were agreed, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inference_plugin.transports.base import Sender as TransportSender
from inference_plugin.transports.base import Transport
from inference_plugin.wire.channel import Channel, Outgoing, fan_out
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ManifestMismatch, TransportUnavailable, WeightwireError, first_few
from inference_plugin.wire.manifest import Box, Manifest, box_volume, intersect
from inference_plugin.wire.messages import (
    Body,
    GoTarget,
    GroupOpened,
    InstallPolicy,
    OpenGroup,
    ReplicaCard,
)

__all__ = ["ReplicaSession"]


@dataclass
class ReplicaSession:
    """Channels to one replica and the terms of the group. Belongs to the manager's thread."""

    card: ReplicaCard
    config: Config
    front: Channel
    workers: list[Channel]
    transport: str = ""
    opened: tuple[GroupOpened, ...] = ()
    agreed: tuple[str, str, bool] | None = None
    held_segments: frozenset[str] = field(default_factory=frozenset)

    @staticmethod
    def connect(card: ReplicaCard, config: Config) -> ReplicaSession:
        """Connects; nothing is sent."""
        where: dict[str, Any] = {"replica": card.replica, "peer_boot_id": card.boot_id, "silence_s": config.silence_s}
        return ReplicaSession(
            card=card,
            config=config,
            front=Channel(card.address, pid=card.pid, side="front", **where),
            workers=[
                Channel(worker.address, pid=worker.pid, side="worker", rank=worker.rank, **where)
                for worker in card.workers
            ],
        )

    @property
    def messages(self) -> int:
        """Requests sent so far."""
        return self.front.sent_messages + sum(channel.sent_messages for channel in self.workers)

    def ask_workers(self, body: Body, kind: type, *, timeout_s: float | None = None) -> list:  # type: ignore[type-arg]
        """The same request to all workers, by default a small one. Raises the first error in order of rank."""
        timeout_s = self.config.control_timeout_s if timeout_s is None else timeout_s
        replies = fan_out([Outgoing(channel, body) for channel in self.workers], kind, timeout_s=timeout_s)
        for reply in replies:
            if isinstance(reply, WeightwireError):
                raise reply
        return replies

    def agree(
        self,
        group: str,
        manifest: Manifest,
        transports: Sequence[tuple[Transport, TransportSender]],
        install: InstallPolicy,
        *,
        partial: bool,
        timeout_s: float,
    ) -> None:
        """Opens the group on all workers with the first transport that they can all use.

        Raises `ManifestMismatch` if the engine's model can't take the manifest, `TransportUnavailable` with every
        transport's reason, `PeerLost`, `SyncTimeout`.
        """
        terms = (manifest.fingerprint, install, partial)
        if self.agreed == terms:
            return
        refusals = []
        for transport, sender in transports:
            try:
                request = OpenGroup(group, manifest, transport.name, sender.probe(), install, partial)
                opened: list[GroupOpened] = self.ask_workers(request, GroupOpened, timeout_s=timeout_s)
            except TransportUnavailable as error:
                refusals.append(f"{transport.name}: {error.message} ({error.hint})")
                continue
            _check_needs(manifest, [answer.needs for answer in opened])
            self.transport, self.opened, self.agreed = transport.name, tuple(opened), terms
            return
        raise TransportUnavailable(f"no transport reaches it: {'; '.join(refusals)}", replica=self.card.replica)

    def targets(self) -> tuple[GoTarget, ...]:
        """Its workers, for a transport that sends to each."""
        return tuple(
            GoTarget(self.card.replica, w.rank, w.address, w.pid, self.card.boot_id, terms.needs)
            for w, terms in zip(self.card.workers, self.opened, strict=True)
        )

    def replaces(self, before: ReplicaSession) -> None:
        """Closes an earlier session of the same replica, whose way back is still what it was if this one came to nothing."""
        if self.agreed is None:
            self.held_segments |= before.held_segments
        before.close()

    def close(self) -> None:
        """Closes the channels; may be called twice."""
        self.front.close()
        for channel in self.workers:
            channel.close()


def _check_needs(manifest: Manifest, needs: Sequence[Sequence[Box]]) -> None:
    """Every byte of the manifest is read by some rank: else the engine would ignore it silently."""
    by_tensor: dict[int, list[Box]] = {}
    for boxes in needs:
        for box in boxes:
            by_tensor.setdefault(box.tensor, []).append(box)
    unread = []
    for i, spec in enumerate(manifest.tensors):
        whole = manifest.whole(i)
        if box_volume(whole) and (left := _subtract([whole], by_tensor.get(i, []))):
            unread.append(spec.name if left == [whole] else manifest.describe(left[0]))
    if unread:
        raise ManifestMismatch(
            f"the engine's model has no place for: {first_few(unread)}",
            hint="a name, a shape or a tie differs between trainer and engine; exclude what the engine doesn't load",
            phase="open",
        )


def _subtract(boxes: list[Box], taken: Sequence[Box]) -> list[Box]:
    """What is left of `boxes` without `taken`."""
    for hole in taken:
        boxes = [part for box in boxes for part in _cut_out(box, hole)]
    return boxes


def _cut_out(box: Box, hole: Box) -> list[Box]:
    shared = intersect(box, hole)
    if shared is None:
        return [box]
    parts = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim in range(len(sizes)):
        start, end = offsets[dim], offsets[dim] + sizes[dim]
        inner_start, inner_end = shared.offsets[dim], shared.offsets[dim] + shared.sizes[dim]
        for low, high in ((start, inner_start), (inner_end, end)):
            if low < high:
                parts.append(
                    Box(
                        box.tensor,
                        (*offsets[:dim], low, *offsets[dim + 1 :]),
                        (*sizes[:dim], high - low, *sizes[dim + 1 :]),
                    )
                )
        offsets[dim], sizes[dim] = inner_start, inner_end - inner_start
    return parts
