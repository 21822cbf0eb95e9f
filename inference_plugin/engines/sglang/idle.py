"""Whether SGLang computes, and its caches flushed where it doesn't.

SGLang calls itself busy, and flushes no cache, also while it compiles a request's grammar, and while its hierarchical cache
copies. A request whose grammar is compiled has computed nothing yet, and is asked about when it joins the queue. Copies are
waited for here. SGLang notices their ends in passes that plan a batch, and so never while it is paused.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

__all__ = ["but_for_the_rest", "flush_cache", "is_idle"]


def is_idle(scheduler: Any, *, but_for_waiting: bool = False) -> bool:
    """Whether no request computes, or is about to. `but_for_waiting`: requests in the queue don't count."""
    ignored = {"ignore_waiting": True} if but_for_waiting and _can_ignore_waiting(scheduler) else {}
    with but_for_the_rest(scheduler, but_for_waiting):
        return bool(scheduler.is_fully_idle(**ignored))


def flush_cache(scheduler: Any) -> bool:
    """False where SGLang couldn't: requests compute, or wait while it is not paused."""
    if scheduler.enable_hierarchical_cache:
        controller = scheduler.tree_cache.cache_controller
        for copy in (*controller.ack_write_queue, *controller.ack_load_queue):
            copy.finish_event.synchronize()  # of rows that the next requests get
    with but_for_the_rest(scheduler, scheduler._engine_paused):
        return bool(scheduler.flush_cache(empty_cache=False))


def _can_ignore_waiting(scheduler: Any) -> bool:
    """Before 0.5.21 requests in the queue keep SGLang from flushing its cache, also those that it has retracted."""
    return "ignore_waiting" in inspect.signature(scheduler.is_fully_idle).parameters


@contextlib.contextmanager
def but_for_the_rest(scheduler: Any, but_for_waiting: bool) -> Iterator[None]:
    """SGLang asks neither about grammars nor about copies, nor, with `but_for_waiting`, about a queue that it cannot ignore by
    itself."""
    grammars = scheduler.grammar_manager
    compiling, grammars.grammar_queue = grammars.grammar_queue, []
    copies, scheduler.enable_hierarchical_cache = scheduler.enable_hierarchical_cache, False
    waiting = scheduler.waiting_queue
    if but_for_waiting and not _can_ignore_waiting(scheduler):
        # A later turn of a streaming session that waits for room owns rows of the cache, which a flush would free.
        scheduler.waiting_queue = [request for request in waiting if request.kv.holds_kv]
    try:
        yield
    finally:
        grammars.grammar_queue = compiling
        scheduler.enable_hierarchical_cache = copies
        scheduler.waiting_queue = waiting
