"""Worker processes: `RankRuntime`, and the methods by which the engine core reaches it on every rank."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from inference_plugin.engines.monkeypatch import add, contained, wrap
from inference_plugin.engines.noted_loads import note_loads
from inference_plugin.engines.operations import RankOperation, RankReply
from inference_plugin.engines.rank_runtime import RankIdentity, RankRuntime
from inference_plugin.engines.vllm.served import ServedModel
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import PeerLost, WeightwireError

__all__ = ["hook_worker", "stop_worker"]

logger = logging.getLogger("vllm.weightwire")


def hook_worker() -> None:
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    add(WorkerBase, "weightwire_start", _worker_start)
    add(WorkerBase, "weightwire_call", _worker_call)
    add(WorkerBase, "weightwire_card", _worker_card)
    add(WorkerBase, "weightwire_stop", stop_worker)

    @wrap(WorkerWrapperBase, "shutdown")
    def shutdown(original: Callable[..., Any], self: Any) -> Any:
        stop_worker(self.worker)
        return original(self)

    @wrap(WorkerWrapperBase, "execute_model")
    def execute_model(original: Callable[..., Any], self: Any, scheduler_output: Any) -> Any:
        with _step(self.worker):
            _forget_pooled(self.worker, scheduler_output)
            return original(self, scheduler_output)

    @wrap(Worker, "execute_dummy_batch")
    def execute_dummy_batch(original: Callable[..., Any], self: Any) -> Any:
        with _step(self):
            return original(self)


def _step(worker: Any) -> AbstractContextManager[object]:
    runtime: RankRuntime | None = getattr(worker, "weightwire_runtime", None)
    return contextlib.nullcontext() if runtime is None else runtime.model.step()


def _forget_pooled(worker: Any, scheduler_output: Any) -> None:
    """Before a step: requests that are computed anew from their first token begin with no rows.

    Where token-wise pooling takes a prompt in several steps, vLLM's first model runner keeps the rows that a request had when it
    was preempted, as `recompute` has it, and appends all rows to them.
    """
    if getattr(worker, "weightwire_runtime", None) is None:
        return
    held = getattr(worker.model_runner, "requests", {})  # the second runner makes such a request anew
    for name in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
        if (pooled := getattr(held.get(name), "pooling_states", None)) is not None:
            pooled.clean()


def _worker_start(worker: Any, replica: str) -> bytes:
    """On every worker, once, on its own thread: skeleton, runtime, socket. Returns a `RankReply`. Never
    raises: after an exception from one worker the executor would take the other workers' answers for those to its next call."""
    rank = int(getattr(worker, "rank", 0))
    try:
        identity = _identity(replica)
        rank = identity.rank
        runtime = worker.weightwire_runtime = RankRuntime(identity, ServedModel(worker))
        worker.weightwire_notes = note_loads(worker.model_runner.get_model(), runtime.note_load)
        _note_memory(worker, runtime)
        return msgspec.msgpack.encode(RankReply("start", rank, card=runtime.card()))
    except Exception as error:
        logger.debug("weightwire: the worker could not start", exc_info=True)  # the engine core warns, or refuses
        return msgspec.msgpack.encode(RankReply("start", rank, error=WeightwireError.wrap(error).info()))


def _note_memory(worker: Any, runtime: RankRuntime) -> None:
    """Has `runtime` hear of the worker's own sleep and wake-up, which a worker extension may call past vLLM's executor, as ROLL's
    does."""
    kind = type(worker)

    def sleep(level: int = 1) -> Any:
        if not runtime.moves_memory and not runtime.is_asleep_by_engine:  # else whoever called it has told
            with contained("noting a worker's sleep", logger):
                runtime.note_sleep("the worker's own sleep of level 2 discarded the weights" if level == 2 else "")
        return kind.sleep(worker, level)

    def wake_up(tags: list[str] | None = None) -> Any:
        if not runtime.moves_memory:
            with contained("freeing what updates keep, before a worker's wake-up", logger):
                runtime.free_kept()
        result = kind.wake_up(worker, tags)
        if not runtime.moves_memory and (tags is None or "weights" in tags):
            with contained("noting a worker's wake-up", logger):
                runtime.note_wake_up()
        return result

    worker.sleep, worker.wake_up = sleep, wake_up


def _worker_call(worker: Any, request: bytes) -> bytes:
    runtime: RankRuntime | None = getattr(worker, "weightwire_runtime", None)
    if runtime is not None:
        return runtime.call(request)
    error = PeerLost("this worker was not started", side="worker")
    return msgspec.msgpack.encode(RankReply(decode_as(request, RankOperation).nonce, -1, error=error.info()))


def _worker_card(worker: Any) -> bytes:
    """This rank's card, encoded; empty if there is none. Never raises, as `_worker_start`."""
    runtime: RankRuntime | None = getattr(worker, "weightwire_runtime", None)
    told = b""
    if runtime is not None:
        with contained("asking a worker what it holds", logger):
            told = msgspec.msgpack.encode(runtime.card())
    return told


def stop_worker(worker: Any) -> None:
    """Removes all that is ours from a worker: the engine ends, or runs without us. Never raises; a second call does nothing."""
    runtime: RankRuntime | None = getattr(worker, "weightwire_runtime", None)
    if runtime is not None:
        worker.weightwire_runtime = None
        with contained("closing a worker", logger):
            if (end_notes := getattr(worker, "weightwire_notes", None)) is not None:
                end_notes()
            vars(worker).pop("sleep", None)
            vars(worker).pop("wake_up", None)
            runtime.close()


def _identity(replica: str) -> RankIdentity:
    from vllm.distributed.parallel_state import get_dp_group, get_pcp_group, get_pp_group, get_tp_group

    tp, pp, dp = get_tp_group(), get_pp_group(), get_dp_group()  # dp: more than one where ranks share experts
    rank, ranks = 0, 1
    for group in (dp, pp, get_pcp_group(), tp):
        rank, ranks = rank * group.world_size + group.rank_in_group, ranks * group.world_size
    return RankIdentity(replica=replica, rank=rank, tp_rank=tp.rank_in_group, pp_rank=pp.rank_in_group, ranks=ranks)
