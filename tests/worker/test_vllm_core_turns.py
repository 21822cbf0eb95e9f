"""Turns of engine cores that share experts: vLLM's own loop of such a core, three times in one process, with steps that end only
if all cores take them. Requests and turns come at any time. Whatever comes when, all cores take each step with the same version,
and no core waits for one that doesn't come."""

from __future__ import annotations

import collections
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.config import ParallelConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineShutdownState

from inference_plugin.engines.operations import RankOperation, RankReply
from inference_plugin.engines.rank_sockets import RankSockets
from inference_plugin.engines.vllm.core import CoreCommand
from inference_plugin.engines.vllm.core_start import start
from inference_plugin.engines.vllm.core_turns import FollowingCore, LeadingCore, connect
from inference_plugin.engines.vllm.shared_core import SharedCore
from inference_plugin.net import addresses
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import EngineUnsupported, PeerLost, WeightwireError
from inference_plugin.wire.messages import InFlight, WorkerCard
from tests.support.rig import runtime

CORES = 3
STUCK_S = 120.0


class Collective:
    """Ends once all cores have come, as a step of experts that they share. The values of all, on each of them."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._barrier = threading.Barrier(CORES)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(STUCK_S)
        values = [self._values[rank] for rank in range(CORES)]
        self._barrier.wait(STUCK_S)
        return values

    def abort(self) -> None:
        self._barrier.abort()


class Scheduler:
    """Requests are numbers: of the steps that they still take."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.pause_state = PauseState.UNPAUSED

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def has_unfinished_requests(self) -> bool:
        if self.pause_state == PauseState.PAUSED_ALL:
            return False
        return bool(self.running or (self.waiting and self.pause_state == PauseState.UNPAUSED))

    has_requests = has_unfinished_requests

    def reset_connector_cache(self) -> bool:
        return True

    def finish_requests(self, _: Any, status: Any) -> list[tuple[str, int]]:
        self.running, self.waiting = [], []
        return []

    def schedule(self) -> bool:
        """Whether a request takes part in this step."""
        if self.pause_state == PauseState.UNPAUSED:
            self.running, self.waiting = [*self.running, *self.waiting], []
        if self.pause_state == PauseState.PAUSED_ALL or not self.running:
            return False
        self.running = [left - 1 for left in self.running if left > 1]
        return True


def sync_dp_state(group: Any, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
    """`ParallelConfig.sync_dp_state`: a static method before vLLM 0.33."""
    told = group.gather(group.rank, (has_unfinished, pending_pause))
    pauses = sum(pending for _, pending in told)
    return any(unfinished for unfinished, _ in told) or pauses % CORES != 0, pauses == CORES


class Core(DPEngineCoreProc):
    """vLLM's loop over a scheduler and steps of our own, with the wrapping of `hooks`."""

    def __init__(self, rank: int, steps: Collective, states: Collective) -> None:
        self.dp_rank = self.engine_index = rank
        self.dp_group = SimpleNamespace(rank=rank, gather=states.gather)
        self.engines_running = self.pending_pause = self.ignore_start_dp_wave = False
        self.has_coordinator, self.publish_dp_lb_stats, self.process_input_queue_block = True, False, True
        self.shutdown_state = EngineShutdownState.RUNNING
        self.eep_scaling_state = self.batch_queue = None
        self.enable_fault_tolerance = False
        self.input_queue, self.output_queue, self.aborts_queue = queue.Queue(), queue.Queue(), queue.Queue()
        self._idle_state_callbacks: list[Any] = []
        self.current_wave = self.step_counter = 0
        self.dp_sync_interval = 4
        self.scheduler = Scheduler()
        self.model_executor = SimpleNamespace(is_sleeping=False, sleeping_tags=set(), collective_rpc=self.rpc)
        self.vllm_config = SimpleNamespace(
            shutdown_timeout=0, parallel_config=SimpleNamespace(sync_dp_state=sync_dp_state)
        )
        self.control = SharedCore(self)
        self.steps = steps
        self.version = 0
        self.in_step = False
        self.seen: list[int] = []
        self.delay_s: Callable[[], float] = lambda: 0.0

    def rpc(self, method: str, timeout: float = 0.0, args: tuple[bytes, ...] = ()) -> list[bytes]:
        (request,) = args
        operation = decode_as(request, RankOperation)
        if operation.name == "install":
            self.version = operation.version
        return [msgspec.msgpack.encode(RankReply(operation.nonce, self.dp_rank))]

    def step(self) -> None:
        time.sleep(self.delay_s())
        self.seen.append(self.version)
        self.in_step = True
        self.steps.gather(self.dp_rank, None)
        self.in_step = False

    def _process_engine_step(self) -> bool:
        took_part = self.scheduler.schedule()
        if took_part:
            self.step()
        return took_part

    def execute_dummy_batch(self) -> None:
        self.step()

    def capture_iteration_details(self, _: Any) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def _process_input_queue(self) -> None:
        self.control.between_steps(super()._process_input_queue)

    def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
        unfinished = super()._has_global_unfinished_reqs(local_unfinished)
        self.control.gate.count()
        return unfinished

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        if isinstance(request, CoreCommand):
            request.run()
        elif request_type == EngineCoreRequestType.ADD:
            self.scheduler.waiting.append(request)
        else:
            super()._handle_client_request(request_type, request)

    def reset_prefix_cache(self, **_: Any) -> bool:
        return True

    def reset_encoder_cache(self) -> None: ...

    def pause_scheduler(self, mode: Any = "abort", clear_cache: bool = True) -> Any:
        return self.control.pauses.pause(partial(super().pause_scheduler, mode, clear_cache))

    def _finish_pause(self, clear_cache: bool) -> None: ...

    def _send_abort_outputs(self, _: Any) -> None: ...


class Cores:
    """Three of them, each in a thread; the first one leads."""

    def __init__(self, seed: int) -> None:
        self.steps, self.states = Collective(), Collective()
        self.random = random.Random(seed)
        self.cores = [Core(rank, self.steps, self.states) for rank in range(CORES)]
        pairs = [socket.socketpair() for _ in self.cores[1:]]
        links = [RankSockets({rank: here for rank, (here, _) in enumerate(pairs, 1)})]
        links += [RankSockets({0: there}) for _, there in pairs]
        self.links = links
        self.leading = LeadingCore(self.cores[0].control, links[0])
        for core, link in zip(self.cores[1:], links[1:], strict=True):
            FollowingCore(core.control, link)
        self.failed: list[BaseException] = []
        self.ended = False
        self.threads = [threading.Thread(target=self.run, args=(core,), daemon=True) for core in self.cores]
        self.threads.append(threading.Thread(target=self.coordinate, daemon=True))
        for thread in self.threads:
            thread.start()

    def run(self, core: Core) -> None:
        try:
            core.run_busy_loop()
        except SystemExit:
            pass
        except BaseException as error:  # noqa: BLE001 -- the test looks at it
            self.failed.append(error)

    def coordinate(self) -> None:
        """vLLM's coordinator: wakes idle cores where another one has a request, sooner or later."""
        while not self.ended:
            time.sleep(0.002)
            if any(core.in_step or core.scheduler.has_unfinished_requests() for core in self.cores):
                wave = max(core.current_wave for core in self.cores)
                for core in self.cores:
                    if not core.engines_running:
                        core.input_queue.put((EngineCoreRequestType.START_DP_WAVE, (wave, -1)))

    def add(self, rank: int, steps: int) -> None:
        self.cores[rank].input_queue.put((EngineCoreRequestType.ADD, steps))

    def command(self, act: Callable[[], Any]) -> Future[Any]:
        """Runs `act` in a turn."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(act())
            except Exception as error:  # noqa: BLE001 -- it is the test's
                done.set_exception(error)

        self.leading.submit(run)
        return done

    def user_pauses(self, mode: str) -> list[Future[Any]]:
        """vLLM's own pause, which reaches each core by itself; done where it is in force."""
        told: list[Future[Any]] = [Future() for _ in self.cores]
        for core, future in zip(self.cores, told, strict=True):

            def pause(core: Core = core, future: Future[Any] = future) -> None:
                core.pause_scheduler(mode, False).add_done_callback(lambda paused: future.set_result(paused.result(0)))

            core.input_queue.put((EngineCoreRequestType.WAKEUP, CoreCommand(pause)))
        return told

    def user_resumes(self) -> list[Future[None]]:
        told: list[Future[None]] = [Future() for _ in self.cores]
        for core, future in zip(self.cores, told, strict=True):

            def resume(core: Core = core, future: Future[None] = future) -> None:
                with core.control.collective() as entered:
                    if entered:
                        core.resume_scheduler()
                if entered:
                    future.set_result(None)
                else:
                    core.control.defer((EngineCoreRequestType.WAKEUP, CoreCommand(partial(resume, core, future))))

            core.input_queue.put((EngineCoreRequestType.WAKEUP, CoreCommand(resume)))
        return told

    def ask(self, name: Any, version: int = 0) -> list[RankReply]:
        request = msgspec.msgpack.encode(RankOperation(f"{name}{version}", name, version=version))
        replies = [decode_as(answer, RankReply) for answer in self.leading.call_ranks(request)]
        assert [reply.rank for reply in replies] == list(range(CORES))
        return replies

    def install(self, version: int) -> None:
        """As a commit does, once the cores stand."""
        steps = {len(core.seen) for core in self.cores}
        assert len(steps) == 1, f"the cores stand after different steps: {steps}"
        self.ask("install", version)
        time.sleep(self.random.random() / 500)
        assert {len(core.seen) for core in self.cores} == steps, "a core stepped while all were to stand"
        assert {core.version for core in self.cores} == {version}

    def hold(self) -> None:
        """No core steps until `leading.resume`."""

        def hold() -> None:
            self.leading.pause("keep")
            self.leading.hold(frozenset())

        self.command(hold).result(STUCK_S)

    def commit(self, version: int, in_flight: InFlight) -> None:
        """Over one turn, or over two where requests have to end first."""
        over: Future[None] = Future()

        def begin() -> None:
            self.ask("check")
            waits = self.leading.pause(in_flight)
            if waits is None:
                go_on(None)
            else:
                waits.add_done_callback(go_on)

        def go_on(waited: Future[None] | None) -> None:
            try:
                if waited is not None:
                    waited.result(0)
                self.install(version)
                self.leading.resume()
            except BaseException as error:  # noqa: BLE001 -- raised below
                over.set_exception(error)
            else:
                over.set_result(None)

        self.command(begin).result(STUCK_S)
        over.result(STUCK_S)

    def idle(self) -> bool:
        return not any(core.scheduler.running or core.scheduler.waiting or core.engines_running for core in self.cores)

    def close(self) -> None:
        self.ended = True
        for link in self.links:
            link.close()
        for core in self.cores:
            core.shutdown_state = EngineShutdownState.REQUESTED
            core.scheduler.get_num_unfinished_requests = lambda: 0
            core.input_queue.put((EngineCoreRequestType.WAKEUP, None))
        self.steps.abort()
        self.states.abort()
        for thread in self.threads:
            thread.join(STUCK_S)


@pytest.fixture
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cores]:
    def has_unfinished(group: Any, local: bool) -> bool:
        return any(group.gather(group.rank, local))

    def resume_scheduler(core: Core) -> None:
        core.control.pauses.resume(partial(resume, core))

    resume = EngineCore.resume_scheduler
    monkeypatch.setattr(EngineCore, "resume_scheduler", resume_scheduler)
    monkeypatch.setattr(ParallelConfig, "sync_dp_state", staticmethod(sync_dp_state))
    monkeypatch.setattr(ParallelConfig, "has_unfinished_dp", staticmethod(has_unfinished))
    three = Cores(getattr(request, "param", 0))
    yield three
    three.close()


def eventually(look: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + STUCK_S
    while not look():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.002)


@pytest.mark.parametrize("cores", range(4), indirect=True)
def test_all_cores_take_every_step_with_one_version_whenever_requests_and_turns_come(cores: Cores) -> None:
    pick = cores.random
    for core in cores.cores:
        core.delay_s = partial(lambda random: random.random() / 500, random.Random(core.dp_rank))
    policies: list[InFlight] = ["keep", "keep", "keep", "recompute", "abort", "drain"]
    for version in range(1, 61):
        for _ in range(pick.randrange(3)):
            cores.add(pick.randrange(CORES), pick.randrange(1, 12))
        time.sleep(pick.choice([0.0, 0.0, 0.003, 0.02]))
        cores.commit(version, pick.choice(policies))
        assert not cores.failed, cores.failed
    eventually(cores.idle, "the requests to end")
    assert not cores.failed, cores.failed
    first, *others = (core.seen for core in cores.cores)
    assert all(seen == first for seen in others), "the cores disagree about a step"
    assert len(collections.Counter(first)) > 20, "the versions were to change while steps ran"


def test_no_core_steps_while_the_replica_is_held_and_requests_of_then_are_answered_after_it(cores: Cores) -> None:
    cores.add(1, 10**9)
    eventually(lambda: len(cores.cores[0].seen) > 10, "steps")

    cores.hold()
    stood = [len(core.seen) for core in cores.cores]
    cores.add(2, 5)
    cores.command(lambda: cores.install(1)).result(STUCK_S)
    eventually(lambda: bool(cores.cores[2].scheduler.waiting), "the request")
    time.sleep(0.1)
    assert [len(core.seen) for core in cores.cores] == stood == [stood[0]] * CORES
    assert cores.cores[1].scheduler.running and cores.cores[2].scheduler.waiting
    cores.cores[1].scheduler.running = [20]
    cores.command(cores.leading.resume).result(STUCK_S)
    eventually(cores.idle, "the requests to end")
    assert {len(core.seen) for core in cores.cores} != {stood[0]}
    assert [core.seen for core in cores.cores] == [cores.cores[0].seen] * CORES


def test_no_core_steps_while_the_replica_refuses_and_all_do_once_it_is_healed(cores: Cores) -> None:
    cores.add(1, 200)
    eventually(lambda: len(cores.cores[0].seen) > 10, "steps")

    def tear() -> None:
        cores.leading.pause("keep")
        cores.leading.refuse("torn")
        cores.leading.resume()

    def heal() -> None:
        cores.leading.pause("keep")
        cores.install(1)
        cores.leading.refuse(None)
        cores.leading.resume()

    cores.command(tear).result(STUCK_S)
    stood = [len(core.seen) for core in cores.cores]
    assert not any(core.scheduler.running for core in cores.cores)
    for core in cores.cores:
        core.input_queue.put((EngineCoreRequestType.START_DP_WAVE, (core.current_wave, -1)))
    time.sleep(0.1)
    assert [len(core.seen) for core in cores.cores] == stood == [stood[0]] * CORES
    cores.command(heal).result(STUCK_S)
    cores.add(2, 5)
    eventually(lambda: len(cores.cores[0].seen) >= stood[0] + 5, "steps")
    eventually(cores.idle, "the request to end")
    assert {version for core in cores.cores for version in core.seen[stood[0] :]} == {1}


def test_cores_that_vllm_itself_has_paused_stay_so_after_a_turn(cores: Cores) -> None:
    told = cores.user_pauses("keep")
    cores.commit(1, "keep")  # while vLLM is about to, or has them stand
    for future in told:
        future.result(STUCK_S)
    cores.commit(2, "keep")
    assert [core.ignore_start_dp_wave for core in cores.cores] == [True] * CORES
    assert [core.scheduler.pause_state for core in cores.cores] == [PauseState.PAUSED_ALL] * CORES
    eventually(lambda: not any(core.engines_running for core in cores.cores), "the cores to stand")


def test_a_resume_of_the_user_s_takes_effect_as_the_replica_is_let_go(cores: Cores) -> None:
    for future in cores.user_pauses("keep"):
        future.result(STUCK_S)
    cores.add(1, 20)

    cores.hold()
    stood = [len(core.seen) for core in cores.cores]
    for resumed in cores.user_resumes():
        resumed.result(STUCK_S)
    time.sleep(0.1)
    assert [len(core.seen) for core in cores.cores] == stood == [stood[0]] * CORES
    cores.command(cores.leading.resume).result(STUCK_S)
    eventually(lambda: len(cores.cores[0].seen) >= stood[0] + 20, "the steps of the request")
    eventually(cores.idle, "the request to end")


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_a_pause_of_the_user_s_goes_on_where_the_replica_is_let_go(cores: Cores, mode: str) -> None:
    cores.add(1, 10**9)
    eventually(lambda: len(cores.cores[0].seen) > 10, "steps")

    cores.hold()
    told = cores.user_pauses(mode)
    if mode != "wait":
        for future in told:
            future.result(STUCK_S)
    cores.command(cores.leading.resume).result(STUCK_S)
    if mode == "wait":
        stood = len(cores.cores[0].seen)
        eventually(lambda: len(cores.cores[0].seen) > stood + 10, "steps of the request that the pause waits for")
        assert not told[1].done()
        cores.cores[1].scheduler.running = [5]
        for future in told:
            future.result(STUCK_S)
    cores.add(2, 5)
    eventually(lambda: bool(cores.cores[2].scheduler.waiting), "the request")
    eventually(lambda: not any(core.engines_running for core in cores.cores), "the cores to stand")
    stood = len(cores.cores[0].seen)
    time.sleep(0.05)
    assert [len(core.seen) for core in cores.cores] == [stood] * CORES
    cores.cores[1].scheduler.running = []
    for resumed in cores.user_resumes():
        resumed.result(STUCK_S)
    eventually(lambda: len(cores.cores[0].seen) >= stood + 5, "the steps of the request")
    eventually(cores.idle, "the request to end")


def paused_by_user(core: Core) -> bool:
    """While the replica is held."""
    return core.control.pauses.wanted != PauseState.UNPAUSED and not (core.pending_pause or core.engines_running)


@pytest.mark.parametrize("cores", range(4), indirect=True)
def test_pauses_of_the_user_s_and_turns_come_whenever_they_like(cores: Cores) -> None:
    pick, version = cores.random, 0

    for _ in range(30):
        for _ in range(pick.randrange(3)):
            cores.add(pick.randrange(CORES), pick.randrange(1, 12))
        is_held = pick.random() < 0.5
        if is_held:
            cores.hold()
        told = cores.user_pauses(pick.choice(["keep", "abort", "wait"]))
        time.sleep(pick.choice([0.0, 0.003]))
        if is_held and pick.random() < 0.5:
            cores.command(cores.leading.resume).result(STUCK_S)
            is_held = False
        if not is_held:
            version += 1
            cores.commit(version, pick.choice(["keep", "recompute", "abort"]))  # type: ignore[arg-type]
            for future in told:
                future.result(STUCK_S)
            steps = [len(core.seen) for core in cores.cores]
            time.sleep(0.003)
            assert [len(core.seen) for core in cores.cores] == steps == [steps[0]] * CORES
        else:
            eventually(lambda: all(map(paused_by_user, cores.cores)), "the pause on all cores")
        for resumed in cores.user_resumes():
            resumed.result(STUCK_S)
        if is_held:
            cores.command(cores.leading.resume).result(STUCK_S)
        assert not cores.failed, cores.failed
    eventually(cores.idle, "the requests to end")
    assert not cores.failed, cores.failed
    assert all(core.seen == cores.cores[0].seen for core in cores.cores)


def test_a_core_in_a_collective_of_vllm_s_own_is_not_halted_and_the_turn_comes_after_it(cores: Cores) -> None:
    """vLLM's `resume_scheduler` waits for all cores: to halt one of them in it would have two wait for each other."""
    begun, waits = threading.Event(), threading.Event()

    def in_collective() -> None:
        with cores.cores[1].control.collective() as entered:
            assert entered
            begun.set()
            assert waits.wait(STUCK_S)

    cores.cores[1].input_queue.put((EngineCoreRequestType.WAKEUP, CoreCommand(in_collective)))
    assert begun.wait(STUCK_S)
    done = cores.command(lambda: cores.ask("check"))
    time.sleep(0.05)
    assert not done.done()
    done_elsewhere: Future[None] = Future()
    cores.cores[0].input_queue.put((EngineCoreRequestType.WAKEUP, CoreCommand(lambda: done_elsewhere.set_result(None))))
    done_elsewhere.result(STUCK_S)  # the first core is not held up by it
    waits.set()
    assert len(done.result(STUCK_S)) == CORES


@pytest.mark.parametrize("held", [False, True])
def test_cores_that_lose_each_other_go_on_unless_their_weights_may_differ(cores: Cores, held: bool) -> None:
    def lose() -> None:
        cores.leading.pause("keep")
        if held:
            cores.ask("install", 1)
        cores.links[1].close()
        cores.ask("check")

    with pytest.raises(PeerLost, match="rank 1 has ended, or has left"):
        cores.command(lose).result(STUCK_S)
    with pytest.raises(WeightwireError, match="lost each other"):
        cores.command(lambda: cores.ask("check")).result(STUCK_S)
    refusals = [core.control for core in cores.cores]
    eventually(lambda: all(bool(one.refusal) is held for one in refusals), "the cores to refuse")
    state = PauseState.PAUSED_ALL if held else PauseState.UNPAUSED
    eventually(lambda: all(core.scheduler.pause_state == state for core in cores.cores), f"all cores {state}")
    if not held:
        cores.add(2, 5)
        eventually(lambda: len(cores.cores[0].seen) >= 5, "the steps of a request")


@pytest.mark.parametrize("what", ["enable_elastic_ep", "enable_eplb", "enable_fault_tolerance"])
def test_ranks_or_experts_that_change_while_the_engine_runs_are_refused_by_name(what: str) -> None:
    core = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**{what: True})))
    with pytest.raises(EngineUnsupported, match=what):
        connect(core)


def test_ranks_that_an_external_launcher_started_are_refused_by_name() -> None:
    parallel = SimpleNamespace(distributed_executor_backend="external_launcher", world_size=2, data_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(is_moe=False))
    with pytest.raises(EngineUnsupported, match="an external launcher started the ranks"):
        start(SimpleNamespace(vllm_config=config), ())


def test_cores_of_several_hosts_are_refused_by_name() -> None:
    class Group:
        """vLLM's gloo group of the cores."""

        def size(self) -> int:
            return 2

        def allgather(self, into: list[list[Any]], mine: list[Any]) -> Any:
            for gathered in into[0]:
                gathered.copy_(mine[0])
            into[0][1][8] ^= 1  # the other one is on a host of another boot id
            return SimpleNamespace(wait=lambda _: None)

    core = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace()), dp_group=Group(), dp_rank=0, dp_size=2
    )
    with pytest.raises(EngineUnsupported, match="on several hosts"):
        connect(core)


class Starting(DPEngineCoreProc):
    """A core whose one worker can start, or can't."""

    def __init__(self, rank: int, states: Collective, starts: bool) -> None:
        self.dp_rank, self.dp_size, self.starts, self.states = rank, CORES, starts, states
        self.dp_group = self
        self.model_executor = SimpleNamespace(collective_rpc=self.rpc)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace())
        self.asked: list[Any] = []

    def size(self) -> int:
        return CORES

    def allgather(self, into: list[list[Any]], mine: list[Any]) -> Any:
        for gathered, told in zip(into[0], self.states.gather(self.dp_rank, mine[0].clone()), strict=True):
            gathered.copy_(told)
        return SimpleNamespace(wait=lambda _: None)

    def rpc(self, method: Any, timeout: float = 0.0, args: tuple[Any, ...] = ()) -> list[Any]:
        self.asked.append(method)
        if method != "weightwire_start":
            return [True]
        (replica,) = args
        card = WorkerCard(replica, self.dp_rank, 0, 0, 1, addresses.boot_id(), "ipc:///nowhere", "cpu", 0)
        failed = None if self.starts else EngineUnsupported("no second model").info()
        return [msgspec.msgpack.encode(RankReply("start", self.dp_rank, card=card, error=failed))]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_start_that_fails_on_one_core_fails_on_all_with_its_reason_and_leaves_no_worker(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = Collective()
    cores = [Starting(one, states, starts=one != rank) for one in range(CORES)]
    with runtime(monkeypatch), ThreadPoolExecutor(CORES) as pool:
        failed = [future.exception(STUCK_S) for future in [pool.submit(start, core, ()) for core in cores]]
    assert [type(error) for error in failed] == [EngineUnsupported] * CORES
    assert all("no second model" in str(error) and error.rank == rank for error in failed), failed
    assert [core.asked[-1] for core in cores] == ["weightwire_stop"] * CORES
