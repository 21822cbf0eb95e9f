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

__all__ = ["flush_cache", "is_idle"]


def is_idle(scheduler: Any, *, but_for_waiting: bool = False) -> bool:
    """Whether no request computes, or is about to. `but_for_waiting`: requests in the queue don't count."""
    knows = "ignore_waiting" in inspect.signature(scheduler.is_fully_idle).parameters
    with _but_for_the_rest(scheduler):
        # Before 0.5.21 a waiting request keeps the cache from being flushed.
        return bool(scheduler.is_fully_idle(**({"ignore_waiting": True} if knows and but_for_waiting else {})))


def flush_cache(scheduler: Any) -> bool:
    """False where SGLang couldn't: requests compute."""
    if scheduler.enable_hierarchical_cache:
        controller = scheduler.tree_cache.cache_controller
        for copy in (*controller.ack_write_queue, *controller.ack_load_queue):
            copy.finish_event.synchronize()  # of rows that the next requests get
    with _but_for_the_rest(scheduler):
        return bool(scheduler.flush_cache(empty_cache=False))


@contextlib.contextmanager
def _but_for_the_rest(scheduler: Any) -> Iterator[None]:
    """SGLang asks neither about grammars nor about copies."""
    grammars = scheduler.grammar_manager
    compiling, grammars.grammar_queue = grammars.grammar_queue, []
    copies, scheduler.enable_hierarchical_cache = scheduler.enable_hierarchical_cache, False
    try:
        yield
    finally:
        grammars.grammar_queue = compiling
        scheduler.enable_hierarchical_cache = copies
