"""What an update or a verification came to: the same struct on every trainer rank, in the runtime directory, in the CLI."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
import torch

from inference_plugin.wire.addresses import runtime_dir
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import ErrorInfo, WeightwireError, first_few
from inference_plugin.wire.messages import BoxDigest, MemoryTag, RankVerify, ReplicaState
from inference_plugin.wire.tensors import bytes_view

__all__ = [
    "PauseReport",
    "ReplicaPause",
    "ReplicaReport",
    "ReplicaVerify",
    "UpdateReport",
    "VerifyReport",
    "compare_rank",
    "last_report",
]


class ReplicaReport(msgspec.Struct, frozen=True):
    """One replica in an update. Seconds are of its slowest rank; `version` is what it serves now, None if unknown."""

    replica: str
    engine: str
    status: Literal["committed", "already", "failed"]
    version: int | None
    transport: str = ""
    install: str = ""
    mechanism: str = ""
    why: str = ""
    digest: str = ""
    stopped_s: float = 0.0
    waited_s: float = 0.0
    install_s: float = 0.0
    verify_s: float = 0.0
    prepare_s: float = 0.0
    extra_bytes: int = 0
    error: ErrorInfo | None = None


class UpdateReport(msgspec.Struct, frozen=True):
    """An update: `bytes` of the manifest, `seconds` from call to last commit, `phases` in seconds on the manager rank.

    Phases: agree (discover, open, begin), stage (all ranks write; gather, pack and move are within it), seal (digests
    checked, standby prepared), commit (wait for the boundary, pause, install). `messages` are all requests sent, by all
    ranks; `copies_per_byte` counts copies of a payload byte from the trainer's memory to the parameter, those inside
    the kernel included. `egress_bytes` is the payload that the trainer's ranks sent in messages (by `zmq`); what workers pass
    on to each other is not in it, nor in `messages`.
    """

    group: str
    version: int
    txn: str
    bytes: int
    seconds: float
    phases: dict[str, float]
    messages: int
    copies_per_byte: float
    replicas: tuple[ReplicaReport, ...]
    egress_bytes: int = 0

    @property
    def failed(self) -> tuple[ReplicaReport, ...]:
        """Replicas that don't serve the version."""
        return tuple(replica for replica in self.replicas if replica.status == "failed")

    def raise_failed(self) -> None:
        """Raises the first failed replica's error; returns if all serve the version."""
        for replica in self.failed:
            if replica.error is not None:
                raise WeightwireError.of(replica.error)

    def save(self) -> None:
        """Keeps it as the group's last report, for `weightwire status`."""
        path = runtime_dir() / f"{self.group}.report"
        temporary = path.with_suffix(".report-tmp")
        temporary.write_bytes(msgspec.msgpack.encode(self))
        temporary.replace(path)


class ReplicaVerify(msgspec.Struct, frozen=True):
    """One replica's live parameters beside what they should be. `differ` and `unreadable` name the first boxes."""

    replica: str
    version: int | None
    boxes: int
    differ: tuple[str, ...]
    unreadable: tuple[str, ...]
    error: ErrorInfo | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and not self.differ and not self.unreadable and self.boxes > 0


class VerifyReport(msgspec.Struct, frozen=True):
    """A verification of a group over all replicas."""

    group: str
    replicas: tuple[ReplicaVerify, ...]

    @property
    def ok(self) -> bool:
        return bool(self.replicas) and all(replica.ok for replica in self.replicas)


class ReplicaPause(msgspec.Struct, frozen=True):
    """How a replica stands after a pause, a sleep, a wake-up or a resumption; `state` is "failed" where that failed.
    `asleep`: the memory that is released."""

    replica: str
    engine: str
    state: ReplicaState | Literal["failed"]
    asleep: tuple[MemoryTag, ...] = ()
    error: ErrorInfo | None = None


class PauseReport(msgspec.Struct, frozen=True):
    """All replicas of the job; on trainer ranks above 0 there are none in it."""

    replicas: tuple[ReplicaPause, ...]

    @property
    def failed(self) -> tuple[ReplicaPause, ...]:
        """Replicas that don't stand as they were asked to."""
        return tuple(replica for replica in self.replicas if replica.state == "failed")

    def raise_failed(self) -> None:
        """Raises the first failed replica's error; returns if there is none."""
        for replica in self.failed:
            if replica.error is not None:
                raise WeightwireError.of(replica.error)


def compare_rank(rank: RankVerify, tensor_named: Callable[[str], torch.Tensor | None]) -> list[str]:
    """Boxes of one rank that differ from the tensors that `tensor_named` gives (whole, by checkpoint name), in words."""
    return [f"rank {rank.rank}: {words}" for box in rank.boxes if (words := _difference(box, tensor_named(box.name)))]


def last_report(group: str, job: str | None = None) -> UpdateReport | None:
    """The last update of a group in this job, whoever sent it."""
    path = runtime_dir(job) / f"{group}.report"
    return decode_as(path.read_bytes(), UpdateReport) if path.exists() else None


def missing_boxes(ranks: Iterable[RankVerify], names: Iterable[str]) -> str:
    """Names that no rank reported, in words; empty if there are none."""
    held = {box.name for rank in ranks for box in rank.boxes}
    missing = [name for name in names if name not in held]
    return f"held by no rank: {first_few(missing)}" if missing else ""


def _difference(box: BoxDigest, tensor: torch.Tensor | None) -> str:
    ranges = ", ".join(f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True))
    where = f"{box.name}[{ranges}]"
    if tensor is None:
        return f"{where} is in the engine and not in the source"
    if str(tensor.dtype).removeprefix("torch.") != box.dtype:
        return f"{where} is {box.dtype} in the engine and {tensor.dtype} in the source"
    part = tensor
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        part = part.narrow(dim, offset, size)
    if not box.signed_zeros and part.is_floating_point() and part.element_size() > 1:
        part = part + 0
    same = digest_bytes(bytes_view(part.contiguous()).numpy()) == box.digest
    return "" if same else f"{where} differs"
