"""The error tree. Every error names where it happened and says, in one sentence, what to do next.

An error crosses processes as an `ErrorInfo` and is raised on the other side as the same class with the same fields.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec

__all__ = [
    "ArgumentError", "AuthError", "BatchError", "CommitFailed", "ConfigError", "DigestMismatch", "EngineUnsupported",
    "ErrorInfo", "FetchFailed", "FetchFailure", "ManagerClosed", "ManifestMismatch", "NotFetched", "NotFinite",
    "PeerLost", "PoolClosed", "ProtocolError", "ReplicaAsleep", "RolloutFailed", "StaleRollout", "StoreFull",
    "SyncTimeout", "TornReplica", "TransportUnavailable", "UnknownKey", "VersionConflict", "WeightwireError",
    "first_few", "lacks_resources",
]  # fmt: skip


MAX_TEXT, MAX_NAME = 1 << 16, 256
"""Longest text and name of an error that travels, in characters; the rest is cut off."""

MAX_NUMBER = 1 << 62
MAX_DTYPE_RULES = 1 << 12
"""Rules of dtypes travel all or not at all: some of them would decide otherwise."""

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
ShortName = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Number = Annotated[int, msgspec.Meta(gt=-MAX_NUMBER, lt=MAX_NUMBER)]


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `WeightwireError` as it travels."""

    kind: ShortName
    message: Text
    hint: Text = ""
    side: ShortName = ""
    replica: ShortName = ""
    rank: Number | None = None
    group: ShortName = ""
    phase: ShortName = ""
    version: Number | None = None
    dtypes: Annotated[dict[ShortName, ShortName], msgspec.Meta(max_length=MAX_DTYPE_RULES)] = {}


WHERE = ("side", "replica", "rank", "group", "phase", "version")
"""Fields of an error that say where it happened."""

_KINDS: dict[str, type[WeightwireError]] = {}
"""Subclasses of `WeightwireError` by name."""


class WeightwireError(Exception):
    """Base of every error that Weightwire raises.

    Fields (empty or None where they don't apply): `side` ("trainer", "worker", "coordinator", "manager", "owner", "rollout
    pool", "rollout worker"), `replica`, `rank` (the side's own rank), `group`, `phase` ("open", "begin", "stage", "seal",
    "commit", ...), `version`; `hint` says what to do next. `report`: what became of each replica, where `SyncManager.update`
    raised this for a finished update; it does not travel. `dtypes`: where dtypes differ, those that the engine takes: rules by
    pattern, the first match wins.
    """

    default_hint = ""
    report: Any = None  # an `UpdateReport`; reports are made of errors, so this file cannot import them
    dtypes: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        _KINDS.setdefault(cls.__name__, cls)

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        side: str = "",
        replica: str = "",
        rank: int | None = None,
        group: str = "",
        phase: str = "",
        version: int | None = None,
    ) -> None:
        self.message = _writable(message)
        super().__init__(self.message)
        self.hint = _writable(hint) or self.default_hint
        self.side = side
        self.replica = replica
        self.rank = rank
        self.group = group
        self.phase = phase
        self.version = version

    def __str__(self) -> str:
        where = [f"{key}={value}" for key in WHERE if (value := getattr(self, key)) not in ("", None)]
        text = self.message
        if where:
            text += f" [{' '.join(where)}]"
        if self.hint:
            text += f" -- {self.hint}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightwireError.of, (self.info(),)

    def at(self, **where: Any) -> WeightwireError:
        """The same error with fields that were still empty filled in; returns itself."""
        for key, value in where.items():
            if getattr(self, key) in ("", None):
                setattr(self, key, value)
        return self

    def advise(self, hint: str) -> WeightwireError:
        """The same error with this hint, unless it has a more specific one than its class; returns itself."""
        if self.hint == self.default_hint:
            self.hint = hint
        return self

    def info(self) -> ErrorInfo:
        """The error as it travels. Longer texts are cut off, so that it arrives."""
        return ErrorInfo(
            kind=type(self).__name__,
            message=_cut(self.message, MAX_TEXT),
            hint=_cut(self.hint, MAX_TEXT),
            side=_cut(self.side, MAX_NAME),
            replica=_cut(self.replica, MAX_NAME),
            rank=_within(self.rank),
            group=_cut(self.group, MAX_NAME),
            phase=_cut(self.phase, MAX_NAME),
            version=_within(self.version),
            dtypes=_travelling(self.dtypes),
        )

    @staticmethod
    def of(info: ErrorInfo) -> WeightwireError:
        """The error that `info` describes; a kind that is unknown, or made of other arguments, becomes a plain
        `WeightwireError`."""
        where = {key: getattr(info, key) for key in WHERE}
        try:
            error = _KINDS.get(info.kind, WeightwireError)(info.message, hint=info.hint, **where)
        except Exception:  # noqa: BLE001 -- a subclass of somebody's own that is made of other arguments
            error = WeightwireError(f"{info.kind}: {info.message}", hint=info.hint, **where)
        error.dtypes = info.dtypes
        return error

    @staticmethod
    def wrap(error: BaseException) -> WeightwireError:
        """`error` itself if it is ours, else a `WeightwireError` that names its type and text."""
        if isinstance(error, WeightwireError):
            return error
        short = lacks_resources(error)
        hint = "the process has reached a limit of memory or of processes (`ulimit -a`); raise it" if short else ""
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            hint = "raise the limit of open files (ulimit -n)"
        wrapped = WeightwireError(f"{type(error).__name__}: {error}", hint=hint)
        wrapped.__cause__ = error
        return wrapped


def lacks_resources(error: BaseException) -> bool:
    """Whether Python, numpy or torch found no memory or could start no thread: that says nothing about what was being done."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    told = (
        ("can't allocate memory", "Cannot allocate memory", "out of memory", "can't start new thread")
        if isinstance(error, RuntimeError)
        else ()
    )
    return isinstance(error, MemoryError) or any(words in str(error) for words in told)


class ProtocolError(WeightwireError):
    """A message that is malformed, too large, out of order or of another protocol version."""


class ManifestMismatch(WeightwireError):
    """Names, shapes, dtypes or slices that don't agree with what the other side expects."""

    default_hint = "compare the trainer's names, shapes and dtypes with the engine's model; nothing was changed"


class DigestMismatch(WeightwireError):
    """Bytes that are not what the trainer meant."""

    default_hint = "the update was dropped and the old version is served; send it again"


class VersionConflict(WeightwireError):
    """A version that is not newer than the installed one, or a transaction that a later one replaced."""

    default_hint = "versions of a group must increase; `weightwire status` shows the installed one"


class SyncTimeout(WeightwireError, TimeoutError):
    """A wait whose deadline passed."""

    default_hint = (
        "`weightwire status` shows which replicas answer; call it again, with more time if they were only slow"
    )


class PeerLost(WeightwireError, ConnectionError):
    """A process of the other side that ended."""

    default_hint = "`weightwire status` shows which replicas are left; restart what ended"


class TransportUnavailable(WeightwireError):
    """A transport that does not exist or can't work here; the text lists the transports that can."""


class CommitFailed(WeightwireError):
    """An installation that failed and was undone: the old version is served."""

    default_hint = "the old version is served; look at the cause before sending the update again"


class ManagerClosed(CommitFailed):
    """The manager was closed: this operation did not begin."""

    default_hint = "make a new SyncManager; the replicas serve what they served"


class TornReplica(WeightwireError):
    """An installation failed half-way and could not be undone; the replica refuses to generate."""

    default_hint = "send a full update: it heals the replica"


class ReplicaAsleep(WeightwireError):
    """The request needs the memory of the weights, and the replica has released it."""

    default_hint = "call wake_up(tags=['weights']) first, on the manager that put it to sleep"


def asleep_by_engine() -> ReplicaAsleep:
    """The error where the engine's own command, and not a manager, released the memory."""
    return ReplicaAsleep(
        "a command of the engine's own has released the memory of its weights",
        hint="wake it by the engine's own command; its weights are enough",
    )


class NotFinite(WeightwireError, ValueError):
    """Weights with NaN or infinity, which `check_finite` refuses; the text names the tensors."""

    default_hint = (
        "nothing was applied and the old version is served; look at the loss and the gradients of the last step, and at casts "
        "that overflow; check_finite=False sends such weights"
    )


class EngineUnsupported(WeightwireError):
    """An engine version or configuration that the plug-in can't serve."""


class ArgumentError(WeightwireError, TypeError, ValueError):
    """An argument of a call that cannot be right; the text says what it is and what is taken."""


class ConfigError(WeightwireError, ValueError):
    """A setting has an invalid value; the text names field, variable, value and what is allowed."""

    default_hint = "`weightwire config` shows every setting and where it comes from"


class RolloutFailed(WeightwireError):
    """The user's function raised an error for this task; the text names the error."""

    default_hint = "the worker's log has the traceback; the task left nothing behind and may be submitted again"


class StaleRollout(WeightwireError):
    """A rollout was generated with weights that are older than `max_staleness` allows; its rows were cleared."""

    default_hint = "submit the task again, have fewer tasks in flight, or allow a larger max_staleness"


class PoolClosed(WeightwireError):
    """The rollout pool was closed: it takes no task, and what was pending has ended."""

    default_hint = "make a new RolloutPool; workers find it by themselves"


class AuthError(WeightwireError):
    """A peer or an address that is not allowed."""


class FetchFailed(WeightwireError):
    """Shards that could not be fetched. `failures` has one item for each of them; it is empty where the error comes from
    another process, whose text lists the first ones."""

    default_hint = "what arrived is kept: fetch again, or go on without the tasks that are lost"

    def __init__(self, message: str, *, failures: tuple[FetchFailure, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.failures = failures


class FetchFailure(NamedTuple):
    """One shard that could not be fetched: whose it is, and why."""

    task_id: str
    key: str
    owner: str
    error: WeightwireError


class StoreFull(WeightwireError):
    """The byte budget of a store has no room for what was put; nothing of it was stored."""

    default_hint = "clear tasks that are finished, put with a longer timeout_s, or give the store a larger budget_bytes"


class BatchError(WeightwireError, ValueError):
    """Rows, keys, shapes or values that a distributed batch can't hold or combine; no batch was changed."""


class NotFetched(BatchError):
    """Access to rows of a distributed batch that are not in this process."""

    default_hint = "call batch.fetch() first, or `await batch.afetch()` inside an event loop"


class UnknownKey(BatchError, KeyError):
    """A key that a distributed batch doesn't have; the text lists its keys."""

    default_hint = "`key in batch` tells whether it has a key"


def first_few(names: list[str] | tuple[str, ...], limit: int = 8) -> str:
    """`names` for an error text: the first `limit` of them, and how many there are in all."""
    shown = ", ".join(names[:limit])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > limit else f"{shown} ({len(names)} in all)"


def _cut(text: str, limit: int) -> str:
    """A text, cut to what travels."""
    text = _writable(text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _travelling(rules: Mapping[str, str]) -> dict[str, str]:
    fit = len(rules) <= MAX_DTYPE_RULES and all(len(pattern) <= MAX_NAME for pattern in rules)
    return dict(rules) if fit else {}


def _within(number: int | None) -> int | None:
    return number if number is not None and -MAX_NUMBER < number < MAX_NUMBER else None


def _writable(text: str) -> str:
    """`text` without surrogates. Python's errors hold them for file names that are not UTF-8, and no message can encode
    them."""
    return text.encode("utf-8", "backslashreplace").decode()
