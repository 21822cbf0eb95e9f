"""All weight-update groups of one worker, as one pure state machine: an event and a time in, actions out.

No socket, thread, lock, clock or memory is in here, and nothing blocks. What takes time is an action (`StartWork`), and its
end is an event (`WorkEnded`). The shell (`groups`) calls `on` under one short lock and performs the actions outside it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from typing import Any

from inference_plugin.wire.errors import (
    EngineUnsupported,
    ManifestMismatch,
    ProtocolError,
    ReplicaAsleep,
    VersionConflict,
    WeightwireError,
    asleep_by_engine,
    first_few,
)
from inference_plugin.wire.groups import is_apart
from inference_plugin.wire.messages import (
    Abort,
    Begin,
    Body,
    Bucket,
    CloseGroup,
    Done,
    GroupStatus,
    OpenGroup,
    Release,
    Sender,
)
from inference_plugin.worker import commit, requests
from inference_plugin.worker.actions import Action, Fail, Reply, Terms
from inference_plugin.worker.events import (
    Awake,
    Event,
    FellAsleep,
    ForgetVersions,
    MaySleep,
    Process,
    Request,
    Tear,
    TearAll,
    Tick,
    WorkEnded,
)
from inference_plugin.worker.group import Shared, WeightUpdateGroup
from inference_plugin.worker.results import work_ended
from inference_plugin.worker.torn import MODEL

__all__ = ["MAX_GROUPS", "WorkerGroups"]

MAX_GROUPS = 1024
"""Each has a thread of its own."""


class WorkerGroups:
    """State of all groups of the worker of `rank`. `here` is the boot id of its host: processes of other hosts can't be
    watched."""

    def __init__(self, rank: int, here: str) -> None:
        self.groups: dict[str, WeightUpdateGroup] = {}
        self.unopened: dict[str, WeightUpdateGroup] = {}
        """Groups that have no agreed terms yet."""
        self.closing: list[WeightUpdateGroup] = []
        self.asleep = self.asleep_by_engine = False
        self._here = here
        self._members = 0
        self.shared = Shared(rank, self._accept, self._left, self._unknown)
        self.torn = self.shared.torn

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Returns the actions for `event`, in order. If handling it raises, the error is the answer to its `asker`."""
        self.shared.now_s = max(now_s, self.shared.now_s)
        try:
            self._on(event)
        except WeightwireError as error:
            if (asker := getattr(event, "asker", None)) is None:
                raise
            self.shared.actions.append(Fail(asker, copy.copy(error)))  # its traceback holds the payload
        if self.closing:
            self.closing = [group for group in self.closing if not group.gone]
        actions, self.shared.actions = self.shared.actions, []
        return actions

    @property
    def wakes_at_s(self) -> float:
        """When a `Tick` is due if nothing happens before; infinity if none is."""
        return min([group.wakes_at_s for group in self.groups.values()], default=math.inf)

    def processes(self) -> set[Process]:
        """Processes of this host whose end `Tick` should tell of."""
        senders = [sender for group in self.groups.values() for sender in group.senders]
        return {(sender.pid, sender.start_ticks) for sender in senders if sender.pid and sender.boot_id == self._here}

    def statuses(self) -> tuple[GroupStatus, ...]:
        return tuple(group.status() for group in self.groups.values())

    def named(self, name: str) -> WeightUpdateGroup:
        """The group of that name. Raises `ProtocolError` that lists those there are."""
        if (group := self.groups.get(name)) is None:
            there = ", ".join(sorted(self.groups)) or "none"
            raise ProtocolError(f"no weight-update group is named {name!r}; open: {there}", group=name)
        return group

    # --- events ------------------------------------------------------------------------------------------------------

    def _on(self, event: Event) -> None:
        if isinstance(event, Request):
            self._request(event.asker, event.body, event.payload)
        elif isinstance(event, WorkEnded):
            if (found := self.shared.under_way.pop(event.number, None)) is not None:
                work_ended(*found, event.result, event.error)
        elif (handle := commit.handlers.get(type(event))) is not None:
            handle(self.named(event.group), event)  # type: ignore[union-attr] # each of them has one
        elif isinstance(event, Tick):
            self._tick(event.ended)
        elif isinstance(event, Tear):
            if event.group in self.groups:
                commit.tear(self.groups[event.group], event.reason, event.txn)
        elif isinstance(event, TearAll):
            self._tear_all(event.reason)
        elif isinstance(event, ForgetVersions):
            self._forget_versions(event.asker, event.reason)
        elif isinstance(event, MaySleep):
            self._may_sleep(event.asker, event.discard)
        elif isinstance(event, FellAsleep):
            self.asleep = self.asleep_by_engine = True
        elif isinstance(event, Awake):
            self.asleep = self.asleep_by_engine = False
        else:
            self._close_all()

    def _request(self, asker: Any, body: Body, payload: memoryview | None) -> None:
        if (handle := requests.handlers.get(type(body))) is not None:
            if isinstance(body, Begin):
                self._check_awake()
            if isinstance(body, (Abort, Release)) and body.group not in self.groups:
                self.shared.actions.append(Reply(asker, Done()))
            else:
                handle(self.named(body.group), asker, body)  # type: ignore[union-attr] # each of them has one
        elif isinstance(body, Bucket):
            if payload is None and not body.lies_at:
                raise ProtocolError("a bucket without its payload frame")
            requests.bucket(self.named(body.group), asker, body, memoryview(b"") if payload is None else payload)
        elif isinstance(body, OpenGroup):
            self._open(asker, body)
        elif isinstance(body, CloseGroup):
            self._close(asker, body.group)
        else:
            raise ProtocolError(f"a worker takes no {type(body).__name__}")

    def _tick(self, ended: Collection[Process]) -> None:
        def is_gone(sender: Sender) -> bool:
            return sender.boot_id == self._here and (sender.pid, sender.start_ticks) in ended

        for group in self.groups.values():
            group.tick(is_gone)

    # --- what concerns several groups --------------------------------------------------------------------------------

    def _check_awake(self) -> None:
        if self.asleep_by_engine:
            raise asleep_by_engine()
        if self.asleep:
            raise ReplicaAsleep("the replica is asleep, the memory of its weights is released")

    def _open(self, asker: Any, request: OpenGroup) -> None:
        self._check_awake()
        name = request.group
        group = self.groups.get(name) or self.unopened.get(name)
        if group is None:
            if len(self.groups) + len(self.unopened) >= MAX_GROUPS:
                raise ProtocolError(f"{MAX_GROUPS} groups are open, which is the limit", hint="close a group first")
            self._members += 1
            group = self.unopened[name] = WeightUpdateGroup(name, self._members, self.shared)
        requests.open_group(group, asker, request)

    def _accept(self, group: WeightUpdateGroup, terms: Terms) -> None:
        """Registers a group whose terms were agreed. Raises `ManifestMismatch` where another group writes the same
        parameters, `TornReplica` where they are too few to heal the group."""
        self.torn.check(group.name, terms.claims, whole=terms.whole)
        for other in self.groups.values():
            if other is not group and (shared := sorted(terms.claims & other.claims)):
                raise ManifestMismatch(
                    f"parameters that group {other.name!r} writes already: {first_few(shared)}",
                    hint=f"update them as group {other.name!r}, or close that group first: `weightwire close {other.name}`, or "
                    "close_group() of its manager",
                )
        if self.unopened.get(group.name) is group:
            del self.unopened[group.name]
            self.groups[group.name] = group

    def _left(self, group: WeightUpdateGroup) -> None:
        """Closes a group that never got terms and has no opening left."""
        if self.unopened.get(group.name) is group and not group.busy:
            self._close(None, group.name)

    def _unknown(self) -> dict[str, str]:
        of_open = {group.name: group.unknown for group in self.groups.values() if group.unknown}
        return self.shared.closed.unknown | of_open

    def _close(self, asker: Any, name: str) -> None:
        group = self.groups.get(name) or self.unopened.get(name)
        if group is None:
            self.shared.actions.append(Reply(asker, Done()))
            return
        if group.state == "committing":
            raise VersionConflict("the group is being committed")
        self.groups.pop(name, None)
        self.unopened.pop(name, None)
        self.closing.append(group)
        if (group.installed is not None or group.unknown) and not is_apart(name):
            self.shared.closed.add(name, group.foreign or group.written, group.unknown)
        group.close(asker)

    def _close_all(self) -> None:
        for group in [*self.groups.values(), *self.unopened.values()]:
            self.closing.append(group)
            group.close()
        self.groups.clear()
        self.unopened.clear()

    def _tear_all(self, reason: str) -> None:
        if all(group.partial for group in self.groups.values()):
            self.torn.add(MODEL, None)
        for group in self.groups.values():
            commit.tear(group, reason)

    def _forget_versions(self, asker: Any, reason: str) -> None:
        if reason:
            self.shared.closed.forget(reason)
            for group in self.groups.values():
                if not is_apart(group.name):
                    commit.forget_version(group, reason)
        self.shared.actions.append(Reply(asker, self._unknown()))

    def _may_sleep(self, asker: Any, discard: bool) -> None:
        """From now on no update begins, because the memory of the weights goes. Raises `VersionConflict` if one is on its
        way, `EngineUnsupported` where weights would be discarded that no open group could bring back."""
        under_way = [group.name for group in [*self.groups.values(), *self.unopened.values()] if group.busy]
        if under_way or self.closing:
            raise VersionConflict(
                f"an update of {', '.join(under_way) or 'a group'} is on its way",
                hint="let it end, or abort it, before the replica falls asleep",
            )
        if discard and self.groups and all(group.partial for group in self.groups.values()):
            raise EngineUnsupported(
                f"weights would be discarded that no open group brings back: {first_few(sorted(self.groups))} are parts",
                hint="use level 1, which keeps the weights on the host",
            )
        self.asleep = True
        self.shared.actions.append(Reply(asker, None))
