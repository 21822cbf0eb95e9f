"""Beside our updates the user gives the engine commands of its own: loads of weights, pauses, sleeps. Or a second trainer does.

What is said of the weights is so, whoever wrote them. The engine steps once nobody wants it to stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from inference_plugin.wire.errors import ReplicaAsleep, VersionConflict
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_faults import Halted
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, source, weights
from tests.support.engines import Driver, eventually
from tests.support.families import FAMILIES
from tests.support.managers import SyncManager
from tests.support.sglang_engines import SglangDriver
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class Both:
    """An engine that a trainer updates and a user commands. Models by letter; A is the one that it started from."""

    def __init__(self, name: str, driver: Driver, models: dict[str, Path]) -> None:
        self.name, self.driver, self.models = name, driver, models
        self.version = 0

    def update(self, manager: SyncManager, which: str) -> str:
        """The stamp of the next version, which is of that model."""
        self.version += 1
        assert [r.status for r in manager.update(source(self.models[which]), self.version).replicas] == ["committed"]
        return str(self.version)

    def load(self, which: str, by: str = "engine") -> None:
        """What the user does, and no manager."""
        self.driver.call("load", model=str(self.models[which]), by=by)

    def verified(self, manager: SyncManager, which: str) -> tuple[bool, list[int | None]]:
        """Whether the engine holds that model, and which version it says."""
        report = manager.verify(source(self.models[which]))
        return report.ok, [replica.version for replica in report.replicas]

    def serves(self) -> tuple[str, set[str]]:
        """The model that the tokens are of, and their stamps."""
        done = self.driver.generate(PROMPTS, COUNT)
        assert {r["finish_reason"] for r in done} == {"length"}, done
        tokens = [r["tokens"] for r in done]
        (which,) = [letter for letter, model in self.models.items() if reference(model) == tokens]
        return which, {stamp for r in done for stamp in r["versions"]}

    def card_state(self) -> str:
        (card,) = self.driver.cards
        return card.state


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest, runtime: Path, checkpoint: Checkpoint) -> Iterator[Both]:
    models = {letter: checkpoint("qwen3", tied=False, seed=seed) for letter, seed in (("A", 1), ("B", 2), ("C", 3))}
    if request.param == "vllm":
        with Driver(runtime) as driver:
            driver.open(models["A"], plain=True, tensor_parallel_size=2, max_model_len=1024)
            yield Both(request.param, driver, models)
    else:
        with SglangDriver(runtime, tp=2, WEIGHTWIRE_TEST_ALLOCATOR="1") as driver:
            driver.open(models["A"], enable_weights_cpu_backup=True)
            yield Both(request.param, driver, models)
    assert driver.leftovers() == []


@pytest.mark.parametrize("by", ["engine", "user"])
def test_weights_that_somebody_else_loaded_have_no_version_until_the_next_update(engine: Both, by: str) -> None:
    with SyncManager(timeout_s=180) as manager:
        stamp = engine.update(manager, "B")
        assert engine.serves() == ("B", {stamp})
        engine.load("C", by)
        assert engine.serves() == ("C", {"unknown"})
        assert set(manager.versions().values()) == {None}
        assert engine.verified(manager, "B") == (False, [None])
        assert engine.verified(manager, "C") == (True, [None])
        (replica,) = eventually(
            lambda: [r for r in manager.replicas() if r.state == "behind"], what="the manager to hear of it"
        )
        assert (replica.version, replica.generation) == (None, "running") and "wrote the weights" in replica.reason
        (card,) = engine.driver.cards
        assert card.state == "serving" and "wrote the weights" in card.unknown["policy"]
        report = manager.update(source(engine.models["B"]), engine.version)
        assert [r.status for r in report.replicas] == ["committed"], "that version was served, and no longer is"
        assert engine.serves() == ("B", {stamp})
        assert engine.verified(manager, "B") == (True, [engine.version])
        assert engine.driver.cards[0].unknown == {}
        eventually(lambda: [r.state for r in manager.replicas()] == ["current"], what="the manager to hear of that")


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
@pytest.mark.parametrize("by", ["engine", "user"])
def test_no_later_call_on_the_workers_brings_up_a_load_that_an_update_has_replaced(engine: Both, by: str) -> None:
    with SyncManager(timeout_s=180) as manager:
        engine.update(manager, "B")
        engine.load("C", by)
        stamp = engine.update(manager, "B")
        engine.driver.rpc("ext_about")
        assert engine.serves() == ("B", {stamp})
        assert engine.verified(manager, "B") == (True, [engine.version])
        assert engine.driver.cards[0].unknown == {}


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_weights_that_somebody_else_loaded_on_one_rank_have_no_version_on_any(engine: Both) -> None:
    with SyncManager(timeout_s=180) as manager:
        for rank in (0, 1):
            stamp = engine.update(manager, "B")
            assert sorted(engine.driver.rpc("ext_load", str(engine.models["C"]), rank)) == [False, True]
            assert set(manager.versions().values()) == {None}
            report = manager.update(source(engine.models["B"]), engine.version)
            assert [r.status for r in report.replicas] == ["committed"], "no rank serves that version any more"
            assert engine.serves() == ("B", {stamp})


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_weights_that_a_thread_of_a_worker_s_loads_have_no_version_and_answers_say_so_from_the_next_call_on(
    engine: Both, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with SyncManager(timeout_s=180) as manager:
        stamp = engine.update(manager, "B")
        engine.driver.rpc("ext_load_later", str(engine.models["C"]), str(go))
        assert engine.serves() == ("B", {stamp})
        go.touch()
        eventually(lambda: all(go.with_name(f"go.{rank}").exists() for rank in (0, 1)), what="the loads of both ranks")
        assert set(manager.versions().values()) == {None}
        assert engine.verified(manager, "C") == (True, [None])
        engine.driver.rpc("ext_about")
        done = engine.driver.wait(engine.driver.submit(PROMPTS, COUNT, salt="new"))  # vLLM keeps its prefix cache
        assert [r["tokens"] for r in done] == reference(engine.models["C"])
        assert {stamp for r in done for stamp in r["versions"]} == {"unknown"}
        assert engine.driver.cards[0].unknown.keys() == {"policy"}
        stamp = engine.update(manager, "B")
        assert engine.serves() == ("B", {stamp})


def test_weights_that_the_caller_of_an_engine_in_its_process_loads_have_no_version(
    runtime: Path, checkpoint: Checkpoint
) -> None:
    models = {letter: checkpoint("qwen3", tied=False, seed=seed) for letter, seed in (("A", 1), ("B", 2), ("C", 3))}
    with Driver(runtime, in_process=True) as driver, SyncManager(timeout_s=180) as manager:
        driver.open(models["A"], plain=True, max_model_len=1024)
        engine = Both("vllm", driver, models)
        engine.load("C", "caller")
        assert engine.serves() == ("C", {"default"}), "no version was known before"
        for by in ("caller", "user", "engine"):
            stamp = engine.update(manager, "B")
            assert engine.serves() == ("B", {stamp})
            engine.load("C", by)
            assert engine.serves() == ("C", {"unknown"})
            assert driver.cards[0].unknown.keys() == {"policy"}
            engine.load("A", by)
            stamp = engine.update(manager, "B")
            assert engine.serves() == ("B", {stamp}), "nobody loaded since"
            assert driver.cards[0].unknown == {}
    assert driver.leftovers() == []


def test_an_update_that_is_on_its_way_replaces_what_somebody_else_loaded_meanwhile(engine: Both) -> None:
    for point in ("staging", "sealed"):
        with SyncManager(timeout_s=180) as manager:
            engine.update(manager, "A")
            engine.version += 1
            halted = Halted(manager, engine.models["B"], engine.version, point)
            engine.load("C")
            assert engine.serves() == ("C", {"unknown"})
            assert [r.status for r in halted.go_on().replicas] == ["committed"]
            assert engine.serves() == ("B", {str(engine.version)})


def test_a_closed_group_s_version_is_unknown_too_once_somebody_else_loaded_over_it(engine: Both) -> None:
    with SyncManager(timeout_s=180) as manager:
        stamp = engine.update(manager, "B")
        manager.close_group()
        assert engine.serves() == ("B", {stamp}), "they are its weights still"
        engine.load("C")
        assert engine.serves() == ("C", {"unknown"})
        stamp = engine.update(manager, "A")
        assert engine.serves() == ("A", {stamp})
        assert engine.driver.cards[0].unknown == {}


def test_a_part_that_is_sent_again_does_not_make_known_what_else_somebody_else_loaded(engine: Both) -> None:
    """Two groups are the model; and a group's last update may have been of a smaller part than the one before."""
    with SyncManager(timeout_s=180) as manager:
        manager.close_group()
    with (
        SyncManager("inner", partial=True, timeout_s=180) as inner,
        SyncManager("outer", partial=True, timeout_s=180) as outer,
    ):

        def update(manager: SyncManager, sent: dict[str, torch.Tensor], version: int) -> None:
            assert [r.status for r in manager.update(ModuleAdapter(sent), version).replicas] == ["committed"]

        def stamps() -> set[str]:
            return {stamp for r in engine.driver.generate(PROMPTS, COUNT) for stamp in r["versions"]}

        everything = weights(engine.models["B"])
        layers = {name: t for name, t in everything.items() if ".layers." in name}
        first = {name: t for name, t in layers.items() if ".layers.0." in name}
        rest = {name: t for name, t in everything.items() if name not in layers}
        update(inner, layers, 1)
        update(outer, rest, 2)
        update(inner, first, 3)
        assert engine.serves() == ("B", {"3"})
        engine.load("C")
        assert stamps() == {"unknown"}
        update(outer, rest, 4)
        assert stamps() == {"unknown"} and engine.driver.cards[0].unknown.keys() == {"inner"}
        assert (set(inner.versions().values()), set(outer.versions().values())) == ({None}, {4})
        update(inner, first, 5)
        assert stamps() == {"unknown"} and engine.driver.cards[0].unknown.keys() == {"inner"}
        assert set(inner.versions().values()) == {None}
        update(inner, layers, 6)
        assert engine.serves() == ("B", {"6"}) and engine.driver.cards[0].unknown == {}
        assert set(inner.versions().values()) == {6}
        inner.close_group()
        outer.close_group()


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
def test_weights_that_others_may_write_in_a_session_of_the_user_s_have_no_version(engine: Both) -> None:
    """Remote writes (RDMA) into parameters have no call of their own: only the session's begin and end."""
    with SyncManager(timeout_s=180) as manager:
        stamp = engine.update(manager, "B")
        engine.driver.call("session", which="begin")
        assert engine.serves() == ("B", {"unknown"})
        stamp = engine.update(manager, "C")
        assert engine.serves() == ("C", {stamp})
        engine.driver.call("session", which="end")
        assert engine.serves() == ("C", {"unknown"}), "what was written since the update is unknown"


def test_a_load_of_the_user_s_that_finds_nothing_does_not_change_which_checkpoint_sglang_was_started_from(
    runtime: Path, tmp_path: Path
) -> None:
    """That one says which parameters no checkpoint fills: of BERT the numbers of positions."""
    bert = FAMILIES["bert-embedding"]
    one, two = (bert.maker(tmp_path / str(seed), seed) for seed in (1, 2))
    with SglangDriver(runtime) as driver:
        driver.open(one, is_embedding=True, dtype=bert.dtype, disable_radix_cache=True)
        assert "False" in driver.rpc("update_weights_from_disk", str(tmp_path / "nowhere"))[0]
        with SyncManager(timeout_s=60) as manager:
            assert [r.status for r in manager.update(source(two), 1).replicas] == ["committed"]


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
def test_a_load_of_the_user_s_that_finds_nothing_changes_no_version(engine: Both, tmp_path: Path) -> None:
    with SyncManager(timeout_s=180) as manager:
        stamp = engine.update(manager, "B")
        with pytest.raises(RuntimeError, match="Cannot find any model weights"):
            engine.driver.call("load", model=str(tmp_path), by="engine")
        assert engine.serves() == ("B", {stamp})
        assert set(manager.versions().values()) == {engine.version}


LONG = {"vllm": 200, "sglang": 200}
"""Tokens of a request that is to run across pauses: more than are made while a test looks for the first of them, mostly."""
TRIES = 20


def stopped(engine: Both, stop: Callable[[], object], go_on: Callable[[], object]) -> list[str]:
    """Requests that run, and that `stop` stopped. They may have ended before, on a slow machine: then it is tried again."""
    for _ in range(TRIES):
        names = engine.driver.submit([PROMPTS[1]] * 2, LONG[engine.name])
        engine.driver.wait_for_tokens(names, 3)
        stop()
        if not any(r["finished"] for r in engine.driver.look(names)):
            return names
        go_on()
        engine.driver.wait(names)
    raise AssertionError("requests always ended too soon")


def assert_no_step_ran(engine: Both, names: list[str], between: str) -> None:
    """Nothing was computed with the version that was replaced before the engine went on, and all of the answer was."""
    done = engine.driver.wait(names)
    assert [(r["finish_reason"], len(r["tokens"])) for r in done] == [("length", LONG[engine.name])] * 2
    for request in done:
        assert between not in request["versions"]
        assert request["versions"][-1] == str(engine.version)


def test_a_resume_of_the_user_s_does_not_end_a_manager_s_pause(engine: Both) -> None:
    own_pause, own_resume = (lambda do=do: engine.driver.call(do) for do in ("own_pause", "own_resume"))
    with SyncManager(timeout_s=180) as manager:
        engine.update(manager, "A")
        for stop in (manager.pause, lambda: (own_pause(), manager.pause())):
            names = stopped(engine, stop, lambda: (own_resume(), manager.resume()))
            own_resume()
            assert engine.card_state() == "paused"
            between = engine.update(manager, "B")
            engine.update(manager, "A")
            manager.resume()
            assert_no_step_ran(engine, names, between)
            assert engine.card_state() == "serving"
            assert engine.serves() == ("A", {str(engine.version)})


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_the_cache_of_a_replica_that_only_a_manager_holds_is_not_released(engine: Both) -> None:
    with SyncManager(timeout_s=180) as manager:
        engine.update(manager, "A")
        with (
            manager.paused(),
            pytest.raises(RuntimeError, match="a manager holds this replica, and no pause of vLLM's"),
        ):
            engine.driver.call("own_release_kv_cache")
        assert engine.serves() == ("A", {str(engine.version)})


def test_the_end_of_a_manager_s_pause_does_not_end_the_user_s(engine: Both) -> None:
    own_pause, own_resume = (lambda do=do: engine.driver.call(do) for do in ("own_pause", "own_resume"))
    with SyncManager(timeout_s=180) as manager:
        engine.update(manager, "A")
        names = stopped(engine, manager.pause, manager.resume)
        own_pause()
        manager.resume()
        between = engine.update(manager, "B")
        engine.update(manager, "A")
        own_resume()
        assert_no_step_ran(engine, names, between)
        assert engine.serves() == ("A", {str(engine.version)})


@pytest.fixture
def sleepy(engine: Both) -> Both:
    """With a stand-in for the allocator that engines on a CPU lack: memory that is released holds nothing of use."""
    if engine.name == "vllm":
        engine.driver.rpc("ext_give_allocator")
    return engine


def test_no_update_writes_into_memory_that_the_user_s_own_sleep_released(sleepy: Both) -> None:
    driver = sleepy.driver
    with SyncManager(timeout_s=180) as manager:
        stamp = sleepy.update(manager, "B")
        if sleepy.name == "vllm":
            driver.rpc("ext_give_allocator")  # of the memory where the weights lie now
        driver.call("own_sleep", level=1)
        for attempt in ("at once", "after a manager's sleep was refused"):
            with pytest.raises(ReplicaAsleep, match="wake it by the engine's own command") as refused:
                manager.update(source(sleepy.models["A"]), sleepy.version + 1)
            assert refused.value.phase == "agree", f"{attempt}: before any of that memory is read"
            if attempt == "at once":
                with pytest.raises(ReplicaAsleep):
                    manager.sleep(1)
        (replica,) = manager.verify(source(sleepy.models["B"])).replicas
        assert replica.error is not None and replica.error.kind == "ReplicaAsleep"
        driver.call("own_wake_up", tags=["weights"])
        assert sleepy.verified(manager, "B") == (True, [sleepy.version]), "level 1 brings them back"
        with manager.paused():
            pass  # it leaves the rest as asleep as it was
        stamp = sleepy.update(manager, "A")
        driver.call("own_wake_up", tags=["kv_cache"] if sleepy.name == "vllm" else ["kv_cache", "cuda_graph"])
        assert sleepy.serves() == ("A", {stamp})


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
@pytest.mark.parametrize("level", [1, 2])
def test_no_update_writes_into_memory_that_a_worker_extension_released(sleepy: Both, level: int) -> None:
    """By the worker's own `sleep`, past vLLM's executor, as ROLL's does."""
    driver = sleepy.driver
    with SyncManager(timeout_s=180) as manager:
        sleepy.update(manager, "B")
        driver.rpc("ext_give_allocator")  # of the memory where the weights lie now
        driver.rpc("ext_sleep", level)
        with pytest.raises(ReplicaAsleep, match="wake it by the engine's own command"):
            manager.update(source(sleepy.models["A"]), sleepy.version + 1)
        (replica,) = manager.verify(source(sleepy.models["B"])).replicas
        assert replica.error is not None and replica.error.kind == "ReplicaAsleep"
        driver.rpc("ext_wake_up", ["weights"])
        kept = level == 1
        assert sleepy.verified(manager, "B") == (kept, [sleepy.version if kept else None])
        stamp = sleepy.update(manager, "A")
        driver.rpc("ext_wake_up", ["kv_cache"])
        assert sleepy.serves() == ("A", {stamp})


def test_while_a_manager_has_it_asleep_no_command_of_the_user_s_wakes_it(sleepy: Both) -> None:
    driver = sleepy.driver
    with SyncManager(timeout_s=180) as manager:
        sleepy.update(manager, "A")
        if sleepy.name == "vllm":
            driver.rpc("ext_give_allocator")
        manager.sleep(1)
        if sleepy.name == "vllm":
            with pytest.raises(RuntimeError, match="its trainer may use the memory"):
                driver.call("own_wake_up")
        else:  # an error would end SGLang, and so would memory that is released twice
            driver.call("own_wake_up")
            driver.call("own_sleep", level=1)
        assert sleepy.card_state() == "asleep"
        with pytest.raises(ReplicaAsleep):
            manager.update(source(sleepy.models["B"]), sleepy.version + 1)
        manager.wake_up()
        if sleepy.name == "sglang":
            driver.call("own_wake_up")  # the end of that sleep
        assert sleepy.serves() == ("A", {str(sleepy.version)})


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_weights_that_the_user_s_own_sleep_discarded_have_no_version(sleepy: Both) -> None:
    driver = sleepy.driver
    with SyncManager(timeout_s=180) as manager:
        sleepy.update(manager, "A")
        driver.rpc("ext_give_allocator")
        driver.call("own_sleep", level=2)
        driver.call("own_wake_up")
        assert set(manager.versions().values()) == {None}
        assert sleepy.verified(manager, "A") == (False, [None])
        assert "discarded the weights" in driver.cards[0].unknown["policy"]
        assert [r.status for r in manager.update(source(sleepy.models["A"]), sleepy.version).replicas] == ["committed"]
        driver.rpc("ext_about")
        assert sleepy.serves() == ("A", {str(sleepy.version)})


def test_of_two_trainers_of_one_group_the_earlier_is_told_and_nothing_of_its_update_is_served(engine: Both) -> None:
    for point in ("staging", "sealed"):
        with SyncManager(timeout_s=180) as first, SyncManager(timeout_s=180) as second:
            engine.update(first, "A")
            halted = Halted(first, engine.models["B"], engine.version + 1, point)
            engine.version += 1
            stamp = engine.update(second, "C")
            with pytest.raises(VersionConflict, match="the transaction was dropped"):
                halted.go_on()
            assert engine.serves() == ("C", {stamp})
            assert set(first.versions().values()) == set(second.versions().values()) == {engine.version}


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_a_group_that_is_opened_while_the_user_s_reload_is_half_done_is_refused_and_opened_by_the_next_update(
    engine: Both, tmp_path: Path
) -> None:
    """vLLM has no values in the parameters meanwhile: terms that were agreed on those failed every later update."""
    go = tmp_path / "go"
    with SyncManager(timeout_s=180) as manager, ThreadPoolExecutor(1) as user:
        engine.update(manager, "A")
        manager.close_group()
        engine.driver.rpc("ext_hold_a_load", str(go))
        load = user.submit(engine.load, "C")
        eventually(lambda: all(go.with_name(f"go.{rank}").exists() for rank in (0, 1)), what="the loads of both ranks")
        with pytest.raises(VersionConflict, match="has no values at the moment"):
            manager.update(source(engine.models["B"]), engine.version + 1)
        go.touch()
        load.result(600)
        assert engine.serves()[0] == "C"
        engine.version += 1
        stamp = engine.update(manager, "B")
        assert engine.serves() == ("B", {stamp})
        assert engine.verified(manager, "B") == (True, [engine.version])
