"""What the caller of an update gives: a model instead of a source, no version, and mistakes that are told with their cure."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from inference_plugin.wire.errors import (
    ArgumentError,
    ConfigError,
    ManagerClosed,
    ManifestMismatch,
    ProtocolError,
    VersionConflict,
)
from inference_plugin.wire.messages import ReplicaCard
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source
from tests.manager.trainer import Trainer
from tests.support.plain_engine import checkpoint, manifest_of
from tests.support.rig import ROOT
from trainer_adapters import ExportAdapter, ModuleAdapter, SyncManager
from trainer_adapters.fleet.registry import Registry


@pytest.fixture
def manager() -> Iterator[SyncManager]:
    with SyncManager(timeout_s=60) as made:
        yield made


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_mapping_of_tensors_is_sent_as_it_is_and_verified(start: Start, manager: SyncManager) -> None:
    rig = start(tp=2)
    assert manager.update(checkpoint(1), 1).version == 1
    assert holds(rig, 1)
    assert manager.verify(checkpoint(1)).ok and not manager.verify(checkpoint(2)).ok
    manager.update(list(checkpoint(2).items()), 2)
    manager.update(lambda: iter(checkpoint(3).items()), 3)
    assert holds(rig, 3)


@pytest.mark.parametrize("partial", [False, True])
def test_nothing_at_all_is_no_version(start: Start, partial: bool) -> None:
    """Such as a model of which exclude= leaves out all, or an export that yields nothing."""
    rig = start()
    with SyncManager(partial=partial, timeout_s=60) as manager:
        with pytest.raises(ManifestMismatch, match=r"names no tensor.*ExportAdapter\(lambda: state\)"):
            manager.update(ModuleAdapter(checkpoint(1), exclude=["*"]))
        assert manager.versions() == {rig.replica: None}


def test_the_same_model_is_read_anew_for_each_update(start: Start, manager: SyncManager) -> None:
    rig = start()
    weights = checkpoint(1)
    manager.update(weights)
    for name, tensor in checkpoint(2).items():
        weights[name].copy_(tensor)
    manager.update(weights)
    assert holds(rig, 2)
    assert manager.versions() == {rig.replica: 2}


def test_a_mapping_that_is_cleared_after_its_update_frees_its_tensors(start: Start, manager: SyncManager) -> None:
    rig = start()
    state = checkpoint(1)
    tensors = [weakref.ref(tensor) for tensor in state.values()]
    manager.update(state)
    state.clear()
    gc.collect()
    assert not any(tensor() is not None for tensor in tensors)
    manager.update(checkpoint(2))
    assert holds(rig, 2)


def test_dtype_says_what_a_rule_for_all_names_says(start: Start, manager: SyncManager) -> None:
    start()
    wide = {name: tensor.float() for name, tensor in checkpoint(1).items()}
    with pytest.raises(ManifestMismatch, match=r"norm\.weight"):
        manager.update(wide, 1, dtype="bfloat16")  # the norms are float32 in this engine
    whole = {name: tensor.float() for name, tensor in checkpoint(1).items() if "norm" not in name}
    with SyncManager("part", partial=True, timeout_s=60) as part:
        assert part.update(whole, 1, dtype="bfloat16").bytes == manifest_of(checkpoint(1)).nbytes - norm_bytes()
        assert part.update(whole, 2, dtype=torch.bfloat16).bytes == manifest_of(checkpoint(1)).nbytes - norm_bytes()
        assert part.verify(whole).ok and part.verify(dict(whole)).ok  # in the dtype that was sent
        (as_it_is,) = part.verify(whole, dtype="float32").replicas
        assert "bfloat16 in the engine and torch.float32 in the source" in as_it_is.differ[0]


def norm_bytes() -> int:
    return sum(tensor.nbytes for name, tensor in checkpoint(1).items() if "norm" in name)


UNKNOWN: dict[str, tuple[Any, str]] = {
    "a number": (7, "type int cannot be sent"),
    "nothing": (None, "type NoneType cannot be sent"),
    "a path": ("models/policy", "use the command `weightwire push`"),
    "a class": (torch.nn.Linear, "pass an instance"),
    "a tensor": (torch.zeros(2), "type Tensor cannot be sent"),
    "a generator": ((pair for pair in checkpoint(1).items()), "lambda: model.named_parameters()"),
    "a training checkpoint": ({"model": checkpoint(1), "step": 3}, "'model': dict"),
    "a list of tensors": ([torch.zeros(2)], "list pairs"),
    "two modules": ([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)], "one model at a time"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_model_of_an_unknown_kind_is_told_what_is_taken(start: Start, manager: SyncManager, what: str) -> None:
    rig = start()
    manager.update(source(1), 1)
    model, words = UNKNOWN[what]
    with pytest.raises(ArgumentError) as raised:
        manager.update(model, 2)
    assert words in str(raised.value) and "a mapping of names to tensors" in str(raised.value)
    assert holds(rig, 1)
    assert manager.update(source(2), 2).failed == ()


def test_a_source_says_itself_how_its_tensors_travel(start: Start, manager: SyncManager) -> None:
    start()
    with pytest.raises(ArgumentError, match="dtype_rules"):
        manager.update(source(1), 1, dtype="bfloat16")


# --- versions ---------------------------------------------------------------------------------------------------------


def test_without_a_version_the_next_one_is_sent(start: Start, manager: SyncManager) -> None:
    rig = start()
    assert [manager.update(source(seed)).version for seed in (1, 2)] == [1, 2]
    manager.update(source(3), 7)
    assert manager.update(source(4)).version == 8
    assert holds(rig, 4)


def test_the_next_version_comes_after_what_the_fleet_serves(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as before:
        before.update(source(1), 41)
    with SyncManager(timeout_s=60) as manager:
        assert manager.update(source(2)).version == 42
        with SyncManager(timeout_s=60) as rival:
            rival.update(source(3), 50)
        with pytest.raises(VersionConflict):
            manager.update(source(4))
        assert manager.update(source(4)).version == 51
        with SyncManager(timeout_s=60) as rival:
            rival.update(source(5))
        with pytest.raises(VersionConflict, match="if `version` was left out, call update again"):
            manager.update(source(4))
        assert manager.update(source(4)).version == 53
    assert holds(rig, 4)


def test_after_the_last_version_there_is_no_next_one_and_the_way_out_is_told(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as last:
        last.update(source(1), 2**62 - 1)
        with pytest.raises(VersionConflict, match=r"no version comes after.*close_group\(\).*new SyncManager"):
            last.update(source(2))
        assert holds(rig, 1)
        last.close_group()
    with SyncManager(timeout_s=60) as manager:
        assert manager.update(source(2), 0).version == 0
    assert holds(rig, 2)


def test_a_version_that_failed_is_not_sent_again(start: Start, manager: SyncManager) -> None:
    rig = start()
    manager.update(source(1))
    rig.ask("fault", rank=0, step="install")
    with pytest.raises(Exception, match="undone"):
        manager.update(source(2))
    assert manager.update(source(3)).version == 3


@pytest.mark.parametrize("version", ["7", 7.0, True, torch.tensor(7.0), -1, 1 << 62])
def test_a_version_that_is_none_is_refused_at_once(start: Start, manager: SyncManager, version: Any) -> None:
    rig = start()
    manager.update(source(1), 1)
    with pytest.raises((ArgumentError, VersionConflict), match=r"int"):
        manager.update(source(2), version)
    with pytest.raises((ArgumentError, VersionConflict), match=r"int"):
        manager.update_async(source(2), version)
    assert holds(rig, 1)


def test_whole_numbers_of_other_libraries_are_versions(start: Start, manager: SyncManager) -> None:
    start()
    numbers: list[Any] = [np.int64(3), torch.tensor(4)]
    assert [manager.update(source(1), number).version for number in numbers] == [3, 4]


def test_rank_0_decides_the_next_version_for_all_trainer_ranks(start: Start, trainer: Callable[..., Trainer]) -> None:
    rig = start(tp=2)
    with SyncManager(timeout_s=60) as before:
        before.update(source(9), 9)
    steps: list[dict[str, Any]] = [{"version": None, "seed": 1}, {"version": 20}, {"version": None, "seed": 2}]
    ranks = trainer(2, steps)
    seen = [[ranks.step(rank, number)["ok"]["version"] for number in range(3)] for rank in range(2)]
    assert seen == [[10, 20, 21], [10, 20, 21]]
    assert holds(rig, 2)


WRONG: dict[str, tuple[Callable[[SyncManager], Any], str]] = {
    "a policy": (
        lambda manager: manager.pause("recompute_all"),
        "in_flight='recompute_all' is none of 'keep', 'recompute'",
    ),  # type: ignore[arg-type]
    "no policy": (lambda manager: manager.pause(""), "in_flight='' is none of"),  # type: ignore[arg-type]
    "a level": (lambda manager: manager.sleep(0), "level=0 is none of 1, 2"),  # type: ignore[arg-type]
    "a level that is a switch": (lambda manager: manager.sleep(True), "level=True is none of 1, 2"),  # type: ignore[arg-type]
    "a tag": (lambda manager: manager.wake_up(["cache"]), "tag='cache' is none of 'weights', 'kv_cache'"),  # type: ignore[list-item]
    "a tag alone": (lambda manager: manager.wake_up("weights"), r"tags='weights' is no list.*\['weights'\]"),  # type: ignore[arg-type]
    "a number of replicas": (lambda manager: manager.wait_for_replicas("2", timeout_s=1), "count='2' is a str"),  # type: ignore[arg-type]
    "no limit": (
        lambda manager: manager.wait_for_replicas(2, timeout_s=float("inf")),
        "timeout_s=inf.*every wait has a limit",
    ),
    "settings": (lambda _: SyncManager(config={"timeout_s": 1}), "config={'timeout_s': 1} is a dict"),  # type: ignore[arg-type]
    "no settings": (lambda _: SyncManager(config=""), "config='' is a str"),  # type: ignore[arg-type]
    "settings later": (lambda m: setattr(m.settings, "config", 5), "config=5 is a int"),
    "a misspelt setting": (
        lambda m: setattr(m.settings, "timeout", 5),
        "no setting 'timeout' -- its settings are group,",
    ),
    "a lease later": (
        lambda m: setattr(m.settings, "lease_s", 5),
        r"lease_s can't be changed -- make the manager with it: SyncManager\(lease_s=...\)",
    ),
    "a group without ranks": (
        lambda _: SyncManager(process_group="x"),  # type: ignore[arg-type]
        "process_group= was given, and torch.distributed is not initialised",
    ),
    "an event": (lambda m: m.on(["staged"], print), r"\['staged'\] is none of staged, committed"),
    "pairs of ties": (lambda _: ExportAdapter(dict, tied=["a"]), r"tied=\['a'\] is no mapping"),  # type: ignore[arg-type]
    "names as metadata": (lambda _: ExportAdapter(dict, metadata=["a"]), r"metadata=\['a'\] is a list"),  # type: ignore[arg-type]
    "an export of nothing": (lambda _: ExportAdapter(lambda: None), "the export returned a NoneType"),  # type: ignore[arg-type,return-value]
    "an array as a dtype": (lambda m: m.update(source(1), 1, dtype=np.ones(2)), r"dtype=array.* is a ndarray"),
    "an array as a choice": (lambda _: SyncManager(in_flight=np.ones(2)), "in_flight=array.* is none of"),  # type: ignore[arg-type]
    "a switch": (lambda _: SyncManager(partial="no"), "partial='no' is neither True nor False"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_call_does_not_take_is_said_in_its_callers_words(start: Start, manager: SyncManager, what: str) -> None:
    """It went to the replicas, which answered that they can't read it; or it was taken for something else."""
    rig = start()
    call, words = WRONG[what]
    with pytest.raises((ConfigError, ArgumentError), match=words.replace("'", "['\"]")):
        call(manager)
    assert rig.ask("state")["log"] == []


# --- other mistakes ---------------------------------------------------------------------------------------------------


def test_a_misspelt_variable_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_TIMEOUTS_S", "3")
    for _ in range(2):
        SyncManager(timeout_s=60).close()
    said = [record.message for record in caplog.records if "WEIGHTWIRE_TIMEOUTS_S" in record.message]
    assert len(said) == 1 and "did you mean WEIGHTWIRE_TIMEOUT_S?" in said[0]


@pytest.mark.parametrize("group", ["my policy", "a/b", "", "../up", "x" * 65, 3, "lora."])
def test_a_group_name_that_cannot_be_one_is_refused_by_name(group: Any) -> None:
    with pytest.raises(ConfigError, match="group") as raised:
        SyncManager(group)
    assert repr(group) in str(raised.value) and "letters" in str(raised.value)


def test_a_closed_manager_says_that_it_is_closed(start: Start) -> None:
    rig = start()
    manager = SyncManager(timeout_s=60)
    manager.update(source(1), 1)
    manager.close()
    calls: list[Callable[[], object]] = [
        lambda: manager.update(source(2), 2),
        lambda: manager.update(source(2)),
        lambda: manager.update_async(source(2), 2),
        lambda: manager.verify(source(1)),
        manager.pause,
        manager.resume,
        manager.sleep,
        manager.wake_up,
        manager.versions,
        manager.replicas,
        manager.discover,
        lambda: manager.wait_for_replicas(1, timeout_s=1),
        manager.close_group,
        lambda: manager.on("committed", print),
    ]
    for call in calls:
        with pytest.raises(ManagerClosed, match="make a new SyncManager"):
            call()
    manager.close()
    assert holds(rig, 1)
    assert json.loads(json.dumps(rig.ask("state")))["refusal"] is None


def test_whoever_waits_for_replicas_is_told_that_the_manager_is_closed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SyncManager(timeout_s=60)
    looked, cards = threading.Event(), Registry.cards

    def looking(here: Registry) -> list[ReplicaCard]:
        if threading.current_thread().name.startswith("waits"):
            looked.set()
        return cards(here)

    monkeypatch.setattr(Registry, "cards", looking)
    with ThreadPoolExecutor(1, thread_name_prefix="waits") as threads:
        waits = threads.submit(manager.wait_for_replicas, 1, timeout_s=1e300)
        assert looked.wait(600)
        manager.close()
        with pytest.raises(ManagerClosed, match="closed while replicas were waited for"):
            waits.result(30)


def test_a_manager_that_is_dropped_without_close_is_warned_of(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """By a log, which is shown: its segment, as large as the model, stays."""
    start()
    manager = SyncManager(timeout_s=120)
    manager.update(checkpoint(1))
    manager.__del__()  # the test closes it
    assert "of group 'policy' was dropped without close(): its shared memory" in caplog.text
    manager.close()
    caplog.clear()
    manager.__del__()
    assert not caplog.text


def test_a_forked_child_leaves_its_parents_manager_alone(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as manager:
        manager.update(checkpoint(1))
        child = os.fork()
        if not child:
            held = 1
            try:
                with pytest.raises(ProtocolError, match="make a SyncManager in this process"):
                    manager.update(checkpoint(2))
                manager.__exit__(None, None, None)
                held = 0
            finally:
                os._exit(held)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        manager.update(checkpoint(3))
    assert holds(rig, 3)


CLOSED_AT_THE_END = """
import atexit, sys
from trainer_adapters import ModuleAdapter, SyncManager

def late(call):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, "atexit" if "atexit" in error.hint else "", sep="")

manager = SyncManager(timeout_s=120)
atexit.register(print, "over")
atexit.register(late, lambda: SyncManager(timeout_s=120))
atexit.register(manager.close)
for call in (manager.resume, lambda: manager.update({})):
    atexit.register(late, call)
manager.pause()
"""


def test_a_manager_may_be_closed_as_its_program_ends_and_says_that_nothing_else_can_begin(start: Start) -> None:
    """`atexit` calls it after Python has ended the threads of pools."""
    rig = start()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", CLOSED_AT_THE_END]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600)
    assert (ended.stdout.split(), ended.stderr) == (
        ["ManagerClosed", "ManagerClosed", "TransportUnavailableatexit", "over"],
        "",
    )
    assert rig.ask("state")["log"] == ["pause:keep", "hold", "resume"]


AT_THE_END = """
import sys, time
from inference_plugin.devices import threads
from tests.support.plain_engine import checkpoint
from trainer_adapters import ModuleAdapter, SyncManager
from trainer_adapters.update import handle

class Slow(ModuleAdapter):
    def manifest(self):
        time.sleep(float(sys.argv[1]))
        return super().manifest()

manager = SyncManager(timeout_s=float(sys.argv[2]))
manager.update_async(Slow(checkpoint(1)), 1)
handle.GRACE_S = threads.END_S = 0.1
sys.exit(7)
"""


@pytest.mark.parametrize(("takes_s", "timeout_s", "served"), [(0.5, 120, 1), (3600, 0.5, None)], ids=["slow", "hangs"])
def test_a_program_that_ends_during_an_update_waits_for_it_until_its_deadline(
    start: Start, takes_s: float, timeout_s: float, served: int | None
) -> None:
    """It waited for ever where a source hung, and no launcher noticed that its rank had failed."""
    rig = start()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", AT_THE_END, str(takes_s), str(timeout_s)]
    assert subprocess.run(program, env=environment, timeout=600).returncode == 7
    with SyncManager() as asks:
        assert asks.versions() == {rig.replica: served}


def test_a_failure_for_which_nobody_asks_is_logged(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start()
    with SyncManager(timeout_s=60) as manager:
        manager.wait_for_replicas(1, timeout_s=1e300)
        asked = manager.update_async({"nonsense": torch.zeros(3)})
        asked.wait_released(1e300)
        assert isinstance(asked.exception(), ManifestMismatch)
        dropped = manager.update_async({"rubbish": torch.zeros(3)})
    del asked, dropped
    gc.collect()
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told.startswith("weightwire: an update failed, and nobody asked for its result: ") and "rubbish" in told
