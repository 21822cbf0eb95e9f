"""The worker's dict of named weight-update groups, and the dispatch of requests to them. A group is in `group`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from inference_plugin.group import WeightUpdateGroup
from inference_plugin.install.contract import Installer
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import (
    EngineUnsupported,
    ProtocolError,
    ReplicaAsleep,
    VersionConflict,
    first_few,
)
from inference_plugin.wire.messages import (
    Abort,
    Begin,
    Body,
    Bucket,
    CloseGroup,
    Done,
    GroupOpened,
    GroupStatus,
    OpenGroup,
    Relay,
    Release,
    Renew,
    Seal,
    Sender,
)

__all__ = ["GroupTable"]


class GroupTable:
    """All groups of one worker: `dict[str, WeightUpdateGroup]`, and the dispatch of requests to them."""

    def __init__(
        self,
        replica: str,
        rank: int,
        make_installer: Callable[[str], Installer],
        decoding: Callable[[], bool] = lambda: False,
        config: Config | None = None,
    ) -> None:
        self._decoding = decoding
        self._config = config or Config()
        self.on_checked: Callable[[], None] = lambda: None
        """Called, by any thread, when a `Seal` that wasn't done can be answered."""
        self.groups: dict[str, WeightUpdateGroup] = {}
        self._replica = replica
        self._rank = rank
        self._make_installer = make_installer
        self._lock = threading.RLock()
        self._opening = 0
        self._asleep = False

    def handle(self, request: Body, payload: memoryview | None) -> Body:
        """The reply to a group request. Raises typed errors; then nothing was applied."""
        if isinstance(request, OpenGroup):
            with self._lock:
                self._check_awake()
                self._opening += 1
            try:
                return self._open(request)
            finally:
                with self._lock:
                    self._opening -= 1
        with self._lock:
            if isinstance(request, CloseGroup):
                if (closed := self.groups.pop(request.group, None)) is not None:
                    closed.close()
                return Done()
            if isinstance(request, Abort) and request.group not in self.groups:
                return Done()
            if isinstance(request, Begin):
                self._check_awake()
                return self.named(request.group).begin(request)
            if isinstance(request, Bucket):
                if payload is None:
                    raise ProtocolError("a bucket without its payload frame")
                return self.named(request.group).bucket(request, payload)
            if isinstance(request, Relay):
                return self.named(request.group).relay(request)
            if isinstance(request, Renew):
                return self.named(request.group).renew(request.txn)
            if isinstance(request, Release):
                if request.group in self.groups:
                    self.groups[request.group].release_memory()
                return Done()
            if isinstance(request, Abort):
                return self.named(request.group).abort(request.txn, request.reason)
            if not isinstance(request, Seal):
                raise ProtocolError(f"a worker takes no {type(request).__name__}")
            group = self.named(request.group)
            return group.answer_seal(group.start_seal(request))

    def named(self, name: str) -> WeightUpdateGroup:
        """The group of that name. Raises `ProtocolError` that lists those there are."""
        if (group := self.groups.get(name)) is None:
            there = ", ".join(sorted(self.groups)) or "none"
            raise ProtocolError(f"no weight-update group is named {name!r}; open: {there}", group=name)
        return group

    def statuses(self) -> tuple[GroupStatus, ...]:
        with self._lock:
            return tuple(group.status() for group in self.groups.values())

    def senders(self) -> Sequence[Sender]:
        """Whoever has a transaction open, or memory kept for its next one."""
        with self._lock:
            groups = self.groups.values()
            return [
                *(group.transaction.sender for group in groups if group.transaction is not None),
                *(group.installed.sender for group in groups if group.installed is not None and group.holds_memory),
            ]

    def next_expiry_s(self) -> float | None:
        """When to call `expire` next, on `time.monotonic()`'s clock: at the nearest end of a lease."""
        with self._lock:
            return min((g.expires_at_s for g in self.groups.values() if g.transaction), default=None)

    def expire(self, sender_is_gone: Callable[[Sender], bool]) -> None:
        """Drops what nobody will finish."""
        with self._lock:
            for group in list(self.groups.values()):
                group.expire(time.monotonic(), sender_is_gone)

    # --- the engine's own thread -------------------------------------------------------------------------------------

    def may_sleep(self, *, discard: bool) -> None:
        """From now on no update begins, because the memory of the weights goes. Raises `VersionConflict` if one is on its
        way, `EngineUnsupported` if it is to `discard` weights that no open group could bring back."""
        with self._lock:
            under_way = [group.name for group in self.groups.values() if group.transaction is not None]
            if under_way or self._opening:
                raise VersionConflict(
                    f"an update of {', '.join(under_way) or 'a group'} is on its way",
                    hint="let it end, or abort it, before the replica falls asleep",
                )
            if discard and self.groups and all(group.partial for group in self.groups.values()):
                raise EngineUnsupported(
                    f"weights would be discarded that no open group brings back: {first_few(sorted(self.groups))} are parts",
                    hint="use level 1, which keeps the weights on the host",
                )
            self._asleep = True

    def awake(self) -> None:
        """The memory of the weights is there."""
        with self._lock:
            self._asleep = False

    def tear(self, reason: str) -> None:
        """No group knows any longer what it holds."""
        for group in list(self.groups.values()):
            group.tear(reason)

    def _check_awake(self) -> None:
        if self._asleep:
            raise ReplicaAsleep("the replica is asleep, the memory of its weights is released")

    def close(self) -> None:
        """Closes every group."""
        with self._lock:
            while self.groups:
                self.groups.popitem()[1].close()

    def _open(self, request: OpenGroup) -> GroupOpened:
        others = {group.name: group.installer.claims for group in self.groups.values() if group.name != request.group}
        group = self.groups.get(request.group)
        if group is not None:
            return group.open(request, others)
        group = WeightUpdateGroup(
            request.group,
            self._rank,
            self._replica,
            self._lock,
            self._make_installer(request.group),
            self._decoding,
            self._config,
            lambda: self.on_checked(),
        )
        try:
            opened = group.open(request, others)
        except BaseException:
            with self._lock:
                group.close()
            raise
        with self._lock:
            self.groups[request.group] = group
        return opened
