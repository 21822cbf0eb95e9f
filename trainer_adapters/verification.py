"""One verification, on rank 0: what replicas hold, read back, against what the trainer holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from inference_plugin.transports.shm import SharedSegment
from inference_plugin.wire.channel import Outgoing, fan_out
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import GoTransport, Verified, Verify
from inference_plugin.wire.reports import ReplicaVerify, VerifyReport, compare_rank, missing_boxes
from inference_plugin.wire.tensors import box_view
from trainer_adapters.operation import Operation
from trainer_adapters.rank import Rank
from trainer_adapters.replicas import ReplicaSession

if TYPE_CHECKING:
    from trainer_adapters.source import WeightSource

__all__ = ["Verification"]


class Verification(Operation):
    """One verification, on rank 0: the ranks write into a segment of their own, which the replicas are compared with."""

    def __init__(self, rank: Rank, source: WeightSource, manifest: Manifest) -> None:
        super().__init__(rank, source, manifest, "verify")

    def run(self) -> VerifyReport:
        self.gather_ready()
        scratch = SharedSegment.create(self.manifest.layout.nbytes)
        try:
            segment = msgspec.msgpack.encode(scratch.address)
            self.write((GoTransport("shm", segment, ()),), compare_copies=True)
            sessions = self.connect()
            requests = [Outgoing(s.front, Verify(self.settings.group, self.left_s)) for s in sessions]
            replies = fan_out(requests, Verified, timeout_s=self.left_s)
            return VerifyReport(
                self.settings.group,
                tuple(
                    self._compare(session, reply, scratch.tensor)
                    for session, reply in zip(sessions, replies, strict=True)
                ),
            )
        finally:
            scratch.close()

    def _compare(
        self, session: ReplicaSession, reply: Verified | WeightwireError, segment: torch.Tensor
    ) -> ReplicaVerify:
        if isinstance(reply, WeightwireError):
            return ReplicaVerify(session.card.replica, None, 0, (), (), reply.at(replica=session.card.replica).info())
        manifest = self.manifest

        def tensor_named(name: str) -> torch.Tensor | None:
            i = manifest.index.get(name)
            return None if i is None else box_view(segment, manifest, manifest.whole(i))

        differ = [words for rank in reply.ranks for words in compare_rank(rank, tensor_named)]
        if missing := missing_boxes(reply.ranks, (s.name for s in manifest.tensors if s.nbytes)):
            differ.append(missing)
        unreadable = [f"rank {r.rank}: {name}: {why}" for r in reply.ranks for name, why in r.unreadable.items()]
        return ReplicaVerify(
            session.card.replica,
            reply.ranks[0].version if reply.ranks else None,
            sum(len(rank.boxes) for rank in reply.ranks),
            tuple(differ[:8]),
            tuple(unreadable[:8]),
        )
