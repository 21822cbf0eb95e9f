"""SGLang: where we hook in, and nothing else.

SGLang finds the entry point `sglang.srt.plugins` by itself, in every process; where discovery is switched off,
`python -m inference_plugin.engines.sglang ...` (all of SGLang's own arguments) starts a server with the extension, and
`make_engine(...)` an `sgl.Engine`. All of them call `register`, which checks `TOUCHES` and then wraps those places once
per process.

Every rank of a replica is a scheduler process: it holds `RankRuntime` (groups, socket). The first one has the `Front`
as well. Its commands become a `Turn` among the requests that SGLang broadcasts to all ranks in each pass of its event
loop, so that every rank takes the same turn in the same pass, between two forward passes, also while paused. Within a
turn the first rank leads: it sends operations to the others and gathers their answers over a process group of our own,
with deadlines, until it ends the turn.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from http import HTTPStatus
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
import zmq
from torch import nn

from inference_plugin.engines.front import open_front
from inference_plugin.engines.hooking import installed_version, wrap
from inference_plugin.engines.live import LiveModel, on_meta, without_wrappers
from inference_plugin.engines.rank import RankIdentity, RankReply, RankRuntime, rank_timeout_s
from inference_plugin.engines.sglang_lora import LORA_TOUCHES, SglangAdapterSlots, hook_lora
from inference_plugin.engines.touch import Touch, check_touches
from inference_plugin.wire import addresses
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import CommitFailed, PeerLost
from inference_plugin.wire.messages import InFlight, MemoryTag, SleepLevel

__all__ = ["KNOWN_VERSIONS", "TOUCHES", "make_engine", "register", "run_scheduler"]

logger = logging.getLogger("sglang.weightwire")

KNOWN_VERSIONS = ("0.5.23",)
"""Versions that the tests run with. `TOUCHES`, not this list, decides whether another one is accepted."""

_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler."
_LOADER = "sglang.srt.model_loader.loader:"

TOUCHES = (
    # the event loop
    Touch(_SCHEDULER + "init_request_dispatcher", ("self",), "wrapped: the model is there; runtime and front start"),
    Touch("sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver._pull_raw_reqs", ("self",), "wrapped: our turn joins the requests"),
    Touch("sglang.utils:TypeBasedDispatcher", why="its `_mapping` gets our turn"),
    Touch(_SCHEDULER + "run_batch", ("batch",), "wrapped: notes when a step ran, for the brake"),
    Touch(_SCHEDULER + "_add_request_to_queue", ("req", "is_retracted"), "wrapped: holds new requests during a drain, refuses them while torn"),
    Touch(_SCHEDULER + "_maybe_namespace_elastic_radix_cache", ("req",), "wrapped: new requests get the version's prefix namespace"),
    # pausing, caches, versions
    Touch(_SCHEDULER + "pause_generation", ("recv_req",), "called: retract, in_place; its `_engine_paused` is read"),
    Touch(_SCHEDULER + "continue_generation", ("recv_req",), "called"),
    Touch(_SCHEDULER + "maybe_send_health_check_signal", ("self",), "called while paused: health checks are answered"),
    Touch(_SCHEDULER + "maybe_sleep_on_idle", ("self",), "called while paused"),
    Touch("sglang.srt.managers.utils:is_health_check_generate_req", ("recv_req",), "called: recognises them"),
    Touch("sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager.release_memory_occupation", ("recv_req",), "called: releases device memory"),
    Touch("sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager.resume_memory_occupation", ("recv_req",), "called: takes it back"),
    Touch("sglang.srt.managers.io_struct:ReleaseMemoryOccupationReqInput", ("tags",), "made"),
    Touch("sglang.srt.managers.io_struct:ResumeMemoryOccupationReqInput", ("tags",), "made"),
    Touch(_SCHEDULER + "abort_request", ("recv_req",), "called: abort all"),
    Touch(_SCHEDULER + "is_fully_idle", ("ignore_waiting",), "called: drained?"),
    Touch(_SCHEDULER + "flush_cache", ("empty_cache",), "called"),
    Touch(_SCHEDULER + "record_weight_version_change", ("new_version",), "called: stamps outputs"),
    Touch("sglang.srt.utils.weight_versions:WeightVersionEvent", ("old_version", "num_output_tokens"), "made: tokens still to be processed"),
    Touch("sglang.srt.runtime_context:get_serving", why="called: the version that is served"),
    Touch(_SCHEDULER + "send_abort_output", why="called: refuses a request"),
    Touch(_SCHEDULER + "_release_aborted_request", ("req",), "called: what a refused request holds"),
    Touch("sglang.srt.managers.scheduler:_make_abort_req", ("req", "finished_reason"), "called: refuses a request"),
    Touch("sglang.srt.managers.io_struct:PauseGenerationReqInput", ("mode",), "made"),
    Touch("sglang.srt.managers.io_struct:ContinueGenerationReqInput", ("torch_empty_cache",), "made"),
    Touch("sglang.srt.managers.io_struct:AbortReq", ("abort_all", "abort_message", "finished_reason"), "made"),
    # the model
    Touch("sglang.srt.runtime_context:get_parallel", why="called: ranks and groups"),
    Touch(_LOADER + "_initialize_model", ("model_config", "load_config", "quant_config"), "called: the skeleton"),
    Touch(_LOADER + "_get_quantization_config", ("model_config", "load_config"), "called: for the skeleton"),
    Touch("sglang.srt.layers.quantization.base_config:QuantizeMethodBase.process_weights_after_loading", ("layer",), "called on stand-ins: what the engine does to a module after a load"),
    Touch("sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding", why="recognised: padded on purpose"),
    Touch("sglang.srt.layers.rotary_embedding.factory:_ROPE_DICT", why="saved and restored around the skeleton's construction"),
    Touch("sglang.srt.model_loader.utils:set_default_torch_dtype", ("dtype",), "called: the skeleton's dtype"),
    *LORA_TOUCHES,
    # starting
    Touch("sglang.srt.managers.scheduler:run_scheduler_process", why="called by `run_scheduler`"),
    Touch("sglang.srt.entrypoints.engine:Engine.run_scheduler_process_func", why="replaced in `make_engine`'s class"),
)  # fmt: skip

_START_TIMEOUT_S = 600.0


@functools.cache
def register() -> None:
    """Hooks into this process's SGLang; a second call does nothing. Raises `EngineUnsupported`, having touched nothing."""
    check_touches("sglang", installed_version("sglang"), KNOWN_VERSIONS, TOUCHES)
    _hook_scheduler()
    hook_lora()


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """SGLang's `run_scheduler_process` with the extension, whatever plug-ins SGLang itself discovers."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    register()
    return run_scheduler_process(*args, **kwargs)


def make_engine(**kwargs: Any) -> Any:
    """An `sgl.Engine(**kwargs)` whose schedulers have the extension. For engines that are built by hand."""
    from sglang.srt.entrypoints.engine import Engine

    register()
    kind = type("Engine", (Engine,), {"run_scheduler_process_func": staticmethod(run_scheduler)})
    return kind(**kwargs)


# --- one rank ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Turn:
    """Travels among SGLang's requests: every rank takes a turn in the pass in which it arrives."""

    rid: str = "weightwire"
    http_worker_ipc: None = None


class EngineOperation(msgspec.Struct, frozen=True):
    """What every rank does to its own scheduler, in a turn."""

    name: Literal["retract", "abort", "drain", "flush", "stand", "resume", "installed", "refuse"]
    version: int = 0
    reason: str | None = None


class EngineReply(msgspec.Struct, frozen=True):
    """`done` false: what was asked can't be done yet."""

    done: bool = True
    error: str | None = None


class Step(msgspec.Struct, frozen=True):
    """What the leader of a turn sends: an operation of the groups, one of the engine, or (neither) the end."""

    rank: bytes | None = None
    engine: EngineOperation | None = None


class Site:
    """One rank: its runtime and what we keep beside its scheduler."""

    def __init__(self, scheduler: Any, replica: str) -> None:
        from sglang.srt.runtime_context import get_parallel

        self.scheduler = scheduler
        self.parallel = get_parallel()
        self.group = _own_group(self.parallel)
        self.rank = int(self.parallel.tp_rank)
        self.size = int(self.parallel.tp_size)
        self.leads = self.rank == 0
        self._speaks = self.parallel.attn_tp_rank == 0  # for its part of the requests, to their clients
        self.replica = _broadcast(self.group, self.size, self.leads, replica.encode()).decode()
        self.model = SglangModel(scheduler)
        self.runtime = RankRuntime(RankIdentity(self.replica, self.rank, tp_rank=self.rank), self.model)
        self.bell = Doorbell(scheduler.idle_sleeper, self.replica, self.rank)
        self.control: TurnControl | None = None
        self.refusal: str | None = None
        self.holding = False
        self.namespace = ""
        self._installations = 0
        self._held: list[Any] = []
        self._paused = False

    def take_turn(self, _: Turn) -> None:
        """The handler of `Turn`. Nothing that fails here may reach SGLang's event loop: it would end the server."""
        try:
            if self.control is not None:
                self.control.lead()
            else:
                self._follow()
        except Exception:
            logger.exception("weightwire: rank %d left a turn", self.rank)

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

        if self._paused and is_health_check_generate_req(request):
            self.scheduler.return_health_check_ipcs.append(request.http_worker_ipc)  # as SGLang does while it is busy
            return False
        if self.refusal is not None:
            self._end(request, self.refusal, HTTPStatus.SERVICE_UNAVAILABLE)
            return False
        if self.holding and not is_retracted and not request.output_ids:
            self._held.append(request)
            return False
        return True

    def while_paused(self, *, idle: bool) -> None:
        """In each pass of the event loop: what SGLang leaves out while it is paused. It answers health checks with the
        results of forward passes only, and never sleeps."""
        if self._paused:
            self.scheduler.maybe_send_health_check_signal()
            if idle:
                self.scheduler.maybe_sleep_on_idle()

    def _follow(self) -> None:
        while True:
            step = decode_as(_broadcast(self.group, self.size, False, b""), Step)
            if step.rank is None and step.engine is None:
                return
            _gather(self.group, self.rank, self.size, self.perform(step))

    def _engine(self, operation: EngineOperation) -> bool:
        from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput

        scheduler = self.scheduler
        if operation.name == "retract":
            self._retract()
            return bool(scheduler.flush_cache(empty_cache=False))
        if operation.name in ("abort", "drain"):
            if operation.name == "abort" and scheduler._engine_paused:
                self._retract()  # paused, they can't take the step in which SGLang ends them
            self.holding = True
            self._held += [request for request in scheduler.waiting_queue if not request.output_ids]
            scheduler.waiting_queue = [request for request in scheduler.waiting_queue if request.output_ids]
            if operation.name == "abort":
                held, self._held = self._held, []
                for request in held:
                    self._end(request, "aborted for a weight update or a pause", None)
                scheduler.abort_request(AbortReq(abort_all=True))
        elif operation.name == "flush":
            return bool(scheduler.is_fully_idle() and scheduler.flush_cache(empty_cache=False))
        elif operation.name == "stand":
            if not scheduler._engine_paused:
                self._paused = True
                scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
        elif operation.name == "resume":
            self._continue()
            self.holding = False
            held, self._held = self._held, []
            scheduler.waiting_queue.extend(held)
        elif operation.name == "installed":
            self._turn_namespace()
            self._stamp(operation.version)
        else:
            self._refuse(operation.reason)
        return True

    def _stamp(self, version: int) -> None:
        """SGLang's own record, and what it leaves out: tokens of a forward pass whose result is still to be processed
        (SGLang overlaps the two) are of the weights that it ran with."""
        from sglang.srt.runtime_context import get_serving
        from sglang.srt.utils.weight_versions import WeightVersionEvent

        scheduler = self.scheduler
        old = get_serving().weight_version
        scheduler.record_weight_version_change(new_version=str(version))
        if old == str(version) or not scheduler.enable_overlap:
            return
        for batch, _ in scheduler.result_queue:
            for request in batch.reqs:
                if request.inflight_middle_chunks > 0 or request.finished():
                    continue  # a middle chunk of a prompt makes no token
                events, made = request.weight_version_events, len(request.output_ids)
                if events and events[-1] == WeightVersionEvent(old, made):
                    events.pop()
                events.append(WeightVersionEvent(old, made + 1))

    def _turn_namespace(self) -> None:
        """No request that starts from here on finds cached keys and values that an older version computed.

        Requests in flight keep theirs; those that wait have none yet and move to the new namespace.
        """
        scheduler = self.scheduler
        self._installations += 1  # not the version: two groups may be at the same one
        if scheduler.is_fully_idle(ignore_waiting=True) and scheduler.flush_cache(empty_cache=False):
            self.namespace = ""
        else:
            self.namespace = f"weightwire={self._installations}"
        for request in [*scheduler.waiting_queue, *self._held]:
            if not request.output_ids:
                self.name(request)

    def name(self, request: Any) -> None:
        """Puts a request that has computed nothing yet into the present prefix namespace."""
        own = getattr(request, "weightwire_key", request.extra_key)
        request.weightwire_key = own
        request.extra_key = "|".join(filter(None, [own, self.namespace])) or own

    def _retract(self) -> None:
        """SGLang's own pause; one that its user made before stays after `_continue`."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._paused |= not self.scheduler._engine_paused
        self.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))

    def _continue(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if self._paused:
            self._paused = False
            self.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def _refuse(self, reason: str | None) -> None:
        self.refusal = reason
        if reason is None:
            return
        # Retracted first: a running request that is aborted takes one step more, and none may be taken.
        paused = self._paused
        self._retract()
        self._end_waiting(reason, HTTPStatus.SERVICE_UNAVAILABLE)
        if not paused:
            self._continue()

    def _end_waiting(self, reason: str, status: HTTPStatus | None) -> None:
        ended = [*self.scheduler.waiting_queue, *self._held]
        self.scheduler.waiting_queue, self._held = [], []
        for request in ended:
            self._end(request, reason, status)

    def _end(self, request: Any, reason: str, status: HTTPStatus | None) -> None:
        """Ends a request that computes nothing now; with a status its client gets an error."""
        from sglang.srt.managers.scheduler import _make_abort_req

        why = {"type": "abort", "status_code": status, "message": reason}
        if self._speaks:
            self.scheduler.send_abort_output(_make_abort_req(request, finished_reason=why), request)
        self.scheduler._release_aborted_request(request)


class SglangModel(LiveModel):
    """`install.contract.EngineModel` of one rank."""

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.layers.quantization.base_config import QuantizeMethodBase

        runner = scheduler.tp_worker.model_runner
        live: nn.Module = runner.model
        if scheduler.enable_lora:
            from sglang.srt.lora.layers import BaseLayerWithLoRA

            live = without_wrappers(live, BaseLayerWithLoRA)
            self.adapter_slots = SglangAdapterSlots(runner.lora_manager)
        self.post_processing = QuantizeMethodBase
        super().__init__(live, next(live.parameters()).device, _skeleton(runner))
        self._updater = scheduler.weight_updater
        self._backup = bool(runner.server_args.enable_weights_cpu_backup)
        captured = self.device.type != "cpu" and not runner.server_args.disable_cuda_graph
        self.fixed_addresses = captured or self._updater.memory_saver_adapter.enabled  # only memory of its own sleeps

    def unfinishable(self) -> str | None:
        if hasattr(self.live, "post_load_weights"):
            return f"{type(self.live).__name__} post-processes as a whole"
        return None

    def why_no_sleep(self, level: SleepLevel) -> str | None:
        if not self._updater.memory_saver_adapter.enabled:
            return "SGLang was started without --enable-memory-saver (which needs a GPU)"
        if level == 1 and not self._backup:
            return "SGLang keeps no copy of the weights without --enable-weights-cpu-backup: only level 2 is left"
        return None

    def sleep(self, level: SleepLevel) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        self._updater.release_memory_occupation(ReleaseMemoryOccupationReqInput())

    def wake_up(self, tag: MemoryTag) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        tags = ["weights"] if tag == "weights" else ["kv_cache", "cuda_graph"]
        self._updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))

    def pads(self, module: nn.Module) -> bool:
        from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

        return isinstance(module, VocabParallelEmbedding)


def _skeleton(runner: Any) -> nn.Module:
    """The model's class once more, on the meta device."""
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    config, load_config = runner.model_config, runner.load_config
    with on_meta(set_default_torch_dtype(config.dtype), factory._ROPE_DICT):
        model: nn.Module = _initialize_model(config, load_config, _get_quantization_config(config, load_config))
    return model.eval()


# --- the first rank ---------------------------------------------------------------------------------------------------


class TurnControl:
    """`engines.front.EngineControl` on the first rank: commands wait for a turn, and a turn reaches all ranks."""

    def __init__(self, site: Site, bells: Sequence[str]) -> None:
        self._site = site
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._waiting: Callable[[BaseException | None], None] | None = None
        self._lock = threading.Lock()
        self._bells = [_connected(address) for address in bells if address]

    def submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with self._lock, contextlib.suppress(zmq.Again):  # a bell that nobody answers has been rung often enough
            for bell in self._bells:
                bell.send(b"", zmq.DONTWAIT)

    def wants_turn(self) -> bool:
        """Called in each pass of the event loop."""
        if self._waiting is not None and self._site.scheduler.is_fully_idle():
            return True
        return bool(self._commands)

    def lead(self) -> None:
        """A turn on the first rank: what was submitted, then its end for the other ranks."""
        try:
            if self._waiting is not None and all(reply.done for reply in self._ask("flush")):
                waiting, self._waiting = self._waiting, None
                waiting(None)
            while self._commands:
                self._commands.popleft()()
        finally:
            _broadcast(self._site.group, self._site.size, True, msgspec.msgpack.encode(Step()))

    def call_ranks(self, request: bytes) -> list[bytes]:
        return self._step(Step(rank=request))

    def pause(self, in_flight: InFlight, paused: Callable[[BaseException | None], None]) -> None:
        if self._site.model.device.type != "cpu":
            torch.accelerator.synchronize(self._site.model.device)  # a forward pass may be queued
        if in_flight == "keep":
            paused(None)
        elif in_flight == "recompute":
            if not all(reply.done for reply in self._ask("retract")):
                raise CommitFailed("SGLang could not flush its cache with all requests retracted", phase="commit")
            paused(None)
        else:
            self._ask(in_flight)
            self._waiting = paused  # `lead` calls it once all ranks are idle

    def hold(self, asleep: frozenset[MemoryTag]) -> None:
        self._ask("stand")

    def resume(self) -> None:
        self._waiting = None
        self._ask("resume")

    def installed(self, group: str, version: int, in_flight: InFlight) -> None:
        self._ask("installed", version=version)

    def refuse(self, reason: str | None) -> None:
        self._ask("refuse", reason=reason)

    def _ask(self, name: Any, **arguments: Any) -> list[EngineReply]:
        answers = self._step(Step(engine=EngineOperation(name, **arguments)))
        replies = [decode_as(answer, EngineReply) for answer in answers]
        for rank, reply in enumerate(replies):
            if reply.error is not None:
                raise PeerLost(f"the scheduler of rank {rank} failed in {name!r}: {reply.error}", rank=rank)
        return replies

    def _step(self, step: Step) -> list[bytes]:
        site = self._site
        _broadcast(site.group, site.size, True, msgspec.msgpack.encode(step))
        return _gather(site.group, 0, site.size, site.perform(step))


class Doorbell:
    """Wakes a rank that sleeps on idle until one of its sockets has something. `address` is empty where none does.

    Beside the first rank those are, with data-parallel attention, all that have requests of their own.
    """

    def __init__(self, sleeper: Any, replica: str, rank: int) -> None:
        self.address = ""
        self._socket: zmq.Socket[bytes] | None = None
        if (poller := getattr(sleeper, "poller", None)) is not None:
            self._socket = zmq.Context.instance().socket(zmq.PULL)
            self._socket.bind(addresses.ipc_address(replica, f"bell{rank}"))
            self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            poller.register(self._socket, zmq.POLLIN)

    def quiet(self) -> None:
        """Takes what was rung; called in each pass of the event loop."""
        with contextlib.suppress(zmq.Again):
            while self._socket is not None:
                self._socket.recv(zmq.DONTWAIT)


def _connected(address: str) -> Any:
    bell: Any = zmq.Context.instance().socket(zmq.PUSH)
    bell.setsockopt(zmq.LINGER, 0)
    bell.connect(address)
    return bell


def _own_group(parallel: Any) -> Any:
    """A gloo group of this replica's ranks that nobody else uses: what fails in it leaves SGLang's in step."""
    if parallel.tp_size == 1:
        return None
    return dist.new_group(
        parallel.tp_group.ranks,
        backend="gloo",
        timeout=timedelta(seconds=_START_TIMEOUT_S),
        use_local_synchronization=True,
    )


def _broadcast(group: Any, size: int, leads: bool, data: bytes) -> bytes:
    """The first rank's bytes, on all ranks."""
    if size == 1:
        return data
    length = torch.tensor([len(data)])
    source = dist.get_global_rank(group, 0)
    _done(dist.broadcast(length, source, group=group, async_op=True))
    content = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if leads else torch.empty(int(length), dtype=torch.uint8)
    )
    _done(dist.broadcast(content, source, group=group, async_op=True))
    return content.numpy().tobytes()


def _gather(group: Any, rank: int, size: int, data: bytes) -> list[bytes]:
    """Every rank's bytes, in order of rank."""
    if size == 1:
        return [data]
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    _done(dist.all_gather(lengths, torch.tensor([len(data)]), group=group, async_op=True))
    longest = max(int(length) for length in lengths)
    mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    contents = [torch.empty_like(mine) for _ in range(size)]
    _done(dist.all_gather(contents, mine, group=group, async_op=True))
    return [content.numpy().tobytes()[: int(length)] for content, length in zip(contents, lengths, strict=True)]


def _done(work: Any) -> None:
    work.wait(timedelta(seconds=rank_timeout_s()))


# --- hooks ------------------------------------------------------------------------------------------------------------


def _hook_scheduler() -> None:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

    @wrap(Scheduler, "init_request_dispatcher")
    def init_request_dispatcher(original: Callable[..., Any], self: Any) -> Any:
        result = original(self)
        _start(self)
        return result

    @wrap(SchedulerRequestReceiver, "_pull_raw_reqs")
    def pull_raw_reqs(original: Callable[..., Any], self: Any) -> Any:
        if _site is not None:
            _site.while_paused(idle=_site.control is None or not _site.control.wants_turn())
        requests = original(self)
        if requests is not None and _site is not None:
            _site.bell.quiet()
            if _site.control is not None and _site.control.wants_turn():
                requests.append(Turn())
        return requests

    @wrap(Scheduler, "run_batch")
    def run_batch(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        site: Site | None = getattr(self, "_weightwire_site", None)
        with site.model.step() if site is not None else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    @wrap(Scheduler, "_add_request_to_queue")
    def add_request_to_queue(original: Callable[..., Any], self: Any, req: Any, is_retracted: bool = False) -> Any:
        site: Site | None = getattr(self, "_weightwire_site", None)
        if site is not None and not site.admit(req, is_retracted):
            return None
        return original(self, req, is_retracted)

    @wrap(Scheduler, "_maybe_namespace_elastic_radix_cache")
    def namespace(original: Callable[..., Any], self: Any, req: Any) -> Any:
        result = original(self, req)
        site: Site | None = getattr(self, "_weightwire_site", None)
        if site is not None:
            site.name(req)
        return result


_site: Site | None = None
"""This process's rank: the request receiver doesn't know its scheduler."""


def _start(scheduler: Any) -> None:
    """Starts this rank and, on the first, the front; publishes the replica's card."""
    global _site
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if why := _unserved(parallel):
        logger.warning("weightwire: off, no trainer will find this engine: %s", why)
        return
    site = scheduler._weightwire_site = Site(scheduler, addresses.new_replica_id("sglang"))
    scheduler._request_dispatcher._mapping[Turn] = site.take_turn
    start = RankReply("start", site.rank, card=site.runtime.card())
    cards = [
        decode_as(card, RankReply).card
        for card in _gather(site.group, site.rank, site.size, msgspec.msgpack.encode(start))
    ]
    bells = _gather(site.group, site.rank, site.size, site.bell.address.encode())
    _site = site
    if not site.leads:
        return
    control = site.control = TurnControl(site, [bell.decode() for bell in bells])
    open_front(
        control,
        site.replica,
        cards,
        engine="sglang",
        engine_version=installed_version("sglang"),
        model=str(scheduler.model_config.model_path),
        tp=site.size,
        pp=1,
        dp_rank=int(parallel.dp_rank or 0),
        parent_pid=os.getppid(),
    )


def _unserved(parallel: Any) -> str:
    """Why a turn would not reach all ranks in the same pass; "" if it does."""
    if parallel.pp_size > 1:
        return "the stages of a pipeline don't take requests in the same pass"
    if parallel.attn_dp_enabled and parallel.enable_dp_attention_local_control_broadcast:
        return "local control broadcast keeps one group's control requests from the others"
    return ""


def main() -> None:
    """`python -m inference_plugin.engines.sglang`: SGLang's server, all its arguments, with the extension."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    register()
    load_plugins()
    try:
        launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    from inference_plugin.engines.sglang import main as canonical_main  # not this copy of the module, which is __main__

    canonical_main()
