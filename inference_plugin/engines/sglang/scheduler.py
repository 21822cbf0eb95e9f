"""One rank, which is a scheduler process: its runtime, and what we keep beside its scheduler."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec

from inference_plugin.engines.control import UNKNOWN_VERSION
from inference_plugin.engines.kept_caches import keeps_cache
from inference_plugin.engines.noted_loads import note_loads
from inference_plugin.engines.rank_runtime import RankIdentity, RankRuntime
from inference_plugin.engines.sglang.idle import flush_cache, is_idle
from inference_plugin.engines.sglang.in_flight import (
    end_beams,
    forget_old_turns,
    note_old_sessions,
    queue_unlimited,
    recall_diffusion,
    take_back,
    unbegun_diffusion,
    why_not_again,
)
from inference_plugin.engines.sglang.kv_events import in_namespace
from inference_plugin.engines.sglang.pipeline import Pipeline
from inference_plugin.engines.sglang.ranks import Ranks
from inference_plugin.engines.sglang.served import ServedModel
from inference_plugin.engines.sglang.stamps import stamp_all
from inference_plugin.engines.sglang.turn import Doorbell, EngineOperation, EngineReply, Step
from inference_plugin.net import addresses
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.groups import DRAFT
from inference_plugin.wire.messages import WorkerCard

__all__ = ["SchedulerRank", "forget_encodings"]

logger = logging.getLogger("sglang.weightwire")


class SchedulerRank:
    """One rank: its runtime, the requests that it holds back, and why it refuses new ones."""

    def __init__(self, scheduler: Any, ranks: Ranks, replica: str) -> None:
        self.scheduler = scheduler
        self.ranks = ranks
        self.rank = ranks.rank
        self.pipeline = Pipeline(scheduler) if ranks.stages > 1 else None
        self.replica = replica
        self.cards: list[WorkerCard] = []
        self.model = ServedModel(scheduler)
        self.bell = Doorbell(scheduler.idle_sleeper, self.replica, self.rank)
        self._end_notes: list[Callable[[], None]] = []
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(self._remove_sockets)
            if_it_fails.callback(self.bell.close)
            identity = RankIdentity(self.replica, self.rank, ranks.tp_rank, ranks.stage, ranks.size)
            self.runtime = RankRuntime(identity, self.model)
            if_it_fails.callback(self.close)
            for model in (self.live, *self.model.drafts):
                self._end_notes.append(note_loads(model, partial(self.note_load, model)))
            if_it_fails.pop_all()
        self.tell_unknown: Callable[[dict[str, str]], None] = lambda _: None
        """Hears, on the first rank, that somebody else writes the weights."""
        self.refusal: str | None = None
        self.holding = False
        self.namespace = ""
        self.some_keep_cache = False
        self._installations = 0
        self.held: list[Any] = []
        self.paused = False
        """Whether we have the scheduler stand."""
        self._is_ours = False
        self._paused_by_user = False
        self._waits_for_memory = False  # SGLang goes on as soon as it has its memory back

    def close(self) -> None:
        """Ends what was started here: the engine goes on without us."""
        for end in self._end_notes:
            end()
        self.runtime.close()
        self.bell.close()
        self._remove_sockets()

    def _remove_sockets(self) -> None:
        with contextlib.suppress(OSError, WeightwireError):
            for endpoint in (str(self.rank), f"bell{self.rank}"):  # libzmq leaves them
                (addresses.runtime_dir() / f"{self.replica}.{endpoint}").unlink(missing_ok=True)

    def perform(self, step: Step) -> bytes:
        """One step of a turn, on this rank. Never raises."""
        if step.rank is not None:
            return self.runtime.call(step.rank)
        try:
            assert step.engine is not None
            return msgspec.msgpack.encode(EngineReply(done=self._engine(step.engine)))
        except Exception as error:
            logger.exception("weightwire: an engine operation failed on rank %d", self.rank)
            return msgspec.msgpack.encode(EngineReply(error=f"{type(error).__name__}: {error}"))

    def admit(self, request: Any, is_retracted: bool) -> bool:
        """Whether a request may enter the queue now; else it is held, or ended with the reason."""
        from sglang.srt.managers.utils import is_health_check_generate_req

        released = "" if self.paused or self.scheduler._engine_paused else self.model.released()
        if (self.paused or released) and is_health_check_generate_req(request):
            self.scheduler.return_health_check_ipcs.append(request.http_worker_ipc)  # as SGLang does while it is busy
            if released:
                self.scheduler.maybe_send_health_check_signal()
            return False
        if why := why_not_again(request):
            self.end_request(request, why, None)
            return False
        if why := self.refusal or released:
            self.end_request(request, why, HTTPStatus.SERVICE_UNAVAILABLE)
            return False
        if not is_retracted and not request.output_ids:
            self.name(request)  # again: an update may have been committed while its grammar was compiled
            if self.holding:
                self.held.append(request)
                return False
        return True

    def while_paused(self, *, idle: bool) -> None:
        """In each pass of the event loop: does what SGLang leaves out while it is paused. It answers health checks with
        the results of forward passes only, and a paused scheduler never sleeps."""
        if self.paused:
            self.scheduler.maybe_send_health_check_signal()
            if idle:
                self.scheduler.maybe_sleep_on_idle()

    def _engine(self, operation: EngineOperation) -> bool:
        from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput

        scheduler = self.scheduler
        if operation.name == "retract":
            self.retract()
            return flush_cache(scheduler)
        if operation.name in ("abort", "drain"):
            stand = scheduler._engine_paused or self.pipeline is not None
            # Of a prompt that is computed in chunks SGLang would answer with the vector of its beginning.
            if operation.name == "abort" and (stand or not scheduler.is_generation):
                self.retract()  # they don't take the step in which SGLang ends them
            take_back(scheduler)
            self.holding = True
            self.held += [request for request in scheduler.waiting_queue if not request.output_ids]
            scheduler.waiting_queue = [request for request in scheduler.waiting_queue if request.output_ids]
            if operation.name == "abort":
                held, self.held = self.held, []
                # Nothing in an answer without its vector says why, so whoever waits for one gets an error.
                status = None if scheduler.is_generation else HTTPStatus.SERVICE_UNAVAILABLE
                for request in held:
                    self.end_request(request, "aborted for a weight update or a pause", status)
                scheduler.abort_request(AbortReq(abort_all=True))
        elif operation.name == "flush":
            return is_idle(scheduler) and flush_cache(scheduler)
        elif operation.name == "stand":
            self.note_stop()
            self.paused = True
            if not scheduler._engine_paused:
                with self._ours():
                    scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
        elif operation.name == "resume":
            self.resume()
        else:
            self.refuse(operation.reason)
        return True

    def is_idle(self) -> bool:
        """Whether no request computes, or is about to."""
        return is_idle(self.scheduler)

    def resume(self) -> None:
        """The scheduler steps again, and takes the requests that were held."""
        self.go_on()
        self.holding = False
        held, self.held = self.held, []
        with queue_unlimited(self.scheduler):
            for request in held:
                self.scheduler._add_request_to_queue(request)

    def unhold_aborted(self, abort: Any) -> None:
        """SGLang is about to abort requests. It finds those that wait in its queue only, so those that are held go there."""
        aborted = [request for request in self.held if abort.abort_all or request.rid.startswith(abort.rid)]
        self.held = [request for request in self.held if request not in aborted]
        self.scheduler.waiting_queue.extend(aborted)

    def installed(self, group: str, stamp: str) -> None:
        """This rank holds a new version: from now on no request finds what an older one computed, and outputs get the stamp.
        Tokens are the served model's, whichever draft proposed them."""
        self._turn_namespace()
        forget_encodings()
        if group != DRAFT:
            stamp_all(self.scheduler, stamp)

    @property
    def live(self) -> Any:
        """The served model, as SGLang itself holds it."""
        return self.scheduler.tp_worker.model_runner.model

    def note_load(self, model: Any, reason: str) -> None:
        """Somebody else is about to write this rank's model, or its draft."""
        if model is self.live or (model in self.model.drafts and self.model.versions_hang_on(model)):
            self.lose_version(reason)

    def lose_version(self, reason: str) -> None:
        """Somebody else is about to write this rank's weights."""
        self._lost_versions(self.runtime.note_load(reason))

    def _lost_versions(self, unknown: dict[str, str]) -> None:
        if unknown:
            stamp_all(self.scheduler, UNKNOWN_VERSION)
            self.tell_unknown(unknown)

    def note_memory(self, move: Callable[[], Any], offloaded: set[str], *, releases: bool) -> Any:
        """Around SGLang's own release of memory, or its end; `offloaded` is what is released so far. `releases`: the weights are
        about to be released. Returns its answer."""
        if self.runtime.moves_memory:
            return move()
        if releases:
            keeps = self.model.why_no_sleep(1) is None
            lost = "" if keeps else "SGLang's own release_memory_occupation gave the weights up"
            self._lost_versions(self.runtime.note_sleep(lost))
        else:
            self.runtime.free_kept()
        failed = "SGLang's own command failed"
        try:
            answer = move()
            failed = ""
            return answer
        finally:
            if "weights" not in offloaded:
                self.runtime.note_wake_up(failed)
            if self._waits_for_memory and not (self.paused or self.model.released()):
                self._go_on()

    def note_pause(self, paused: bool) -> bool:
        """SGLang's own pause, or its end, is about to begin. Returns whether it may: while we have the scheduler stand it goes on
        standing, and the user's command takes effect as we let go. Requests that wait can't be computed before released memory is
        back."""
        if not self._is_ours:
            self._paused_by_user = paused
            if not paused and self.paused:
                return False
        self._waits_for_memory = not paused and bool(self.model.released())
        return not self._waits_for_memory

    def note_stop(self) -> None:
        """No step runs until the next batch is planned. SGLang's watchdog ends the engine where a batch is under way for
        `--watchdog-timeout` (five minutes) without a step, also while the engine is paused."""
        self.scheduler.cur_batch_for_debug = None

    def refuse_what_is_unknown(self) -> None:
        """The ranks have lost each other: one that was in the middle of a commit doesn't know what the others hold."""
        unsure = self.runtime.unsure()
        if not unsure or self.refusal is not None:
            return
        try:
            self.refuse(f"rank {self.rank} lost the others while {unsure}; start the engine anew")
        except Exception:
            logger.exception("weightwire: rank %d could not end its requests; it takes no new ones", self.rank)

    def _turn_namespace(self) -> None:
        """No request that starts from here on finds cached keys and values that an older version computed.

        Requests in flight keep theirs; those that wait have none yet and move to the new namespace.
        """
        scheduler = self.scheduler
        take_back(scheduler)
        self._installations += 1  # not the version: two groups may be at the same one
        self.namespace = f"weightwire={self._installations}"
        if not self.some_keep_cache and is_idle(scheduler, but_for_waiting=True) and flush_cache(scheduler):
            self.namespace = ""
        if self.namespace:
            note_old_sessions(scheduler)
        for request in [*scheduler.waiting_queue, *self.held, *unbegun_diffusion(scheduler)]:
            if not request.output_ids:
                self.name(request)

    def name(self, request: Any) -> None:
        """Puts a request that has computed nothing yet into the present prefix namespace; not one whose conversation keeps its
        cache."""
        own = getattr(request, "weightwire_key", request.extra_key)
        if keeps_cache(own) or keeps_cache(getattr(request, "cache_salt", None)):
            self.some_keep_cache = True  # from now on a commit drops no cached prefix
            return
        forget_old_turns(self.scheduler, request)
        request.weightwire_key = own
        request.extra_key = in_namespace(self.namespace, own)

    def retract(self) -> None:
        """Retracts requests by SGLang's own pause. A pause of the user's stays after `go_on`."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.paused = True
        pause = self.scheduler.pause_generation if self.pipeline is None else self.pipeline.retract
        scheduler = self.scheduler
        end_beams(scheduler)
        recall_diffusion(scheduler)
        with queue_unlimited(self.scheduler), self._ours():
            pause(PauseGenerationReqInput(mode="retract"))
        scheduler.running_batch.beam_tail = None  # SGLang leaves it, and ends when it sees that the requests are gone
        take_back(scheduler)

    def go_on(self) -> None:
        if self.paused:
            self.paused = False
            if not self._paused_by_user:
                self._go_on()

    def _go_on(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        with self._ours():
            self.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    @contextlib.contextmanager
    def _ours(self) -> Iterator[None]:
        """Around a call of SGLang's own pause that is ours."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False

    def refuse(self, reason: str | None) -> None:
        """On this rank alone: from now on requests are refused with that reason; None: they are taken."""
        self.refusal = reason
        if reason is None:
            return
        # Retracted first: a running request that is aborted takes one step more, and none may be taken.
        paused = self.paused
        self.retract()
        ended = [*self.scheduler.waiting_queue, *self.held]
        self.scheduler.waiting_queue, self.held = [], []
        for request in ended:
            self.end_request(request, reason, HTTPStatus.SERVICE_UNAVAILABLE)
        if not paused:
            self.go_on()

    def end_request(self, request: Any, reason: str, status: HTTPStatus | None) -> None:
        """Ends a request that computes nothing now; with a status its client gets an error."""
        from sglang.srt.managers.scheduler import _make_abort_req

        why = {"type": "abort", "status_code": status, "message": reason}
        scheduler = self.scheduler
        has_sender = hasattr(scheduler, "send_abort_output")  # since 0.5.23; only a rank with clients of its own sends
        send = scheduler.send_abort_output if has_sender else scheduler.ipc_channels.send_to_tokenizer.send_output
        send(_make_abort_req(request, finished_reason=why), request)
        scheduler._release_aborted_request(request)
        scheduler.beam_coordinator.retire_group(request)


def forget_encodings() -> None:
    """SGLang keeps what a model has made of images and sounds by their hashes, also where it flushes its cache."""
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
