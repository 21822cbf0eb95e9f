"""What is killed, stopped or made to fail in the middle of an update of a real vLLM, and what is true afterwards.

After every fault: the replica serves the old version or the new one, whole; the error is typed and came in time; the
next update succeeds without a restart of what survived; no process, socket or shared memory is left of what died.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.version import Version
from safetensors.torch import load_file

from inference_plugin.net.channel import Channel
from inference_plugin.net.processes import has_ended
from inference_plugin.plugins import plugin_manager
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import CommitFailed, PeerLost, SyncTimeout, TornReplica, WeightwireError
from inference_plugin.wire.messages import Describe, GroupStatus, ReplicaCard, WorkerCard
from inference_plugin.wire.reports import UpdateReport
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, LONG, PROMPTS, reference, source
from tests.support.engines import Driver, Engine, Server, check_starts, eventually, free_port, noted_starts, segments_of
from tests.support.managers import SyncManager
from tests.support.phases import AtPhase, fall_silent
from tests.support.preloaded import nursery
from tests.support.visible import CHAT, check_probe, check_visible_on_vllm
from trainer_adapters import LocalSlice, ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PLUGIN = "tests.support.fault_plugin:plugin"
LEASE_S = 4.0
DEADLINE_S = 25.0
"""Of an update in whose middle something falls silent: a busy machine comes to the middle before."""
KEPT_SEGMENTS = 2
"""A worker keeps this many mapped: what it serves (the way back) and the one before, for the next update."""
IN_FLIGHT = 200
"""Tokens of a request that runs while something fails. Where ranks share two cores, most of a test is decoding steps."""


# --- helpers ----------------------------------------------------------------------------------------------------------------


def statuses(card: ReplicaCard) -> list[GroupStatus]:
    """Where each worker of a replica stands with the group, asked on its own socket."""
    found = []
    for worker in card.workers:
        with Channel(worker.address, pid=worker.pid, peer_boot_id=card.boot_id) as channel:
            answer: WorkerCard = channel.request(Describe(), WorkerCard, timeout_s=60)
        found.append(next((g for g in answer.groups if g.group == "policy"), GroupStatus("policy", "idle", None)))
    return found


def all_idle(card: ReplicaCard) -> bool:
    return all((status.state, status.txn) == ("idle", "") for status in statuses(card))


def assert_gone(card: ReplicaCard) -> None:
    """No process of that replica lives for long."""
    pids = [card.pid, *(worker.pid for worker in card.workers)]
    eventually(lambda: all(map(has_ended, pids)), timeout_s=120, what="the end of a replica's processes")


class Faulty:
    """A live engine with the fault plug-in, its two models, and the version that it is known to serve."""

    def __init__(self, engine: Engine, faults: Path, model_a: Path, model_b: Path) -> None:
        self.engine = engine
        self.faults = faults
        self.models = {"A": model_a, "B": model_b}
        self.version = 0
        self.serves = "A"

    @property
    def other(self) -> str:
        return "B" if self.serves == "A" else "A"

    @property
    def stamp(self) -> str:
        """What answers say of the version that is served; nothing before vLLM 0.32."""
        return str(self.version or "default") if self.engine.stamps else ""

    @property
    def card(self) -> ReplicaCard:
        (card,) = self.engine.cards
        return card

    def order(self, *faults: dict[str, Any]) -> None:
        """Faults to happen from now on; none: no more."""
        temporary = self.faults.with_suffix(".tmp")
        temporary.write_text(json.dumps(faults))
        temporary.replace(self.faults)

    def update(self, which: str | None = None, sync: SyncManager | None = None) -> UpdateReport:
        """An update that must succeed; to the other model by default, by a manager of its own by default."""
        which = which or self.other
        self.version += 1
        with contextlib.nullcontext(sync) if sync else SyncManager(timeout_s=180) as manager:
            report = manager.update(source(self.models[which]), self.version)
        assert [r.status for r in report.replicas] == ["committed"]
        self.serves = which
        return report

    def settle(self) -> None:
        """After a test that failed half-way: known ground for the next."""
        self.order()
        versions = {s.version for s in statuses(self.card)}
        if versions != {self.version or None} or self.card.state != "serving":
            self.version = max(self.version, *(v or 0 for v in versions)) + 1
            self.update("A")

    def generated(self) -> list[dict[str, Any]]:
        assert isinstance(self.engine, Driver)
        return self.engine.generate(PROMPTS, COUNT)

    def assert_serves(self, which: str | None = None) -> None:
        """Every rank is at one version, and the tokens are all that version's."""
        which = which or self.serves
        done = self.generated()
        assert [r["tokens"] for r in done] == reference(self.models[which]), f"{which} {self.version}: {done}"
        assert [r["versions"] for r in done] == [[self.stamp] * COUNT] * len(PROMPTS)
        assert {s.version for s in statuses(self.card)} == {self.version or None}

    def assert_recovered(self) -> None:
        """The old version is served; nothing is on its way; the next update succeeds and can be verified; then one back."""
        assert self.card.state == "serving"
        eventually(lambda: all_idle(self.card), what="the transaction to be dropped")
        self.assert_serves()
        for _ in range(2):
            self.update()
            self.assert_serves()
            with SyncManager() as sync:
                assert sync.verify(source(self.models[self.serves])).ok
        for process in self.engine.family():
            assert len(segments_of(process)) <= KEPT_SEGMENTS, process


@pytest.fixture
def tp2(tp2_engine: Faulty) -> Faulty:
    tp2_engine.settle()
    return tp2_engine


@pytest.fixture
def survivor(survivor_engine: Faulty) -> Faulty:
    survivor_engine.engine.use()
    survivor_engine.settle()
    return survivor_engine


@contextlib.contextmanager
def engine_with_faults(
    runtime: Path, checkpoint: Checkpoint, name: str, *, in_process: bool = False, **arguments: Any
) -> Iterator[Faulty]:
    """An engine of its own with the fault plug-in, by vLLM's arguments. It leaves nothing behind."""
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    faults = runtime / f"faults-{name}"
    faults.write_text("[]")
    with Driver(
        runtime, in_process=in_process, WEIGHTWIRE_PLUGINS=PLUGIN, WEIGHTWIRE_TEST_FAULTS=str(faults)
    ) as driver:
        driver.open(model_a, max_model_len=1024, **arguments)
        yield Faulty(driver, faults, model_a, model_b)
    assert driver.leftovers() == []


@pytest.fixture(scope="module")
def tp2_engine(runtime: Path, checkpoint: Checkpoint) -> Iterator[Faulty]:
    with engine_with_faults(runtime, checkpoint, "tp2", tensor_parallel_size=2) as engine:
        yield engine


class Trainer:
    """`fault_trainer.py` on `ranks` processes."""

    def __init__(self, directory: Path, ranks: int, **config: Any) -> None:
        self.directory = directory
        directory.mkdir()
        (directory / "config").write_text(json.dumps(config))
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes = [
            nursery(sys.executable, ("torch.distributed", "safetensors.torch"), (("OMP_NUM_THREADS", "1"),)).start(
                "tests.support.fault_trainer",
                [str(directory)],
                {**os.environ, **group, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                directory / f"log{rank}",
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait(30)

    def arrived(self) -> None:
        """Until the rank that is to stop stands at its point."""
        eventually(
            lambda: (self.directory / "at").exists() or any(p.poll() is not None for p in self.processes),
            timeout_s=300,
            what=f"{(self.directory / 'config').read_text()}",
        )
        assert (self.directory / "at").exists(), self.logs()

    def signal(self, rank: int, number: int) -> None:
        self.processes[rank].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[rank].wait(30)

    def go_on(self) -> None:
        (self.directory / "go").touch()

    def result(self, rank: int) -> dict[str, Any]:
        path = self.directory / f"result{rank}"
        eventually(lambda: path.exists() or self.processes[rank].poll() is not None, timeout_s=180, what=f"{path}")
        assert path.exists(), self.logs()
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.directory.glob("log*")))


def trainer(faulty: Faulty, tmp_path: Path, ranks: int, rank: int, point: str, **options: Any) -> Trainer:
    model = faulty.models[faulty.other] / "model.safetensors"
    options = {"timeout_s": 600, "lease_s": 600, **options}
    return Trainer(
        tmp_path / "trainer",
        ranks,
        model=str(model),
        version=faulty.version + 1,
        rank=rank,
        point=point,
        options=options,
    )


# --- the trainer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("install", ["copy", "standby"])
@pytest.mark.parametrize("point", ["writing", "wrote", "sealed"])
def test_a_manager_killed_before_the_commit_leaves_the_old_version_and_nothing_of_its_own(
    tp2: Faulty, tmp_path: Path, point: str, install: str
) -> None:
    with trainer(tp2, tmp_path, 1, 0, point, install=install) as killed:
        killed.arrived()
        state = {s.state for s in statuses(tp2.card)}
        assert state == {"sealed" if point == "sealed" else "receiving"}
        killed.signal(0, signal.SIGKILL)
        # Not its lease of ten minutes ends the transaction, but its death.
        eventually(lambda: all_idle(tp2.card), what="the transaction of a dead trainer to be dropped")
    tp2.assert_recovered()
    assert not list((tp2.engine.runtime / tp2.engine.job).glob("trainer-*"))


@pytest.mark.parametrize("in_flight", ["keep", "drain"])
def test_a_manager_killed_after_it_sent_the_commit_leaves_the_old_version_or_the_new_one(
    tp2: Faulty, tmp_path: Path, in_flight: str
) -> None:
    assert isinstance(tp2.engine, Driver)
    with trainer(tp2, tmp_path, 1, 0, "committing", in_flight=in_flight) as killed:
        running = tp2.engine.submit([LONG, PROMPTS[1]], 700) if in_flight == "drain" else []
        killed.arrived()
        killed.signal(0, signal.SIGKILL)
        assert {r["finish_reason"] for r in tp2.engine.wait(running)} <= {"length"}
        eventually(lambda: all_idle(tp2.card), what="the commit to end")
    (version,) = {s.version for s in statuses(tp2.card)}
    assert version in (tp2.version or None, tp2.version + 1)
    if version == tp2.version + 1:
        tp2.version, tp2.serves = tp2.version + 1, tp2.other
    tp2.assert_recovered()


@pytest.mark.parametrize("point", ["writing", "wrote"])
def test_a_killed_trainer_rank_fails_the_update_on_its_manager_at_once(tp2: Faulty, tmp_path: Path, point: str) -> None:
    with trainer(tp2, tmp_path, 2, 1, point) as ranks:
        ranks.arrived()
        ranks.signal(1, signal.SIGKILL)
        result = ranks.result(0)
        assert (result["error"], result["where"][:2]) == ("PeerLost", ["trainer", 1]), result
        assert result["version"] == tp2.version + 1 and result["seconds"] < 300
    tp2.assert_recovered()
    assert not list((tp2.engine.runtime / tp2.engine.job).glob("trainer-*"))


def test_a_trainer_rank_killed_inside_a_broadcast_is_a_lost_peer_and_the_next_update_makes_new_groups(
    tp2: Faulty, tmp_path: Path
) -> None:
    assert isinstance(tp2.engine, Driver)
    with trainer(tp2, tmp_path, 2, 1, "writing", transport="collective") as ranks:
        ranks.arrived()  # both workers have all of rank 0, and wait inside a broadcast of rank 1
        running = tp2.engine.submit([LONG, PROMPTS[1]], IN_FLIGHT)
        tp2.engine.wait_for_tokens(running, 2)
        ranks.signal(1, signal.SIGKILL)
        result = ranks.result(0)
        assert (result["error"], result["where"][:2]) == ("PeerLost", ["trainer", 1]), result
        assert result["version"] == tp2.version + 1 and result["seconds"] < 300
    ended = tp2.engine.wait(running)
    assert [(r["finish_reason"], len(r["tokens"])) for r in ended] == [("length", IN_FLIGHT)] * 2
    assert [set(r["versions"]) for r in ended] == [{tp2.stamp}] * 2
    eventually(lambda: all_idle(tp2.card), what="the transaction to be dropped")
    tp2.assert_serves()
    (tmp_path / "next").mkdir()
    with trainer(tp2, tmp_path / "next", 2, 0, "never", transport="collective") as ranks:
        tp2.version += 1
        results = [ranks.result(rank) for rank in range(2)]
        assert [result.get("replicas") for result in results] == [[["committed", tp2.version]]] * 2, results
    tp2.serves = tp2.other
    tp2.assert_recovered()
    assert not list((tp2.engine.runtime / tp2.engine.job).glob("collective-*"))


def test_a_trainer_rank_that_learns_of_its_manager_s_death_fails_with_a_typed_error(
    tp2: Faulty, tmp_path: Path
) -> None:
    with trainer(tp2, tmp_path, 2, 0, "sealed") as ranks:
        ranks.arrived()
        ranks.signal(0, signal.SIGKILL)
        result = ranks.result(1)
        assert (result["error"], result["where"][:2]) == ("PeerLost", ["manager", 0]), result
    tp2.assert_recovered()
    assert not list((tp2.engine.runtime / tp2.engine.job).glob("trainer-*"))


def test_a_silent_trainer_rank_fails_the_update_on_its_manager_by_the_deadline(tp2: Faulty, tmp_path: Path) -> None:
    with trainer(tp2, tmp_path, 2, 1, "writing", timeout_s=DEADLINE_S) as ranks:
        ranks.arrived()
        ranks.signal(1, signal.SIGSTOP)
        result = ranks.result(0)
        assert (result["error"], result["where"][:2]) == ("SyncTimeout", ["trainer", 1]), result
        tp2.assert_recovered()
        ranks.signal(1, signal.SIGCONT)
        ranks.go_on()
        assert ranks.result(1)["error"] in ("SyncTimeout", "PeerLost")
    tp2.assert_serves()


@pytest.mark.parametrize("point", ["writing", "sealed"])
def test_a_silent_manager_loses_its_lease_and_is_told_so_when_it_wakes(tp2: Faulty, tmp_path: Path, point: str) -> None:
    with trainer(tp2, tmp_path, 1, 0, point, lease_s=LEASE_S) as stopped:
        stopped.arrived()
        stopped.signal(0, signal.SIGSTOP)
        eventually(lambda: all_idle(tp2.card), what="the lease to run out")
        tp2.assert_serves()
        newer = tp2.other
        tp2.version += 1  # the version that it was about to bring
        tp2.update(newer)
        stopped.signal(0, signal.SIGCONT)
        stopped.go_on()
        result = stopped.result(0)
        assert (result["error"], result["where"][0]) == ("SyncTimeout", "worker"), result
        assert "the trainer was silent" in result["text"]
    tp2.assert_recovered()


# --- the workers and the coordinator, seen by a manager that lives on ---------------------------------------------------


class Halting(ModuleAdapter):
    """Stops after its first slice until it may go on."""

    def __init__(self, model: Path) -> None:
        super().__init__(dict(load_file(model / "model.safetensors")))
        self.halted = threading.Event()
        self.may_go_on = threading.Event()

    def slices(self) -> Iterator[LocalSlice]:
        for item in super().slices():
            yield item
            self.halted.set()
            assert self.may_go_on.wait(600)


class Halted:
    """An update of this process that stands at "staging" or "sealed" until `go_on`."""

    def __init__(self, sync: SyncManager, model: Path, version: int, point: str) -> None:
        self.source = Halting(model)
        if point == "sealed":
            self.source.may_go_on.set()
            self.halted, self.may_go_on = threading.Event(), threading.Event()
            self.plugin = AtPhase("commit", self._halt)
            plugin_manager().register(self.plugin)
        else:
            self.halted, self.may_go_on = self.source.halted, self.source.may_go_on
        self.future: Future[UpdateReport] = sync.update_async(self.source, version)
        assert self.halted.wait(600), self.future

    def _halt(self) -> None:
        plugin_manager().unregister(self.plugin)
        self.halted.set()
        assert self.may_go_on.wait(600)

    def go_on(self) -> UpdateReport:
        """What becomes of it."""
        self.may_go_on.set()
        return self.future.result(600)


@pytest.mark.parametrize("point", ["staging", "sealed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_silent_worker_fails_the_update_by_the_deadline_and_takes_the_next_one_when_it_wakes(
    tp2: Faulty, rank: int, point: str
) -> None:
    worker = psutil.Process(tp2.card.workers[rank].pid)
    with SyncManager(timeout_s=DEADLINE_S, lease_s=LEASE_S) as sync:
        halted = Halted(sync, tp2.models[tp2.other], tp2.version + 1, point)
        worker.suspend()
        try:
            started_s = time.monotonic()
            with pytest.raises(SyncTimeout) as caught:
                halted.go_on()
            assert time.monotonic() - started_s < 4 * DEADLINE_S
            assert caught.value.replica == tp2.card.replica
        finally:
            worker.resume()
        eventually(lambda: all_idle(tp2.card), what="the group to come to rest")
        # At "sealed" the commit was on its way to a worker that slept: either may be served, the same on both ranks.
        (version,) = {s.version for s in statuses(tp2.card)}
        if version == tp2.version + 1:
            tp2.version, tp2.serves = version, tp2.other
        else:
            assert version == (tp2.version or None)
        tp2.assert_serves()
        tp2.version += 1
        report = sync.update(source(tp2.models[tp2.other]), tp2.version)
        tp2.serves = tp2.other
        assert [r.status for r in report.replicas] == ["committed"]
    tp2.assert_recovered()


def test_a_silent_coordinator_fails_the_commit_by_the_deadline_and_takes_the_next_one_when_it_wakes(
    tp2: Faulty,
) -> None:
    coordinator = psutil.Process(tp2.card.pid)
    with SyncManager(timeout_s=DEADLINE_S) as sync:
        halted = Halted(sync, tp2.models[tp2.other], tp2.version + 1, "sealed")
        coordinator.suspend()
        try:
            with pytest.raises(SyncTimeout) as caught:
                halted.go_on()
            assert caught.value.side == "coordinator" and caught.value.phase == "commit"
        finally:
            coordinator.resume()
    eventually(lambda: all_idle(tp2.card), what="the group to come to rest")
    (version,) = {s.version for s in statuses(tp2.card)}
    if version == tp2.version + 1:
        tp2.version, tp2.serves = version, tp2.other
    tp2.assert_recovered()


# --- installations that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("install", ["copy", "standby"])
def test_an_installation_that_fails_on_one_rank_is_undone_on_all(
    tp2: Faulty, install: str, rank: int, when: str
) -> None:
    assert isinstance(tp2.engine, Driver)
    with SyncManager(install=install, timeout_s=120) as sync:  # type: ignore[arg-type]
        tp2.update(sync=sync)  # under `copy` its bytes are the way back
        running = tp2.engine.submit([LONG, PROMPTS[1]], IN_FLIGHT)
        tp2.engine.wait_for_tokens(running, 2)
        tp2.order({"rank": rank, "step": "install", "when": when})
        with pytest.raises(CommitFailed, match=f"planned fault: install on rank {rank}") as caught:
            sync.update(source(tp2.models[tp2.other]), tp2.version + 1)
        tp2.order()
        assert (caught.value.phase, caught.value.version) == ("commit", tp2.version + 1)
        assert caught.value.replica == tp2.card.replica
        ended = tp2.engine.wait(running)
        assert [(r["finish_reason"], len(r["tokens"])) for r in ended] == [("length", IN_FLIGHT)] * 2
        assert [set(r["versions"]) for r in ended] == [{tp2.stamp}] * 2
        tp2.assert_serves()
        assert sync.verify(source(tp2.models[tp2.serves])).ok
    tp2.assert_recovered()


@pytest.mark.parametrize(("install", "phase"), [("copy", "commit"), ("standby", "seal")])
@pytest.mark.parametrize("rank", [0, 1])
def test_post_processing_that_fails_half_way_on_one_rank_is_undone_on_all(
    tp2: Faulty, install: str, phase: str, rank: int
) -> None:
    """`copy` makes packed layers anew at the step boundary, one after the other, `standby` before it."""
    assert isinstance(tp2.engine, Driver)
    with SyncManager(install=install, timeout_s=120) as sync:  # type: ignore[arg-type]
        tp2.update(sync=sync)
        running = tp2.engine.submit([LONG, PROMPTS[1]], IN_FLIGHT)
        tp2.engine.wait_for_tokens(running, 2)
        tp2.order({"rank": rank, "step": "post-process", "when": 3})
        with pytest.raises(WeightwireError, match=f"planned fault: post-process on rank {rank}") as caught:
            sync.update(source(tp2.models[tp2.other]), tp2.version + 1)
        tp2.order()
        assert (caught.value.phase, caught.value.version) == (phase, tp2.version + 1)
        assert [set(r["versions"]) for r in tp2.engine.wait(running)] == [{tp2.stamp}] * 2
        tp2.assert_serves()
        assert sync.verify(source(tp2.models[tp2.serves])).ok
        tp2.update(sync=sync)
        tp2.assert_serves()
    tp2.assert_recovered()


@pytest.mark.parametrize("install", ["copy", "standby"])
def test_a_replica_whose_way_back_fails_too_is_torn_refuses_to_generate_and_is_healed_by_an_update(
    tp2: Faulty, install: str
) -> None:
    assert isinstance(tp2.engine, Driver)
    with SyncManager(install=install, timeout_s=120) as sync:  # type: ignore[arg-type]
        tp2.update(sync=sync)
        running = tp2.engine.submit([LONG, PROMPTS[1]] * 100, 800)  # far more than run at once, however slow the update
        tp2.engine.wait_for_tokens(running[:2], 2)
        tp2.order({"rank": 1, "step": "install", "when": "after"}, {"rank": 0, "step": "undo", "when": "before"})
        with pytest.raises(TornReplica, match="planned fault: undo on rank 0") as caught:
            sync.update(source(tp2.models[tp2.other]), tp2.version + 1)
        assert caught.value.replica == tp2.card.replica and "full update" in str(caught.value)
        tp2.order()
        ended = tp2.engine.wait(running)
        assert {(r["finish_reason"], len(r["tokens"]) == 800) for r in ended} <= {("error", False), ("length", True)}
        assert ended[-1]["finish_reason"] == "error" and {*ended[0]["versions"]} == {tp2.stamp}
        refused = tp2.generated()
        assert [(r["finish_reason"], r["tokens"]) for r in refused] == [("error", [])] * len(PROMPTS)
        assert all("planned fault: undo on rank 0" in r["reason"] for r in (ended[-1], *refused)), refused
        assert tp2.card.state == "torn" and "planned fault" in tp2.card.detail
        assert {s.state for s in statuses(tp2.card)} == {"torn"}
        tp2.version += 1
        tp2.serves = tp2.other
        report = sync.update(source(tp2.models[tp2.serves]), tp2.version)
        assert [r.status for r in report.replicas] == ["committed"]
    tp2.assert_serves()
    tp2.assert_recovered()


def check_reset_weights(faulty: Faulty) -> None:
    """It refuses from before the reset on; an update with the very weights of before brings all of them again."""
    assert isinstance(faulty.engine, Driver)
    prompts = [LONG, PROMPTS[1]]
    with SyncManager(timeout_s=120) as sync:
        faulty.update(sync=sync)
        running = faulty.engine.submit(prompts * 100, 800)  # far more than run at once
        faulty.engine.wait_for_tokens(running[:2], 2)
        faulty.engine.call("reset_weights")
        ended = faulty.engine.wait(running)
        refused = faulty.generated()
        assert [(r["finish_reason"], r["tokens"]) for r in refused] == [("error", [])] * len(PROMPTS)
        assert ended[-1]["finish_reason"] == "error" and all("reset" in r["reason"] for r in (ended[-1], *refused)), (
            refused
        )
        assert faulty.card.state == "torn" and {s.state for s in statuses(faulty.card)} == {"torn"}
        assert "a parameter that no update fills stays" in faulty.card.detail
        assert not sync.verify(source(faulty.models[faulty.serves])).ok
        faulty.update(faulty.serves, sync=sync)
        faulty.assert_serves()
    right = faulty.engine.generate(prompts, 60)
    for index, request in enumerate(ended):
        tokens = request["tokens"][:60]
        assert tokens == right[index % 2]["tokens"][: len(tokens)], "no token is of weights that were reset"
    faulty.assert_recovered()


def test_weights_that_the_engine_s_own_api_resets_serve_nobody_until_a_full_update(tp2: Faulty) -> None:
    check_reset_weights(tp2)


@pytest.mark.parametrize("point", ["staging", "sealed"])
def test_weights_reset_while_an_update_is_on_its_way_end_it_and_the_next_one_heals(tp2: Faulty, point: str) -> None:
    assert isinstance(tp2.engine, Driver)
    with SyncManager(timeout_s=60) as sync:
        tp2.update(sync=sync)
        halted = Halted(sync, tp2.models[tp2.other], tp2.version + 1, point)
        tp2.engine.call("reset_weights")
        assert {r["finish_reason"] for r in tp2.generated()} == {"error"}
        with pytest.raises(TornReplica, match="reset"):
            halted.go_on()
        assert tp2.card.state == "torn" and {r["finish_reason"] for r in tp2.generated()} == {"error"}
        tp2.version += 1
        tp2.update(sync=sync)
        tp2.assert_serves()
        with sync.paused():
            tp2.engine.call("reset_weights")
        assert {r["finish_reason"] for r in tp2.generated()} == {"error"}
        tp2.update(sync=sync)
    tp2.assert_recovered()


@contextlib.contextmanager
def card_unwritable(faulty: Faulty) -> Iterator[Path]:
    """Not even root can write the replica's card meanwhile; what it said before stays there to be read."""
    path = faulty.engine.runtime / faulty.engine.job / f"{faulty.card.replica}.card.tmp"
    path.mkdir()
    try:
        yield path
    finally:
        path.rmdir()


def stands(card: ReplicaCard) -> str:
    """As the coordinator says itself."""
    with Channel(card.address) as asking:
        return asking.request(Describe(), ReplicaCard, timeout_s=60).state


def check_torn_without_a_card(faulty: Faulty) -> None:
    """It refuses, whoever can be told; and what can't be written is written later."""
    faulty.update()
    rank = len(faulty.card.workers) - 1
    with SyncManager(timeout_s=120, install="copy") as sync:
        with card_unwritable(faulty):
            faulty.order(
                {"rank": rank, "step": "install", "when": "after"}, {"rank": 0, "step": "undo", "when": "before"}
            )
            with pytest.raises(TornReplica, match="planned fault: undo on rank 0"):
                sync.update(source(faulty.models[faulty.other]), faulty.version + 1)
            faulty.order()
            refused = faulty.generated()
            assert [(r["finish_reason"], r["tokens"]) for r in refused] == [("error", [])] * len(PROMPTS), refused
            assert all("planned fault: undo on rank 0" in r["reason"] for r in refused), refused
            assert (faulty.card.state, stands(faulty.card)) == ("serving", "torn")
        eventually(lambda: faulty.card.state == "torn", what="the card, once it can be written")
        faulty.version += 1
        faulty.update(sync=sync)
    faulty.assert_serves()


def check_pause_without_a_card(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with its lease, and the engine goes on."""
    fall_silent(monkeypatch)
    with card_unwritable(faulty), SyncManager(timeout_s=60, lease_s=1.5) as silent:
        assert [r.state for r in silent.pause().replicas] == ["paused"]
        eventually(lambda: stands(faulty.card) == "serving", what="the end of the lease")
        faulty.assert_serves()
    faulty.update()
    faulty.assert_serves()
    assert faulty.card.state == "serving"


def test_a_torn_replica_refuses_even_if_its_card_cannot_be_written(tp2: Faulty) -> None:
    check_torn_without_a_card(tp2)
    tp2.assert_recovered()


def test_a_pause_whose_card_cannot_be_written_ends_with_its_lease_and_the_engine_lives(
    tp2: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_pause_without_a_card(tp2, monkeypatch)


def check_a_worker_killed_while_it_installs(tp2: Faulty) -> None:
    """Nothing of the engine survives, and the manager is told."""
    tp2.order({"rank": 1, "step": "install", "when": "hang"})
    with SyncManager(timeout_s=120) as sync:
        future = sync.update_async(source(tp2.models[tp2.other]), tp2.version + 1)
        eventually(tp2.faults.with_name(f"{tp2.faults.name}.1").exists, what="rank 1 to install")
        card = tp2.card
        os.kill(card.workers[1].pid, signal.SIGKILL)
        with pytest.raises(WeightwireError) as caught:
            future.result(600)
        assert type(caught.value).__name__ in ("PeerLost", "TornReplica")
        assert_gone(card)
        assert tp2.engine.cards == [] and tp2.engine.leftovers() == []


def test_a_worker_killed_while_it_installs_takes_its_engine_down_and_the_manager_is_told(tp2: Faulty) -> None:
    """The last one for this engine."""
    check_a_worker_killed_while_it_installs(tp2)


def test_a_worker_that_stands_still_in_its_installation_leaves_a_torn_replica_that_says_to_restart_the_engine(
    runtime: Path, checkpoint: Checkpoint
) -> None:
    """Also once it has gone on: late answers could be taken for those to the next question."""
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    faults = runtime / "faults-still"
    faults.write_text("[]")
    environment = {
        "WEIGHTWIRE_PLUGINS": PLUGIN,
        "WEIGHTWIRE_TEST_FAULTS": str(faults),
        "WEIGHTWIRE_RANK_TIMEOUT_S": "20",
    }
    patient = Config(control_timeout_s=60.0)  # the engine is to notice it, not the manager
    with Driver(runtime, **environment) as driver, SyncManager(timeout_s=240, config=patient) as sync:
        driver.open(model_a, tensor_parallel_size=2, max_model_len=1024)
        faulty = Faulty(driver, faults, model_a, model_b)
        faulty.update(sync=sync)
        worker = psutil.Process(faulty.card.workers[1].pid)
        faulty.order({"rank": 1, "step": "install", "when": "stop"})
        with pytest.raises(PeerLost, match="lost a worker in 'install'") as caught:
            sync.update(source(model_a), 2)
        assert caught.value.hint.startswith("restart the engine")
        for wakes in (False, True):
            if wakes:
                faulty.order()
                worker.resume()
            with pytest.raises(WeightwireError, match="restart the engine"):
                sync.update(source(model_a), 3)
            (replica,) = sync.replicas()
            assert replica.state in ("lost", "torn") and replica.version is None
            assert faulty.card.state == "torn" and "restart the engine" in faulty.card.detail
            done = faulty.generated()
            assert {r["finish_reason"] for r in done} == {"error"} and "restart the engine" in done[0]["reason"]


# --- replicas that die beside others that don't -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def survivor_engine(runtime: Path, checkpoint: Checkpoint) -> Iterator[Faulty]:
    with engine_with_faults(runtime, checkpoint, "survivor", in_process=True) as engine:
        yield engine


@pytest.mark.parametrize(("victim", "point"), [("worker", "staging"), ("worker", "sealed"), ("coordinator", "sealed")])
def test_a_replica_that_dies_is_reported_and_the_others_take_the_update(
    survivor: Faulty, victim: str, point: str
) -> None:
    with Driver(survivor.engine.runtime, job=survivor.engine.job) as driver, SyncManager(timeout_s=120) as sync:
        driver.open(survivor.models[survivor.serves])
        (doomed,) = [card for card in driver.cards if card.replica != survivor_card(survivor).replica]
        halted = Halted(sync, survivor.models[survivor.other], survivor.version + 1, point)
        os.kill(doomed.pid if victim == "coordinator" else doomed.workers[0].pid, signal.SIGKILL)
        report = halted.go_on()
        survivor.version, survivor.serves = survivor.version + 1, survivor.other
        by_replica = {r.replica: r for r in report.replicas}
        lost = by_replica.pop(doomed.replica)
        assert [r.status for r in by_replica.values()] == ["committed"]
        assert lost.status == "failed" and lost.error is not None and lost.error.kind == "PeerLost", lost
        assert lost.error.replica == doomed.replica and lost.error.version == survivor.version
        assert_gone(doomed)
        assert [card.replica for card in driver.cards] == list(by_replica)
        assert not [name for name in driver.leftovers() if doomed.replica in name]
        survivor.assert_serves()
        survivor.version, survivor.serves = survivor.version + 1, survivor.other
        report = sync.update(source(survivor.models[survivor.serves]), survivor.version)
        assert [(r.replica, r.status) for r in report.replicas] == [(name, "committed") for name in by_replica]
        survivor.assert_serves()
    survivor.assert_recovered()


def survivor_card(survivor: Faulty) -> ReplicaCard:
    assert survivor.engine.process is not None
    (card,) = [card for card in survivor.engine.cards if card.pid == survivor.engine.process.pid]
    return card


def test_a_torn_engine_in_the_caller_s_process_ends_requests_with_the_reason_until_it_is_healed(
    survivor: Faulty,
) -> None:
    assert isinstance(survivor.engine, Driver)
    survivor.update()
    running = survivor.engine.submit(
        [LONG, PROMPTS[1]] * 100, 800
    )  # far more than run at once, however slow the update
    survivor.engine.wait_for_tokens(running[:2], 2)
    survivor.order({"rank": 0, "step": "install", "when": "after"}, {"rank": 0, "step": "undo", "when": "before"})
    with SyncManager(timeout_s=120, install="copy") as sync, pytest.raises(TornReplica):
        sync.update(source(survivor.models[survivor.other]), survivor.version + 1)
    survivor.order()
    ended = [r for r in survivor.engine.wait(running) if r["finish_reason"] != "length"] + survivor.generated()
    assert len(ended) > len(PROMPTS) and {r["finish_reason"] for r in ended} == {"error"}
    assert all("planned fault: undo" in r["reason"] for r in ended), ended
    survivor.version += 1
    survivor.update()
    survivor.assert_serves()
    survivor.assert_recovered()


def test_an_engine_in_the_caller_s_process_refuses_and_pauses_without_a_card_too(
    survivor: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_torn_without_a_card(survivor)
    check_pause_without_a_card(survivor, monkeypatch)
    survivor.assert_recovered()


def test_weights_reset_in_the_caller_s_process_serve_nobody_until_a_full_update(survivor: Faulty) -> None:
    check_reset_weights(survivor)


# --- the server -------------------------------------------------------------------------------------------------------------


def test_a_failed_first_update_is_undone_under_standby_and_torn_under_copy_where_the_server_answers_503(
    runtime: Path, checkpoint: Checkpoint
) -> None:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    faults = runtime / "faults-server"
    faults.write_text('[{"rank": 0, "step": "install", "when": "after"}]')
    server = Server(
        runtime,
        model_a,
        arguments=["--chat-template", CHAT],
        preloaded=False,
        WEIGHTWIRE_PLUGINS=PLUGIN,
        WEIGHTWIRE_TEST_FAULTS=str(faults),
    )
    with noted_starts(server.job) as starts, server:
        check_starts(server, starts)
        with SyncManager(timeout_s=120, install="standby") as sync:
            with pytest.raises(CommitFailed, match="planned fault"):
                sync.update(source(model_b), 1)
            assert [server.tokens(prompt, COUNT) for prompt in PROMPTS] == reference(model_a)
        with SyncManager(timeout_s=120, install="copy") as sync:
            with pytest.raises(TornReplica, match="previous version's bytes are gone"):
                sync.update(source(model_b), 1)
            (card,) = server.cards
            assert card.state == "torn" and "previous version's bytes are gone" in card.detail
            for _ in range(3):
                status, answer = server.complete(PROMPTS[1], COUNT)
                assert status == 503, answer
                assert "planned fault" in answer["error"]["message"] and card.replica in answer["error"]["message"]
                answers_itself = Version(card.engine_version) >= Version("0.33")
                assert answer["error"]["type"] == ("ServiceUnavailableError" if answers_itself else "TornReplica")
            streamed = server.stream("/v1/completions", prompt=list(PROMPTS[1]), max_tokens=COUNT)
            assert (
                "planned fault" in streamed and card.replica in streamed and "Internal server error" not in streamed
            ), streamed
            faults.write_text("[]")
            sync.update(source(model_b), 2)
            assert [server.tokens(prompt, COUNT) for prompt in PROMPTS] == reference(model_b)
            assert sync.verify(source(model_b)).ok
            (card,) = server.cards
            assert card.state == "serving"
            check_visible_on_vllm(server, card.replica, PROMPTS[1], source(model_a), sync)
            check_probe(server, model_a, model_b)
    assert server.leftovers() == [] and server.family() == []
