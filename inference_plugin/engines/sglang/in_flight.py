"""Requests that SGLang's own pause and cache namespaces don't cover: turns of sessions, beam searches, and those of diffusion
models."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = [
    "end_beams",
    "forget_old_turns",
    "note_old_sessions",
    "queue_unlimited",
    "recall_diffusion",
    "take_back",
    "unbegun_diffusion",
    "why_not_again",
]

NO_BEAM = "aborted for a weight update: a beam search can't be computed again from its prompt"
NO_DIFFUSION = "aborted for a weight update: SGLang can't compute the blocks of a diffusion model again"

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


def take_back(scheduler: Any) -> None:
    """Turns of sessions that wait for room give back what they have of the cache already. Each looks for its prefix again, and
    gets it then. Before a flush: SGLang flushes nothing while a request that waits has rows, which it has from a streaming
    session; held, it would go on with rows that a flush has freed. Before another namespace, and an end, too: in a hybrid model a
    turn has the slot into which the state of its prefix was to be copied. It would leak, or begin with somebody else's state."""
    lent = {id(slot.kv) for slot in _slots(scheduler).values() if getattr(slot, "kv", None) is not None}
    for request in scheduler.waiting_queue:
        if id(request.kv) in lent:
            request.detach_kv()
        elif request.kv.holds_mamba and not request.kv.holds_kv:
            scheduler.req_to_token_pool.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(-1))
            request.kv.mamba_pool_idx = None


def _slots(scheduler: Any) -> Mapping[str, Any]:
    cache = scheduler.tree_cache
    # Before 0.5.22 they may be around the cache.
    found: Mapping[str, Any] = getattr(getattr(cache, "session", cache), "slots", {})
    return found


def end_beams(scheduler: Any) -> None:
    """Before SGLang's pause retracts all requests: marks beam searches in flight, which SGLang can't compute again, as aborted.

    Those whose result is still to be processed end with it. The others reach the queue, with nothing left of their members.
    """
    if not scheduler.beam_coordinator._num_live_groups:
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    ends_with_result = {id(request) for batch, _ in scheduler.result_queue for request in batch.reqs}
    batches = [batch.reqs for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    for request in dict.fromkeys([*itertools.chain(*batches), scheduler.chunked_req]):
        if request is not None and request.beam_group is not None and not request.finished():
            request.to_finish = FINISH_ABORT(NO_BEAM)
            if id(request) not in ends_with_result:
                scheduler.beam_coordinator._free_member_rows(request.beam_group)


def unbegun_diffusion(scheduler: Any) -> list[Any]:
    """Requests of a diffusion model that have computed nothing yet, in the queue of its own in which SGLang has put them."""
    return [request for request in scheduler.dllm_manager.waiting_queue if not request.kv.holds_kv]


@contextlib.contextmanager
def queue_unlimited(scheduler: Any) -> Iterator[None]:
    """A limit of the queue holds for requests that come, not for those that ran or were held."""
    limit, scheduler.max_queued_requests = scheduler.max_queued_requests, None
    try:
        yield
    finally:
        scheduler.max_queued_requests = limit


def recall_diffusion(scheduler: Any) -> None:
    """Before SGLang's pause retracts all requests: has it retract those of a diffusion model too, which wait in queues of their
    own. They begin anew."""
    manager = scheduler.dllm_manager
    requests, manager.waiting_queue, manager.staging_queue = manager.waiting_queue, [], []
    last = [] if scheduler.last_batch is None else scheduler.last_batch.reqs  # which the pause retracts
    for request in requests:
        if not request.finished():
            request.init_diffusion_llm(request.dllm_config)
            if not request.kv.holds_kv:
                scheduler.waiting_queue.append(request)
            elif request not in last:
                scheduler.running_batch.reqs.append(request)


def why_not_again(request: Any) -> str:
    """Why SGLang can't compute this request again, which reaches its queue; "" if it can. What it has made of a diffusion model's
    request, it would compute anew and append once more."""
    if request.beam_group is not None and request.to_finish is not None:
        return NO_BEAM
    return NO_DIFFUSION if request.dllm_config is not None and request.output_ids else ""
