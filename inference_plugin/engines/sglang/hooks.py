"""Where SGLang's scheduler is wrapped, and how a rank starts in it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from inference_plugin.engines.coordinator import ReplicaCoordinator, open_coordinator
from inference_plugin.engines.monkeypatch import contained, installed_version, run_without, wrap
from inference_plugin.engines.operations import RankReply, started_cards
from inference_plugin.engines.sglang.control import FollowerControl, LeaderControl
from inference_plugin.engines.sglang.layouts import why_unserved
from inference_plugin.engines.sglang.patch_points import SGLANG
from inference_plugin.engines.sglang.ranks import Ranks, note_presence
from inference_plugin.engines.sglang.scheduler import SchedulerRank
from inference_plugin.engines.sglang.turn import Turn
from inference_plugin.engines.starting import begin_start, end_start, ends_start
from inference_plugin.net import addresses
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import EngineUnsupported, ErrorInfo, WeightwireError, first_few

__all__ = ["hook_own_commands", "hook_scheduler", "hook_start"]

logger = logging.getLogger("sglang.weightwire")


def hook_scheduler(lacks: tuple[str, ...]) -> None:
    """`lacks`: what users of this version of SGLang miss, in words."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

    @wrap(Scheduler, "init_model_worker")
    def init_model_worker(original: Callable[..., Any], self: Any) -> Any:
        if _leads():
            begin_start("sglang", self.model_config.model_path, logger)
        with contained("noting the plug-in for the other ranks", logger):
            note_presence()
        return original(self)  # loads the model

    @wrap(Scheduler, "init_request_dispatcher")
    def init_request_dispatcher(original: Callable[..., Any], self: Any) -> Any:
        with ends_start():
            result = original(self)
            _start(self, lacks)
        return result

    @wrap(SchedulerRequestReceiver, "_pull_raw_reqs")
    def pull_raw_reqs(original: Callable[..., Any], self: Any) -> Any:
        if served_rank is not None and _turns is not None:
            with contained("a pass of the event loop", logger):
                served_rank.while_paused(idle=not _turns.wants_turn())
        requests = original(self)
        if requests is not None and served_rank is not None and _turns is not None:
            with contained("a pass of the event loop", logger):
                if _turns.wants_turn():
                    requests.append(Turn(_turns.rung))
        return requests

    @wrap(Scheduler, "get_next_batch_to_run")
    def get_next_batch_to_run(original: Callable[..., Any], self: Any, running_batch: Any, last_batch: Any) -> Any:
        if served_rank is None or served_rank.pipeline is None:
            return original(self, running_batch=running_batch, last_batch=last_batch)
        return served_rank.pipeline.plan(original, running_batch, last_batch)

    @wrap(Scheduler, "run_batch")
    def run_batch(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        with served_rank.model.step() if served_rank is not None else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    @wrap(Scheduler, "_add_request_to_queue")
    def add_request_to_queue(original: Callable[..., Any], self: Any, req: Any, is_retracted: bool = False) -> Any:
        if served_rank is not None and not served_rank.admit(req, is_retracted):
            return None
        return original(self, req, is_retracted)

    @wrap(Scheduler, "abort_request")
    def abort_request(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
        if served_rank is not None:
            served_rank.unhold_aborted(recv_req)
        return original(self, recv_req)

    @wrap(Scheduler, "_maybe_namespace_elastic_radix_cache")
    def namespace(original: Callable[..., Any], self: Any, req: Any) -> Any:
        result = original(self, req)
        if served_rank is not None:
            served_rank.name(req)
        return result


def hook_own_commands() -> None:
    """SGLang's own commands that pause, release memory or write weights."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
    from sglang.srt.managers.io_struct import (
        CheckWeightsReqOutput,
        ReleaseMemoryOccupationReqInput,
        ReleaseMemoryOccupationReqOutput,
        ResumeMemoryOccupationReqInput,
        ResumeMemoryOccupationReqOutput,
    )
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    @wrap(SchedulerWeightUpdaterManager, "check_weights")
    def check_weights(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
        if recv_req.action != "reset_tensors" or served_rank is None or _turns is None:
            return original(self, recv_req)
        try:
            if served_rank.pipeline is not None:
                raise EngineUnsupported(
                    "a stage is asked before the next one knows of it, while micro-batches are between them",
                    hint="a pipeline's weights can't be reset",
                )
            if kept := served_rank.model.lost_by_a_reset(getattr(recv_req, "skip_tensor_list", None) or ()):
                raise EngineUnsupported(
                    f"no update brings these back: {first_few(kept)}", hint="skip_tensor_list spares them"
                )
            _turns.tear(
                "SGLang reset the weights, as its /weights_checker was asked "
                "(a parameter that no update fills stays random until a restart)"
            )
        except Exception as error:
            served_rank.refuse_what_is_unknown()
            logger.exception("weightwire: the weights were not reset")
            return CheckWeightsReqOutput(success=False, message=f"weightwire: the weights were not reset: {error}")
        return original(self, recv_req)

    # The user and a manager may each release memory, and take it back. SGLang ends where memory is moved twice the same way.
    @wrap(SchedulerWeightUpdaterManager, "release_memory_occupation")
    def release_memory(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
        if served_rank is None:
            return original(self, recv_req)
        tags = [tag for tag in recv_req.tags or GPU_MEMORY_ALL_TYPES if tag not in self.offload_tags]
        if not tags:
            return ReleaseMemoryOccupationReqOutput()
        request = ReleaseMemoryOccupationReqInput(tags=tags)
        return served_rank.note_memory(lambda: original(self, request), self.offload_tags, releases="weights" in tags)

    @wrap(SchedulerWeightUpdaterManager, "resume_memory_occupation")
    def resume_memory(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
        if served_rank is None:
            return original(self, recv_req)
        tags = [tag for tag in recv_req.tags or GPU_MEMORY_ALL_TYPES if tag in self.offload_tags]
        if served_rank.runtime.is_asleep and not served_rank.runtime.moves_memory:
            logger.warning(
                "weightwire: not woken: a manager put this replica to sleep, and its trainer may use the memory"
            )
            tags = []
        if not tags:
            return ResumeMemoryOccupationReqOutput()
        request = ResumeMemoryOccupationReqInput(tags=tags)
        return served_rank.note_memory(lambda: original(self, request), self.offload_tags, releases=False)

    @wrap(Scheduler, "pause_generation")
    def pause_generation(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
        if served_rank is not None:
            served_rank.note_pause(True)
        return original(self, recv_req)

    @wrap(Scheduler, "continue_generation")
    def continue_generation(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
        return original(self, recv_req) if served_rank is None or served_rank.note_pause(False) else None

    # These may write parameters without the model's loader, or have others write them, until a session ends.
    for update in ("update_weights_from_tensor", "begin_weight_update", "end_weight_update"):
        if hasattr(WeightUpdater, update):  # 0.5.20 has no sessions
            wrap(WeightUpdater, update)(partial(_update_by_user, update))


def hook_start() -> None:
    """In the process that asks for an engine: notes that an engine starts, until the first rank's scheduler notes it."""
    from sglang.srt.entrypoints.engine import Engine

    @wrap(Engine, "_launch_scheduler_processes")
    def launch(original: Callable[..., Any], cls: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        begin_start("sglang", getattr(server_args, "model_path", "unknown"), logger)
        try:
            result, processes = original(cls, server_args, *args, **kwargs)
        except BaseException:
            end_start()
            raise
        wait = result.wait_for_ready

        def wait_for_ready() -> Any:
            with ends_start():
                return wait()

        result.wait_for_ready = wait_for_ready
        return result, processes


def _leads() -> bool:
    """Whether this process is its replica's first rank."""
    from sglang.srt.runtime_context import get_parallel

    try:
        return int(get_parallel().tp_rank) == int(get_parallel().pp_rank) == 0
    except Exception:
        logger.debug("weightwire: the rank is not known yet", exc_info=True)
        return False


served_rank: SchedulerRank | None = None
_turns: LeaderControl | FollowerControl | None = None
"""This process's rank, and its part in turns; None while SGLang runs without us."""

explicit = False
"""Whether the user named the extension: where it can't start, the engine doesn't."""


def _start(scheduler: Any, lacks: tuple[str, ...]) -> None:
    """Starts this rank and, on the first, the coordinator; publishes the replica's card. Where a part of it fails, on any rank,
    all ranks run without us, and nothing of ours is left in them."""
    global served_rank, _turns
    rank: SchedulerRank | None = None
    first = True
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        first = _leads()
        if why := why_unserved(scheduler, parallel):
            raise EngineUnsupported(why, hint="docs/sglang.md says which layouts are served", phase="start")
        ranks = Ranks(parallel)
        handlers = scheduler._request_dispatcher._mapping
        handlers[Turn] = lambda _: None  # where this rank runs without us, a turn must not end SGLang's loop
        rank = _started(scheduler, ranks)
        turns = _open_coordinator(rank, parallel, lacks)
        handlers[Turn] = turns.handle if rank.pipeline is None else partial(rank.pipeline.announce, turns.handle)
        served_rank, _turns = rank, turns
    except Exception as error:
        if rank is not None:
            with contained("closing a rank", logger):
                rank.close()
        if explicit:
            raise
        if first:
            run_without("sglang", error, logger, f"model {scheduler.model_config.model_path}")
        else:
            logger.debug("weightwire: off on this rank", exc_info=True)  # the first rank warns


def _started(scheduler: Any, ranks: Ranks) -> SchedulerRank:
    """This rank, once all of them are ready. Raises the first one's error on all of them."""
    replica = ranks.broadcast(addresses.new_replica_id("sglang").encode()).decode()
    rank: SchedulerRank | None = None
    try:
        rank = SchedulerRank(scheduler, ranks, replica)
        start = RankReply("start", ranks.rank, card=rank.runtime.card())
    except Exception as error:
        logger.debug("weightwire: the rank could not start", exc_info=True)
        start = RankReply("start", ranks.rank, error=WeightwireError.wrap(error).info())
    try:
        cards = started_cards(ranks.gather(msgspec.msgpack.encode(start)), replica)
        assert rank is not None
        rank.cards = cards
    except BaseException:
        if rank is not None:
            rank.close()
        raise
    return rank


def _update_by_user(name: str, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a method of SGLang's `WeightUpdater`, of the served model or of a draft."""
    if served_rank is not None:
        with contained("noting SGLang's own update", logger):
            served_rank.note_load(self.get_model(), f"SGLang's own {name} wrote the weights")
    return original(self, *args, **kwargs)


def _open_coordinator(rank: SchedulerRank, parallel: Any, lacks: tuple[str, ...]) -> LeaderControl | FollowerControl:
    """The coordinator, on the first rank; returns this rank's part in turns. Raises the error of a coordinator that can't start
    on all ranks."""
    failed = b""
    coordinator: ReplicaCoordinator | None = None
    turns: LeaderControl | FollowerControl = FollowerControl(rank)
    bells = rank.ranks.gather(rank.bell.address.encode())
    if rank.ranks.leads:
        try:
            placed = parallel if hasattr(parallel, "dp_rank") else rank.scheduler.ps  # before 0.5.21
            turns = LeaderControl(rank, [bell.decode() for bell in bells])
            coordinator = open_coordinator(
                turns,
                rank.replica,
                rank.cards,
                engine="sglang",
                engine_version=installed_version(*SGLANG.distributions),
                model=str(rank.scheduler.model_config.model_path),
                dtype=str(rank.scheduler.model_config.dtype).removeprefix("torch."),
                tp=rank.ranks.tp_size,
                pp=rank.ranks.stages,
                dp_rank=int(placed.dp_rank or 0),
                parent_pid=os.getppid(),
                lacks=lacks,
            )
            turns.coordinator = coordinator
            rank.tell_unknown = coordinator.lose_version
            for what in lacks:
                logger.warning("weightwire: in this version of SGLang %s", what)
        except Exception as error:  # noqa: BLE001 -- raised below, on all ranks
            failed = msgspec.msgpack.encode(WeightwireError.wrap(error).info())
    try:
        failed = rank.ranks.broadcast(failed)
    except BaseException:
        if coordinator is not None:
            coordinator.close()
        raise
    if failed:
        raise WeightwireError.of(decode_as(failed, ErrorInfo))
    return turns
