"""Tells the training program's listeners and plug-ins (`inference_plugin.plugins`) what a manager does."""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias, get_args

from inference_plugin.plugins import plugin_manager
from inference_plugin.wire.errors import ArgumentError

__all__ = ["Event", "Events", "harmless", "phase_begins"]

logger = logging.getLogger(__name__)

Event: TypeAlias = Literal["staged", "committed", "failed", "replica_joined", "replica_lost", "replica_state"]

ARGUMENTS: dict[Event, tuple[str, ...]] = {
    "staged": ("group", "version", "seconds"),
    "committed": ("report",),
    "failed": ("group", "version", "error"),
    "replica_joined": ("group", "card"),
    "replica_lost": ("group", "replica", "reason"),
    "replica_state": ("group", "status"),
}
"""What a listener is called with, by name."""


class Events:
    """Listeners by event. A listener that raises is logged, and the others are still called: no listener fails an update.

    Listeners of updates are called in the manager's thread, which waits for them; listeners of replicas in a thread for which
    no update waits. A plug-in's hook is `weightwire_update_<event>` for updates and `weightwire_<event>` for replicas.
    Arguments, all by name:

    - staged: group (str), version (int), seconds (float, from its beginning): every trainer rank has written; weights may change
      again;
    - committed: report (`UpdateReport`): the update is over and at least one replica serves the version, whether or not `update`
      raises for another one;
    - failed: group (str), version (int, None if it was to be the next one and was not decided), error (`WeightwireError`): no
      replica took the version;
    - replica_joined: group (str), card (`ReplicaCard`): the replica takes part in an update, or is caught up, for the first time;
    - replica_lost: group (str), replica (str), reason (str): the replica takes part no longer, until it is back;
    - replica_state: group (str), status (`ReplicaStatus`): the replica's state has changed, or the reason for it, or it was
      paused or resumed.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, list[tuple[Callable[..., Any]]]] = {event: [] for event in get_args(Event)}
        self._lock = threading.Lock()

    def on(self, event: Event, listener: Callable[..., Any]) -> Callable[[], None]:
        """Adds a listener; returns what removes it again. Raises `ArgumentError`, a ValueError, for an event that doesn't exist
        and for a listener that cannot be called with the event's arguments."""
        if event not in list(self._listeners):  # a user may give a list
            raise ArgumentError(
                f"{event!r} is none of {', '.join(self._listeners)}", hint="listen to one of these events"
            )
        _check_callable(event, listener)
        added = (listener,)  # told from the same listener that is added a second time
        with self._lock:
            self._listeners[event].append(added)

        def remove() -> None:
            with self._lock:
                self._listeners[event] = [each for each in self._listeners[event] if each is not added]

        return remove

    def tell(self, event: Event, **facts: Any) -> None:
        """Calls all listeners."""
        with self._lock:
            listeners = [listener for (listener,) in self._listeners[event]]
        name = f"weightwire_{event}" if event.startswith("replica") else f"weightwire_update_{event}"
        calls: list[Callable[..., Any]] = [*listeners, lambda **told: getattr(plugin_manager().hook, name)(**told)]
        for call in calls:
            try:
                call(**facts)
            except BaseException:
                logger.exception("weightwire: a listener of %r failed", event)


def _check_callable(event: Event, listener: Callable[..., Any]) -> None:
    names = ARGUMENTS[event]
    hint = f"define it as `def listener({', '.join(names)})`, or take `**facts`"
    try:
        inspect.signature(listener).bind(**dict.fromkeys(names))
    except ValueError:  # a builtin that does not tell what it takes
        return
    except TypeError as error:
        words = f"this listener of {event!r} cannot be called with {', '.join(names)} by name: {error}"
        raise ArgumentError(words, hint=hint) from None


def phase_begins(operation: str, group: str, version: int | None, phase: str, rank: int = 0) -> None:
    """Calls the plug-ins' `weightwire_phase`, before the phase. Raises what they raise."""
    plugin_manager().hook.weightwire_phase(operation=operation, group=group, version=version, phase=phase, rank=rank)


@contextlib.contextmanager
def harmless(what: str) -> Iterator[None]:
    """Around a step that must not change an operation's answer: its failure is logged, a plug-in's SystemExit too."""
    try:
        yield
    except BaseException:
        logger.exception("weightwire: %s failed; the operation's answer stays as it is", what)
