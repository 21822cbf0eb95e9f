"""Owners that are not our own stores (Ray's): which module serves an address, and how a fetch or clear asks that module.

A backend's library may block (Ray's calls to its control service do), so it runs on a daemon thread, and the caller takes
what has arrived by the deadline. A backend sees arrivals of its own: what comes too late changes nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from inference_plugin.wire.errors import ProtocolError, WeightwireError
from trainer_adapters.batch.exchanges import Arrivals
from trainer_adapters.batch.parts import LocalPart
from trainer_adapters.batch.records import Entry, Owner, ShardId

__all__ = ["Backend", "BackendClear", "BackendFetch", "Until", "scheme_of_backend"]

BACKENDS = {"ray": "trainer_adapters.batch.ray_rows"}
"""By the scheme of an owner's address: a module with the functions of `Backend`, imported when it is needed."""

LOOK_S = 1.0
"""Longest time, in seconds, until a backend notices that its fetch was cancelled."""

GRACE_S = 0.25
"""Time, in seconds, that a backend has after the deadline to hand over the rows that it got."""


@dataclass
class Until:
    """How long a backend may work: until `deadline_s` (`time.monotonic`), or until its caller no longer waits."""

    deadline_s: float
    is_cancelled: bool = False

    def left_s(self) -> float:
        """Seconds that the next wait may take; 0 once the time is up."""
        return 0.0 if self.is_cancelled else max(0.0, min(LOOK_S, self.deadline_s - time.monotonic()))


class Backend(Protocol):
    """The rows of one kind of owner. Both functions may block until `until`; the caller runs them on a thread of its own."""

    def fetch(self, wanted: Sequence[tuple[Owner, Sequence[Entry]]], arrivals: Arrivals, until: Until) -> None:
        """Keeps or fails each entry in `arrivals`; an entry that is neither at the end is late. A `WeightwireError` fails all."""

    def clear(
        self, asked: Sequence[tuple[Owner, Sequence[str]]], until: Until
    ) -> list[Sequence[str] | WeightwireError]:
        """For each owner: the ids that it does not hold, or the error that kept us from asking it."""


def scheme_of_backend(owner: Owner) -> str | None:
    """The scheme of an owner's address if a backend serves that scheme, else None: our own stores, and unknown schemes."""
    scheme = owner.address.partition("://")[0]
    return scheme if scheme in BACKENDS else None


class BackendFetch:
    """One backend's part of a fetch, on a thread. The constructor starts it."""

    def __init__(self, scheme: str, wanted: Sequence[tuple[Owner, Sequence[Entry]]], deadline_s: float) -> None:
        self._entries = [entry for _, entries in wanted for entry in entries]
        self._have: dict[ShardId, LocalPart] = {}
        self._arrivals = Arrivals(self._have)
        self._until = Until(deadline_s)
        self._call = _Call(lambda: _backend(scheme).fetch(wanted, self._arrivals, self._until), f"weightwire-{scheme}")

    def finish(self, arrivals: Arrivals, late: WeightwireError, is_cancelled: Callable[[], bool]) -> None:
        """Waits until the deadline and hands over the shards that arrived or failed; all others fail with `late`."""
        while not is_cancelled() and self._until.left_s() and not self._call.wait(self._until.left_s()):
            pass
        self._until.is_cancelled = is_cancelled()
        if not self._until.is_cancelled:
            self._call.wait(GRACE_S)
        have, failed = dict(self._have), dict(self._arrivals.failed)
        for entry in self._entries:
            if (part := have.get(entry.shard)) is not None:
                arrivals.accept(entry.shard, part)
            else:
                arrivals.fail((entry,), failed.get(entry.shard) or self._call.error or late)

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._until.is_cancelled = True


class BackendClear:
    """One backend's part of a clear, on a thread. The constructor starts it."""

    def __init__(self, scheme: str, asked: Sequence[tuple[Owner, Sequence[str]]], deadline_s: float) -> None:
        self.asked = asked
        self._until = Until(deadline_s)
        self._unknown: list[Sequence[str] | WeightwireError] = []
        self._call = _Call(self._run(scheme), f"weightwire-{scheme}")

    def finish(self, late: WeightwireError) -> list[Sequence[str] | WeightwireError]:
        """For each of `asked`: the ids that its owner does not hold, or the error that kept us from asking it."""
        while self._until.left_s() and not self._call.wait(self._until.left_s()):
            pass
        is_done = self._call.wait(GRACE_S)
        self._until.is_cancelled = True
        if is_done and self._call.error is None:
            return self._unknown
        return [self._call.error or late] * len(self.asked)

    def _run(self, scheme: str) -> Callable[[], None]:
        return lambda: self._unknown.extend(_backend(scheme).clear(self.asked, self._until))


class _Call:
    """A call on a daemon thread: if it blocks for ever, neither the caller nor the end of the process waits for it."""

    def __init__(self, function: Callable[[], None], name: str) -> None:
        self.error: WeightwireError | None = None
        self._function = function
        self._is_done = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        return self._is_done.wait(timeout_s)

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._is_done.set)
            try:
                self._function()
            except WeightwireError as error:
                self.error = error
            except Exception as error:  # noqa: BLE001 -- whatever a backend's library raises fails its shards
                self.error = ProtocolError(f"{type(error).__name__}: {error}")
                self.error.__cause__ = error


def _backend(scheme: str) -> Backend:
    return cast(Backend, importlib.import_module(BACKENDS[scheme]))
