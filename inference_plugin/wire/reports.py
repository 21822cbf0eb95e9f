"""Results of updates, verifications and pauses: the same struct on every trainer rank, in the runtime directory, in the CLI.
`print` and rich show each as a heading and a line per replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from inference_plugin.wire.errors import ErrorInfo, WeightwireError
from inference_plugin.wire.messages import MemoryTag, ReplicaState

__all__ = [
    "PauseReport", "ReplicaPause", "ReplicaReport", "ReplicaVerify", "UpdateReport", "VerifyReport", "gib",
]  # fmt: skip

GIB = 1 << 30
PHASES = ("scan", "agree", "stage", "seal", "commit")


class ReplicaReport(msgspec.Struct, frozen=True):
    """One replica in an update. Seconds are those of its slowest rank; `version` is what it serves now, None if unknown.

    `transport`, `install` ("copy", "standby", "streaming") and `mechanism` ("plan", "loader"): how the update went in; `why`: the
    reason. `digest`: of the whole update, equal on all replicas that took it. `stopped_s`: how long no decoding step could run;
    `waited_s`: for the step boundary before that; `install_s`: the installation alone; `verify_s`: checking digests; `prepare_s`:
    preparing a standby. `extra_bytes`: held beside the live weights for the update. `error`: why it failed, else None.

    `written`: how many parameters and buffers of all its ranks an update writes. `derived`: how many the engine makes anew of
    those (packed forms, scales). `untouched`: how many stay, because they come from no checkpoint or belong to other groups.
    `passed_over`: names that the engine's loader passes over, in this update as in the checkpoint that the engine was started
    from; their bytes are held nowhere. `lacks`: what users of this version of the engine miss, in words.
    """

    replica: str
    engine: str
    status: Literal["committed", "failed"]
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
    written: int = 0
    derived: int = 0
    untouched: int = 0
    passed_over: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


class _Shown(msgspec.Struct, frozen=True):
    """A report that is shown as `Lines`."""

    def __str__(self) -> str:
        return str(self._text())

    def __rich__(self) -> Any:
        return self._text().table()

    def _text(self) -> Lines:
        raise NotImplementedError


class UpdateReport(_Shown, frozen=True):
    """An update: `bytes` of the manifest, `seconds` from its beginning (once earlier operations are over) to its last commit,
    `phases` in seconds on the manager rank.

    Phases: agree (discover, open, begin), stage (all ranks write; gather, pack and move are within it), seal (digests
    checked, standby prepared), commit (wait for the boundary, pause, install). `messages` are all requests sent, by all
    ranks; `copies_per_byte` counts copies of a payload byte from the trainer's memory to the parameter, those inside
    the kernel included. `egress_bytes` is the payload that the trainer's ranks sent in messages (by `zmq`, `delta`) or uploaded
    (by `store`). Neither it nor `messages` includes what workers relay to each other.
    `held_bytes`: memory that the trainer's ranks keep for updates of
    the group (segments, buckets, copies); what replicas hold is their `extra_bytes`. `engine_dtypes`: with `dtype="engine"`, the
    rules by which tensors were cast to the engine's dtypes.
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
    held_bytes: int = 0
    engine_dtypes: dict[str, str] = {}

    def _text(self) -> Lines:
        took = len(self.replicas) - len(self.failed)
        phases = ", ".join(f"{name} {seconds(self.phases[name])}" for name in PHASES if name in self.phases)
        rate = f" ({gib(int(self.bytes / self.seconds))}/s)" if took and self.seconds > 0 else ""
        heading = (
            f"{self.group} version {self.version}: {took} of {len(self.replicas)} replicas serve it, "
            f"{gib(self.bytes)} in {seconds(self.seconds)}{rate}; {phases}"
        )
        rows = [
            (
                one.replica,
                one.status,
                "version unknown" if one.version is None else f"version {one.version}",
                f"stopped {seconds(one.stopped_s)}" if one.status == "committed" else "",
                "/".join(filter(None, (one.transport, one.install, one.mechanism))),
                error_text(one.error),
            )
            for one in self.replicas
        ]
        return Lines(heading, ("replica", "status", "serves", "generation", "how", "error"), rows)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held beside the trainer's tensors and the live weights, by mode: "trainer" for segments and buckets of its ranks,
        "zone/standby" for all replicas that take updates so, and so on."""
        held = {"trainer": self.held_bytes}
        for replica in self.replicas:
            if replica.install:
                mode = f"{replica.transport}/{replica.install}"
                held[mode] = held.get(mode, 0) + replica.extra_bytes
        return held

    @property
    def failed(self) -> tuple[ReplicaReport, ...]:
        """Replicas that don't serve the version."""
        return tuple(replica for replica in self.replicas if replica.status == "failed")

    def raise_failed(self) -> None:
        """Raises the first failed replica's error; returns if all serve the version."""
        for replica in self.failed:
            if replica.error is not None:
                raise WeightwireError.of(replica.error)


class ReplicaVerify(msgspec.Struct, frozen=True):
    """One replica's live parameters compared with the source, box by box of the checkpoint tensors: `boxes` were compared;
    `differ` and `unreadable` (rounded by the engine, say) name the first ones. `error`: why it did not answer, else None."""

    replica: str
    version: int | None
    boxes: int
    differ: tuple[str, ...]
    unreadable: tuple[str, ...]
    error: ErrorInfo | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and not self.differ and not self.unreadable and self.boxes > 0


class VerifyReport(_Shown, frozen=True):
    """A verification of a group over all replicas. `ok`: there is a replica, and each holds what the trainer holds."""

    group: str
    replicas: tuple[ReplicaVerify, ...]

    def _text(self) -> Lines:
        equal = sum(one.ok for one in self.replicas)
        heading = f"{self.group}: {equal} of {len(self.replicas)} replicas hold what the trainer holds"
        rows = [
            (
                one.replica,
                "equal" if one.ok else "failed" if one.error else "DIFFERENT" if one.differ else "not all readable",
                "version unknown" if one.version is None else f"version {one.version}",
                f"{one.boxes} boxes",
                "; ".join((*one.differ, *(f"unreadable: {name}" for name in one.unreadable))),
                error_text(one.error),
            )
            for one in self.replicas
        ]
        return Lines(heading, ("replica", "result", "serves", "compared", "differences", "error"), rows)

    @property
    def ok(self) -> bool:
        return bool(self.replicas) and all(replica.ok for replica in self.replicas)


class ReplicaPause(msgspec.Struct, frozen=True):
    """A replica after a pause, a sleep, a wake-up or a resumption. `state`: "serving", "paused", "asleep" or "torn"; "failed"
    where the call failed, with its `error`. `asleep`: the memory that is released, "weights" or "kv_cache"."""

    replica: str
    engine: str
    state: ReplicaState | Literal["failed"]
    asleep: tuple[MemoryTag, ...] = ()
    error: ErrorInfo | None = None


class PauseReport(_Shown, frozen=True):
    """A pause, a sleep, a wake-up or a resumption of all living replicas of the job; empty on trainer ranks above 0."""

    replicas: tuple[ReplicaPause, ...]

    def _text(self) -> Lines:
        counts: dict[str, int] = {}
        for one in self.replicas:
            counts[one.state] = counts.get(one.state, 0) + 1
        heading = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "no replicas"
        rows = [
            (
                one.replica,
                one.engine,
                one.state,
                f"released: {', '.join(one.asleep)}" if one.asleep else "",
                error_text(one.error),
            )
            for one in self.replicas
        ]
        return Lines(heading, ("replica", "engine", "state", "memory", "error"), rows)

    @property
    def failed(self) -> tuple[ReplicaPause, ...]:
        """Replicas that did not reach the requested state."""
        return tuple(replica for replica in self.replicas if replica.state == "failed")

    def raise_failed(self) -> None:
        """Raises the first failed replica's error; returns if there is none."""
        for replica in self.failed:
            if replica.error is not None:
                raise WeightwireError.of(replica.error)


class Lines:
    """A report as lines of text or as a table of rich: a heading, and rows of cells under `columns`."""

    def __init__(self, heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.heading = heading
        self.columns = columns
        self.rows = rows

    def __str__(self) -> str:
        """The heading and a line per row; columns that are empty in all rows are left out."""
        widths = {i: max(len(row[i]) for row in self.rows) for i in self._used()}
        lines = ["  ".join(row[i].ljust(width) for i, width in widths.items()).rstrip() for row in self.rows]
        return "\n".join([self.heading, *(f"  {line}" for line in lines)])

    def table(self) -> Any:
        """The same as a table of rich, which must be installed."""
        from rich.table import Table

        table = Table(title=self.heading, title_justify="left")
        used = self._used()
        for i in used:
            table.add_column(self.columns[i], overflow="fold", no_wrap=i < 2)  # names, to be copied, and a word each
        for row in self.rows:
            table.add_row(*(row[i] for i in used))
        return table

    def _used(self) -> list[int]:
        return [i for i, _ in enumerate(self.columns) if any(row[i] for row in self.rows)]


def gib(nbytes: int) -> str:
    """Bytes in GiB with three significant digits, or in smaller units where that would be nothing."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size / 10:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"


def seconds(value: float) -> str:
    """Seconds, or milliseconds below one tenth of a second."""
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.3g} ms"


def error_text(info: ErrorInfo | None) -> str:
    return "" if info is None else f"{info.kind}: {info.message}" + (f" -- {info.hint}" if info.hint else "")
