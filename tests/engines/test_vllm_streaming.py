"""`install="streaming"` on a real vLLM with two ranks: what is killed, stopped or made to fail while bytes go into the live
parameters. Before the first byte the old version is served; after it the replica refuses (torn) until the next update."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from inference_plugin.wire.errors import CommitFailed, TornReplica, WeightwireError
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_faults import DEADLINE_S, LEASE_S, PLUGIN, Faulty, Halted, assert_gone, statuses, trainer
from tests.engines.test_vllm_tokens import COUNT, LONG, PROMPTS, source
from tests.support.engines import Driver, eventually
from tests.support.managers import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def tp2_engine(runtime: Path, checkpoint: Checkpoint) -> Iterator[Faulty]:
    model_a, model_b = (checkpoint("qwen3_wide", tied=True, seed=seed) for seed in (1, 2))
    faults = runtime / "faults-streaming"
    faults.write_text("[]")
    with Driver(runtime, WEIGHTWIRE_PLUGINS=PLUGIN, WEIGHTWIRE_TEST_FAULTS=str(faults)) as driver:
        driver.open(model_a, tensor_parallel_size=2, max_model_len=1024)
        yield Faulty(driver, faults, model_a, model_b)
    assert driver.leftovers() == []


@pytest.fixture
def tp2(tp2_engine: Faulty, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    monkeypatch.setenv(
        "WEIGHTWIRE_BUCKET_BYTES", "4MiB"
    )  # so that the first ones are there before the last ones are made
    tp2_engine.settle()
    return tp2_engine


def assert_torn_until_healed(tp2: Faulty, why: str) -> None:
    """It refuses on all ranks and says why; the next update, which streams too, makes it whole."""
    assert isinstance(tp2.engine, Driver)
    eventually(lambda: tp2.card.state == "torn", what="the replica to be torn")
    eventually(lambda: {s.state for s in statuses(tp2.card)} == {"torn"}, what="all ranks to know it")
    assert why in tp2.card.detail
    refused = tp2.generated()
    assert [(r["finish_reason"], r["tokens"]) for r in refused] == [("error", [])] * len(PROMPTS), refused
    assert all(why in r["reason"] for r in refused)
    tp2.version += 1
    with SyncManager(timeout_s=180, install="streaming") as sync:
        tp2.update(sync=sync)
    tp2.assert_serves()


@pytest.mark.parametrize("point", ["streaming", "wrote"])
def test_a_manager_killed_while_it_streams_tears_the_replica_until_the_next_update(
    tp2: Faulty, tmp_path: Path, point: str
) -> None:
    with trainer(tp2, tmp_path, 1, 0, point, install="streaming") as killed:
        killed.arrived()
        assert {s.state for s in statuses(tp2.card)} == {"committing"}
        killed.signal(0, signal.SIGKILL)
        # Not its lease of ten minutes ends the stream, but its death.
        assert_torn_until_healed(tp2, "the trainer's process ended")
    tp2.assert_recovered()


def test_a_killed_trainer_rank_fails_the_update_which_says_that_the_replica_is_torn(
    tp2: Faulty, tmp_path: Path
) -> None:
    with trainer(tp2, tmp_path, 2, 1, "streaming", install="streaming") as ranks:
        ranks.arrived()
        ranks.signal(1, signal.SIGKILL)
        result = ranks.result(0)
        assert (result["error"], result["where"][:2]) == ("PeerLost", ["trainer", 1]), result
        assert "torn" in result["text"] and "old version is served" not in result["text"]
        assert_torn_until_healed(tp2, "the update failed")
    tp2.assert_recovered()


@pytest.mark.parametrize("rank", [0, 1], ids=["manager", "rank 1"])
def test_a_trainer_that_wakes_late_writes_into_nothing_that_is_served(tp2: Faulty, tmp_path: Path, rank: int) -> None:
    options = {"lease_s": LEASE_S} if rank == 0 else {"timeout_s": DEADLINE_S}
    with trainer(tp2, tmp_path, rank + 1, rank, "streaming", install="streaming", **options) as ranks:
        ranks.arrived()
        ranks.signal(rank, signal.SIGSTOP)
        assert_torn_until_healed(tp2, "the update failed" if rank else "the trainer was silent")
        ranks.signal(rank, signal.SIGCONT)
        ranks.go_on()
        assert ranks.result(rank)["error"] is not None
        tp2.assert_serves()
    tp2.assert_recovered()


def test_what_fails_before_the_first_byte_leaves_the_old_version(tp2: Faulty) -> None:
    with SyncManager(install="streaming", timeout_s=120) as sync:
        tp2.update(sync=sync)
        tp2.order(*({"rank": each, "step": "install", "when": "before"} for each in (0, 1)))
        with pytest.raises(CommitFailed, match="planned fault: install on rank"):
            sync.update(source(tp2.models[tp2.other]), tp2.version + 1)
        tp2.order()
        tp2.assert_serves()
    tp2.assert_recovered()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_installation_that_fails_after_the_bytes_tears_the_replica(tp2: Faulty, rank: int) -> None:
    with SyncManager(install="streaming", timeout_s=120) as sync:
        tp2.update(sync=sync)
        tp2.order({"rank": rank, "step": "install", "when": "after"})
        with pytest.raises(TornReplica, match=f"planned fault: install on rank {rank}") as caught:
            sync.update(source(tp2.models[tp2.other]), tp2.version + 1)
        tp2.order()
        assert caught.value.replica == tp2.card.replica
    assert_torn_until_healed(tp2, f"planned fault: install on rank {rank}")
    tp2.assert_recovered()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_silent_worker_fails_the_update_by_the_deadline_and_the_next_one_heals(tp2: Faulty, rank: int) -> None:
    worker = psutil.Process(tp2.card.workers[rank].pid)
    with SyncManager(timeout_s=DEADLINE_S, lease_s=LEASE_S, install="streaming") as sync:
        halted = Halted(sync, tp2.models[tp2.other], tp2.version + 1, "staging")
        worker.suspend()
        try:
            started_s = time.monotonic()
            with pytest.raises(WeightwireError) as caught:
                halted.go_on()
            assert time.monotonic() - started_s < 4 * DEADLINE_S
            assert caught.value.replica == tp2.card.replica
        finally:
            worker.resume()
    assert_torn_until_healed(tp2, "")
    tp2.assert_recovered()


def test_requests_in_flight_wait_while_it_streams_and_go_on_with_the_new_version(tp2: Faulty) -> None:
    assert isinstance(tp2.engine, Driver)
    with SyncManager(install="streaming", timeout_s=120) as sync:
        tp2.update(sync=sync)
        for length in (150, 400, *[800] * 38):  # a fast engine gets longer requests
            running = tp2.engine.submit([LONG, PROMPTS[1]], length)
            tp2.engine.wait_for_tokens(running, 2)
            before = tp2.stamp
            report = tp2.update(sync=sync)
            ended = tp2.engine.wait(running)
            if all(tp2.stamp in r["versions"] for r in ended):
                break  # else one had ended before it began: once more
    assert [(r["finish_reason"], len(r["tokens"])) for r in ended] == [("length", length)] * 2
    assert [sorted(set(r["versions"])) for r in ended] == [sorted({before, tp2.stamp})] * 2
    (replica,) = report.replicas
    assert (replica.install, replica.transport) == ("streaming", "stream")
    assert replica.stopped_s >= replica.install_s > 0
    tp2.assert_serves()


def test_a_paused_replica_takes_what_is_streamed_and_stays_paused(tp2: Faulty) -> None:
    assert isinstance(tp2.engine, Driver)
    with SyncManager(install="streaming", timeout_s=120) as sync:
        sync.pause()
        running = tp2.engine.submit([PROMPTS[1]], COUNT)
        tp2.update(sync=sync)
        assert tp2.card.state == "paused"
        sync.resume()
        assert {*tp2.engine.wait(running)[0]["versions"]} == {tp2.stamp}
    tp2.assert_serves()


def check_a_worker_killed_amid_the_bytes(tp2: Faulty) -> None:
    """Its engine ends, and the manager is told."""
    with SyncManager(install="streaming", timeout_s=120) as sync:
        tp2.update(sync=sync)
        halted = Halted(sync, tp2.models[tp2.other], tp2.version + 1, "staging")
        card = tp2.card
        os.kill(card.workers[1].pid, signal.SIGKILL)
        with pytest.raises(WeightwireError) as caught:
            halted.go_on()
        assert type(caught.value).__name__ in ("PeerLost", "TornReplica")
        assert caught.value.replica == card.replica
        assert_gone(card)
        assert tp2.engine.cards == [] and tp2.engine.leftovers() == []


def test_a_worker_killed_while_it_streams_takes_its_engine_down_and_the_manager_is_told(tp2: Faulty) -> None:
    """The last one for this engine."""
    check_a_worker_killed_amid_the_bytes(tp2)
