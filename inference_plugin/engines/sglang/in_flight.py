"""Turns of SGLang's streaming sessions, which its namespaces of cached prefixes don't cover."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["forget_old_turns", "note_old_sessions"]

_OLD = "weightwire_old"
"""Attribute of a session's slot: it holds keys and values of replaced weights."""


def note_old_sessions(scheduler: Any) -> None:
    """New weights are served, and no cache was flushed: what streaming sessions hold is old. A turn in flight goes on with it."""
    for slot in _slots(scheduler).values():
        setattr(slot, _OLD, True)


def forget_old_turns(scheduler: Any, request: Any) -> None:
    """Before a turn of a streaming session computes: gives up what the session holds of replaced weights, so that the whole
    conversation is prefilled again. SGLang finds that by the session alone, whatever the namespace of the turn is."""
    session = getattr(request, "session", None)
    if session is None or not session.streaming or request.to_finish is not None:
        return  # SGLang ends it: another turn is in flight
    slot = _slots(scheduler).get(session.session_id)
    if slot is None or not hasattr(slot, _OLD):
        return
    if getattr(slot, "kv", None) is not None and slot.kv is getattr(request, "kv", None):
        request.detach_kv()  # lent to a turn for which there was no room yet
    scheduler.tree_cache.release_session(session.session_id)


def _slots(scheduler: Any) -> Mapping[str, Any]:
    cache = scheduler.tree_cache
    # Before 0.5.22 they may be around the cache.
    found: Mapping[str, Any] = getattr(getattr(cache, "session", cache), "slots", {})
    return found
