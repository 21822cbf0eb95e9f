"""vLLM's engine in the process of its caller, whose calls and our commands run on two threads: on the parts that they touch."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import core as vllm_core
from vllm.v1.engine import core_client

from inference_plugin.engines.vllm import hooks
from inference_plugin.engines.vllm.core import CoreControl
from inference_plugin.wire.errors import VersionConflict


class Core:
    """vLLM's `EngineCore`, as far as these calls go."""

    batch_queue = None

    def __init__(self, fails: bool = False) -> None:
        self.weights, self.running, self.told = "old", 0, list[str]()
        self.scheduler = SimpleNamespace(
            set_pause_state=lambda state: setattr(self.scheduler, "pause_state", state),
            has_unfinished_requests=lambda: self.running > 0 and self.scheduler.pause_state != PauseState.PAUSED_ALL,
            reset_connector_cache=lambda: True,
            pause_state=PauseState.UNPAUSED,
        )
        self.model_executor = SimpleNamespace(collective_rpc=lambda method, **_: self.told.append(method))
        self._initialize_kv_caches(None)
        if fails:
            raise ValueError("no such scheduler")

    def _initialize_kv_caches(self, vllm_config: Any) -> None: ...
    def reset_prefix_cache(self, **_: bool) -> None: ...
    def reset_encoder_cache(self) -> None: ...

    def read(self) -> str:
        return self.weights

    shutdown = read


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """`EngineCore` and `InprocClient` with our hooks, and what the last core's coordinator saw as it was closed in `closed`."""

    def start(core: Any, lacks: tuple[str, ...]) -> None:
        control = core.weightwire_control = CoreControl(core)
        control.coordinator = SimpleNamespace(close=lambda: core.told.append(f"closed with {core.weights}"))  # type: ignore[assignment]
        control.lock.acquire()  # until the client is made
        cores.append(core)

    def init(self: Any, **options: bool) -> None:
        self.engine_core = core_kind(**options)

    cores: list[Any] = []
    core_kind: Any = type("EngineCore", (Core,), {**vars(Core), "cores": cores})
    names = [name for name in vars(core_client.InprocClient) if not name.startswith("_")]
    read = dict.fromkeys(names, lambda self, *_: self.engine_core.read())
    core_names = ("collective_rpc", "sleep", "pause_scheduler", "_finish_pause", "resume_scheduler")
    for name in core_names:
        setattr(core_kind, name, vars(vllm_core.EngineCore)[name])
    client_kind = type("InprocClient", (), {"__init__": init, **read})
    proc_kind = type("EngineCoreProc", (), {"_handle_client_request": None, "pause_scheduler": None})
    with monkeypatch.context() as patch:
        patch.setattr(core_client, "InprocClient", client_kind)
        patch.setattr(vllm_core, "EngineCore", core_kind)
        patch.setattr(vllm_core, "EngineCoreProc", proc_kind)
        patch.setattr("vllm.v1.executor.Executor", type("Executor", (), {"sleep": None, "wake_up": None}))
        hooks.hook_core(())
        hooks.hook_own_commands()
        hooks.hook_inproc()
    monkeypatch.setattr(hooks, "start_coordinator", start)
    return core_kind, client_kind


def install(client: Any) -> None:
    """Returns while an update is being installed."""
    core, begun = client.engine_core, threading.Event()

    def command() -> None:
        core.weights = "half of the new ones"
        begun.set()
        time.sleep(0.05)
        core.weights = "new"

    core.weightwire_control.submit(command)
    assert begun.wait(10)


@pytest.mark.parametrize("name", hooks.CALLED_UNDER_THE_LOCK)
def test_what_the_caller_asks_for_while_an_update_is_installed_is_done_after_it(
    kinds: tuple[Any, Any], name: str
) -> None:
    client = kinds[1]()
    install(client)
    assert getattr(client, name)() == "new"


def test_a_step_that_waits_for_an_update_goes_on_though_a_plug_in_ends_the_update_s_thread(
    kinds: tuple[Any, Any],
) -> None:
    control: CoreControl = kinds[1]().engine_core.weightwire_control

    def command() -> None:
        raise SystemExit("a plug-in's")

    def step() -> Any:
        control.submit(command)
        return control.step(lambda: "outputs")

    caller = threading.Thread(target=control.step, args=(step,), daemon=True)
    caller.start()
    caller.join(10)
    assert not caller.is_alive()


def test_an_engine_that_its_caller_ends_while_an_update_is_installed_ends_after_it(kinds: tuple[Any, Any]) -> None:
    client = kinds[1]()
    install(client)
    assert client.engine_core.shutdown() == "new"
    assert client.engine_core.told == ["closed with new"]


def test_nothing_of_ours_is_left_of_an_engine_that_could_not_be_made_after_its_replica_was_there(
    kinds: tuple[Any, Any],
) -> None:
    core_kind, client_kind = kinds
    with pytest.raises(ValueError, match="no such scheduler"):
        client_kind(fails=True)
    (core,) = core_kind.cores
    assert core.told == ["closed with old", "weightwire_stop"]
    ran = threading.Event()
    core.weightwire_control.submit(ran.set)
    assert ran.wait(10), "a thread waits for ever"


def test_a_sleep_of_the_caller_s_comes_after_an_update_that_waits_for_requests_or_is_refused(
    kinds: tuple[Any, Any],
) -> None:
    core = kinds[1]().engine_core
    control: CoreControl = core.weightwire_control
    core.running = 1
    stands = control.pause("drain")
    assert stands is not None
    assert control.pauses.pause(lambda: core.scheduler.set_pause_state(PauseState.PAUSED_ALL)) is None
    with control.lock:
        control.end_drain()
        with pytest.raises(VersionConflict, match="waits for the requests of this engine to end"):
            control.check_may_sleep()
        assert core.scheduler.pause_state == PauseState.PAUSED_NEW
        core.running = 0
        control.end_drain()
        control.check_may_sleep()
        assert stands.done()


def test_a_sleep_of_the_caller_s_that_is_refused_leaves_the_engine_stepping(kinds: tuple[Any, Any]) -> None:
    """vLLM stops the scheduler before it calls its executor: under "keep", requests would stand for ever."""
    core = kinds[1]().engine_core
    control: CoreControl = core.weightwire_control
    core.running = 1
    assert control.pause("drain") is not None
    with pytest.raises(VersionConflict, match="waits for the requests of this engine to end"):
        core.sleep(1, "keep")
    control.resume()
    assert core.scheduler.pause_state == PauseState.UNPAUSED
