"""A pipeline's step boundary: when no micro-batch is between two stages.

SGLang's loop for pipelines goes through a number of slots, each with a micro-batch of its own. All stages go through them in
the same order, get the same requests in each, and plan the same batch for it, or none. So a turn arrives in the same slot on
all stages, but they can't take it there: a stage still waits for outputs that another one sends in a later slot. From
its arrival on every stage plans nothing. After one round all slots are empty: every result has been processed, no stage waits
for another, and all ranks take the turn in the same slot. What they change in it, they change for all stages of every later
step.

SGLang's loop heeds no pause. While a replica is paused, stages plan nothing here either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from inference_plugin.engines.sglang.turn import Turn

__all__ = ["Pipeline", "stages_apart"]


class Pipeline:
    """One stage's part of its pipeline."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._take_turn: Callable[[], None] | None = None

    def announce(self, handle: Callable[[Turn], None], turn: Turn) -> None:
        """SGLang's handler of a `Turn`: `handle` is called with it once all slots are empty."""
        self._take_turn = partial(handle, turn)

    def plan(self, original: Callable[..., Any], running_batch: Any, last_batch: Any) -> Any:
        """The next batch of a slot, by SGLang's `get_next_batch_to_run`; no batch while a turn waits or the replica is
        paused."""
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        scheduler = self._scheduler
        if self._take_turn is not None and all(batch is None for batch in scheduler.mbs):
            take_turn, self._take_turn = self._take_turn, None
            # Each slot's last batch has joined its running one, here or in SGLang.
            scheduler.last_batch = last_batch = None
            scheduler.last_mbs = [None] * len(scheduler.last_mbs)
            take_turn()
        if self._take_turn is None and not scheduler._engine_paused:
            return original(scheduler, running_batch=running_batch, last_batch=last_batch)
        if any(batch is last_batch for batch in scheduler.mbs):
            running_batch = self._joined(running_batch, last_batch)
        running_batch.filter_batch()
        running_batch.batch_is_full = False  # who has left makes room; SGLang counts anew
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)

    def retract(self, request: Any) -> None:
        """Within a turn: retracts the requests of all slots. SGLang's own pause retracts those of one."""
        scheduler = self._scheduler
        present = scheduler.running_batch
        for batch in scheduler.running_mbs:
            scheduler.running_batch = batch
            scheduler.pause_generation(request)
        scheduler.running_batch = present

    def _joined(self, running_batch: Any, last_batch: Any) -> Any:
        """The requests that a slot has begun join those that run in it, as in SGLang's plan of the slot's next batch. A request
        whose prompt is still computed in chunks belongs to no slot."""
        if last_batch is None or not last_batch.forward_mode.is_extend() or last_batch is running_batch:
            return running_batch
        in_chunks = [self._scheduler.chunked_req, last_batch.chunked_req]
        last_batch.filter_batch([request for request in in_chunks if request is not None])
        if last_batch.is_empty():
            return running_batch
        if running_batch.is_empty():
            return last_batch
        running_batch.merge_batch(last_batch)
        return running_batch


@contextlib.contextmanager
def stages_apart() -> Iterator[None]:
    """Around the construction of a second model: where a constructor passes a table of embeddings from the first stage to the
    last one, nothing is sent, and the last one gets memory without contents."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().pp_group
    group.send = lambda tensor, dst=None: None
    group.recv = lambda size, dtype, src=None: torch.empty(size, dtype=dtype)
    try:
        yield
    finally:
        del group.send, group.recv
