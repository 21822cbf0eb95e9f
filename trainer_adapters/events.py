"""What a manager tells while it works: to callables of the training program, and to plug-ins (`inference_plugin.hooks`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

from inference_plugin.hooks import plugin_manager

__all__ = ["Event", "Events"]

logger = logging.getLogger(__name__)

Event: TypeAlias = Literal["staged", "committed", "failed", "replica_joined", "replica_lost", "replica_state"]


class Events:
    """Listeners by event. One that raises is logged, and the others are still told: no listener fails an update.

    Those of an update are called in the manager's thread, which waits for them, those of replicas in one that an update
    doesn't wait for, one after the other. A plug-in's hook is `weightwire_update_<event>`, or `weightwire_<event>` for what
    happens to replicas. Arguments, all by name:

    - staged: group, version, seconds: every trainer rank has written; weights may change again;
    - committed: report (`UpdateReport`): at least one replica serves the version;
    - failed: group, version, error (`WeightwireError`): none does;
    - replica_joined: group, card (`ReplicaCard`): it takes part in an update, or is caught up, for the first time;
    - replica_lost: group, replica, reason: it takes part no longer, until it is back;
    - replica_state: group, status (`ReplicaStatus`): its state, or the reason for it, is another one.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, list[Callable[..., Any]]] = {event: [] for event in get_args(Event)}
        self._lock = threading.Lock()

    def on(self, event: Event, listener: Callable[..., Any]) -> Callable[[], None]:
        """Adds a listener; returns what removes it again. Raises ValueError for an event that doesn't exist."""
        if event not in self._listeners:
            raise ValueError(f"{event!r} is none of {', '.join(self._listeners)}")
        with self._lock:
            self._listeners[event].append(listener)

        def remove() -> None:
            with self._lock:
                if listener in self._listeners[event]:
                    self._listeners[event].remove(listener)

        return remove

    def tell(self, event: Event, **facts: Any) -> None:
        """Calls all listeners."""
        with self._lock:
            listeners = list(self._listeners[event])
        name = f"weightwire_{event}" if event.startswith("replica") else f"weightwire_update_{event}"
        for listener in (*listeners, getattr(plugin_manager().hook, name)):
            try:
                listener(**facts)
            except Exception:  # a listener must not fail an update
                logger.exception("weightwire: a listener of %r failed", event)
