"""The error tree. Every error says where it happened and, in one sentence, what to do next.

An error crosses processes as an `ErrorInfo` and is raised on the other side as the same class with the same fields.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "AuthError",
    "CommitFailed",
    "ConfigError",
    "DigestMismatch",
    "EngineUnsupported",
    "ErrorInfo",
    "ManifestMismatch",
    "PeerLost",
    "ProtocolError",
    "ReplicaAsleep",
    "SyncTimeout",
    "TornReplica",
    "TransportUnavailable",
    "VersionConflict",
    "WeightwireError",
    "first_few",
]


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `WeightwireError` as it travels."""

    kind: str
    message: str
    hint: str = ""
    side: str = ""
    replica: str = ""
    rank: int | None = None
    group: str = ""
    phase: str = ""
    version: int | None = None


class WeightwireError(Exception):
    """Base of every error that Weightwire raises.

    Fields (empty or None where they don't apply): `side` ("trainer", "worker", "front", "manager"), `replica`, `rank`
    (the side's own rank), `group`, `phase` ("open", "begin", "stage", "seal", "commit", ...), `version`; `hint` says
    what to do next.
    """

    default_hint = ""

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
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint
        self.side = side
        self.replica = replica
        self.rank = rank
        self.group = group
        self.phase = phase
        self.version = version

    def __str__(self) -> str:
        where = [
            f"{key}={value}"
            for key in ("side", "replica", "rank", "group", "phase", "version")
            if (value := getattr(self, key)) not in ("", None)
        ]
        text = self.message
        if where:
            text += f" [{' '.join(where)}]"
        if self.hint:
            text += f" -- {self.hint}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return raise_free, (self.info(),)

    def at(self, **where: Any) -> WeightwireError:
        """The same error with fields that were still empty filled in; returns itself."""
        for key, value in where.items():
            if getattr(self, key) in ("", None):
                setattr(self, key, value)
        return self

    def info(self) -> ErrorInfo:
        """The error as it travels."""
        return ErrorInfo(
            kind=type(self).__name__,
            message=self.message,
            hint=self.hint,
            side=self.side,
            replica=self.replica,
            rank=self.rank,
            group=self.group,
            phase=self.phase,
            version=self.version,
        )

    @staticmethod
    def of(info: ErrorInfo) -> WeightwireError:
        """The error that `info` describes; an unknown kind becomes a plain `WeightwireError`."""
        kind = next((cls for cls in _tree(WeightwireError) if cls.__name__ == info.kind), WeightwireError)
        return kind(
            info.message,
            hint=info.hint,
            side=info.side,
            replica=info.replica,
            rank=info.rank,
            group=info.group,
            phase=info.phase,
            version=info.version,
        )

    @staticmethod
    def wrap(error: BaseException) -> WeightwireError:
        """`error` itself if it is ours, else a `WeightwireError` that names its type and text."""
        if isinstance(error, WeightwireError):
            return error
        wrapped = WeightwireError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped


class ProtocolError(WeightwireError):
    """A message that is malformed, too large, out of order or of another protocol version."""


class ManifestMismatch(WeightwireError):
    """Names, shapes, dtypes or slices that don't agree with what the other side expects."""

    default_hint = "compare the trainer's names, shapes and dtypes with the engine's model; nothing was changed"


class DigestMismatch(WeightwireError):
    """Bytes that are not what the trainer meant."""

    default_hint = "the update was dropped and the old version is served; send it again"


class VersionConflict(WeightwireError):
    """A version that is not newer than the installed one, or a transaction that another one overtook."""

    default_hint = "versions of a group must increase; `weightwire status` shows the installed one"


class SyncTimeout(WeightwireError, TimeoutError):
    """A wait whose deadline passed."""

    default_hint = "the old version is served; the next update needs no restart"


class PeerLost(WeightwireError, ConnectionError):
    """A process on the other side that is gone."""

    default_hint = "the old version is served by the survivors; the next update goes to those that are there"


class TransportUnavailable(WeightwireError):
    """A transport that doesn't exist or can't work here; the text lists those that can."""


class CommitFailed(WeightwireError):
    """An installation that failed and was undone: the old version is served."""

    default_hint = "the old version is served; look at the cause before sending the update again"


class TornReplica(WeightwireError):
    """An installation failed half-way and could not be undone; the replica refuses to generate."""

    default_hint = "send a full update: it heals the replica"


class ReplicaAsleep(WeightwireError):
    """What was asked for needs the memory of the weights, and the replica has released it."""

    default_hint = "call wake_up(tags=['weights']) first, on the manager that put it to sleep"


class EngineUnsupported(WeightwireError):
    """An engine version or configuration that the plug-in can't serve."""


class ConfigError(WeightwireError, ValueError):
    """A setting that can't be meant; the text names field, variable, value and what is allowed."""

    default_hint = "`weightwire config` shows every setting and where it comes from"


class AuthError(WeightwireError):
    """A peer or an address that is not allowed."""


def raise_free(info: ErrorInfo) -> WeightwireError:
    """Rebuilds an error (for `copy` and for frameworks that carry exceptions between their own processes)."""
    return WeightwireError.of(info)


def first_few(names: list[str] | tuple[str, ...], limit: int = 8) -> str:
    """`names` for an error text: the first `limit` of them, and how many there are in all."""
    shown = ", ".join(names[:limit])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > limit else f"{shown} ({len(names)} in all)"


def _tree(root: type[WeightwireError]) -> list[type[WeightwireError]]:
    return [root, *(cls for child in root.__subclasses__() for cls in _tree(child))]
