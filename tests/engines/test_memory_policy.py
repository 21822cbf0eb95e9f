"""Memory that does not suffice, on real engines of two ranks: an update is refused with both numbers before anything is taken,
the old version is served, and the next update finds what it needs. And a report says of memory what the processes hold.

What a process may take is limited by the system (`RLIMIT_AS`), what all ranks take together by a control group, as a container
does. The model is of 80 MiB, 40 MiB for each rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from inference_plugin.wire.errors import EngineUnsupported, TransportUnavailable
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_faults import Faulty, all_idle
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, source
from tests.support import poison
from tests.support.engines import Driver, eventually, segments_of
from tests.support.managers import SyncManager
from tests.support.memory import held_bytes, in_a_control_group
from tests.support.sglang_engines import SglangDriver

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MIB = 1 << 20
BUCKET_BYTES = 4 * MIB
FREED_S = 1.0
"""What an update replaced is freed beside the engine: no process holds less after this time, or it is looked at again."""
TRIAL = re.compile(r"a trial of the engine's loader takes (\d+) MiB, and (\d+) MiB are free for this rank")
SECOND_SET = re.compile(r"a second set of (\d+) MiB does not fit: (\d+) MiB are free for this rank")
TOGETHER = re.compile(
    r"second sets of (\d+) MiB and a segment of (\d+) MiB do not fit: (\d+) MiB are free on this host"
)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def tp2_engine(runtime: Path, checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Iterator[Faulty]:
    model_a, model_b = (checkpoint("qwen3_large", tied=True, seed=seed) for seed in (1, 2))
    plain = {poison.VARIABLE: "0"}  # what is written to fresh memory would count
    with SglangDriver(runtime, tp=2, **plain) if request.param == "sglang" else Driver(runtime, **plain) as driver:
        if isinstance(driver, SglangDriver):
            driver.open(model_a)
        else:
            driver.open(model_a, plain=True, tensor_parallel_size=2, max_model_len=1024)
        yield Faulty(driver, runtime / f"no-faults-{request.param}", model_a, model_b)
    assert driver.leftovers() == []


@pytest.fixture
def tp2(tp2_engine: Faulty) -> Faulty:
    tp2_engine.settle()
    with SyncManager(install="copy", timeout_s=60) as sync:
        tp2_engine.update(sync=sync)  # no second set is left
    return tp2_engine


def nbytes_of(tp2: Faulty) -> int:
    return source(tp2.models["A"]).manifest().nbytes


def workers(tp2: Faulty) -> list[int]:
    return [worker.pid for worker in tp2.card.workers]


@contextlib.contextmanager
def limited(pids: Sequence[int], left_bytes: int) -> Iterator[None]:
    """Each of these processes may take `left_bytes` more of addresses."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_AS) for pid in pids}
    try:
        for pid, (_, hard) in before.items():
            size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(pid, resource.RLIMIT_AS, (size + left_bytes, hard))
        yield
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, resource.RLIMIT_AS, limits)


BOUNDS = {"addresses": limited, "control-group": in_a_control_group}


def held_segments(tp2: Faulty) -> list[list[int]]:
    return [segments_of(process) for process in tp2.engine.family()]


def refused(
    tp2: Faulty,
    sync: SyncManager,
    words: re.Pattern[str],
    pids: Sequence[int],
    left_bytes: int,
    bound: str = "addresses",
) -> list[int]:
    """An update while these processes are limited, which is refused before it takes anything; then the version that was served
    before, and an update without the limit. The numbers of MiB in the refusal's text."""
    held, weights = held_segments(tp2), source(tp2.models[tp2.other])
    with BOUNDS[bound](pids, left_bytes):
        with pytest.raises((EngineUnsupported, TransportUnavailable)) as raised:
            sync.update(weights, tp2.version + 1)
        assert held_segments(tp2) == held
        tp2.assert_serves()
    found = words.search(str(raised.value))
    assert found, raised.value
    tp2.update(sync=sync)
    tp2.assert_serves()
    return [int(number) for number in found.groups()]


def test_a_plan_whose_trial_does_not_fit_is_refused_before_the_trial(tp2_engine: Faulty) -> None:
    """The first one for this engine: from then on the plan is proven."""
    nbytes = nbytes_of(tp2_engine)
    with SyncManager(timeout_s=60) as sync:
        wanted, free = refused(tp2_engine, sync, TRIAL, workers(tp2_engine), nbytes)
    assert nbytes // 2 < wanted * MIB <= nbytes * 3 // 2, "the embedding's tensor, and a rank's half of it"
    assert nbytes // 4 < free * MIB <= nbytes // 2, "each of two ranks of a host counts on half of what is free"


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_second_set_that_does_not_fit_is_refused_before_anything_is_taken(tp2: Faulty, bound: str) -> None:
    shard = nbytes_of(tp2) // 2
    with SyncManager(install="standby", timeout_s=60) as sync:
        wanted, free = refused(tp2, sync, SECOND_SET, workers(tp2), shard, bound)
    assert wanted in (shard // MIB, shard // MIB + 1) and shard // 4 < free * MIB <= shard // 2


@pytest.mark.parametrize("bound", BOUNDS)
def test_auto_takes_copy_where_a_second_set_does_not_fit_and_says_both_numbers(tp2: Faulty, bound: str) -> None:
    with SyncManager(timeout_s=60) as sync:
        with BOUNDS[bound](workers(tp2), 2 * nbytes_of(tp2) - 4 * MIB):
            (replica,) = tp2.update(sync=sync).replicas
            tp2.assert_serves()
        assert replica.install == "copy"
        assert re.search(r"\d+ MiB are free for this rank, too few for a second set of 4[01] MiB", replica.why), (
            replica.why
        )
    tp2.update()
    tp2.assert_serves()


def test_an_update_needs_no_more_memory_than_it_makes_anew(tp2: Faulty) -> None:
    """What an engine computes with as the checkpoint has it lies in zones, which are there. What it makes something else of
    (vLLM's tied head) is made anew by each update."""
    with SyncManager(install="standby", timeout_s=60) as sync:
        for _ in range(2):
            (replica,) = tp2.update(sync=sync).replicas
        if replica.derived:
            refused(tp2, sync, SECOND_SET, workers(tp2), 24 * MIB)
        else:
            with limited(workers(tp2), 24 * MIB):
                tp2.update(sync=sync)
                tp2.assert_serves()


def test_a_segment_that_does_not_fit_beside_second_sets_is_refused_by_the_trainer(tp2: Faulty) -> None:
    nbytes = nbytes_of(tp2)
    with SyncManager(transport="shm", install="standby", timeout_s=60) as sync:
        sets, segment, free = refused(tp2, sync, TOGETHER, [os.getpid()], nbytes * 3 // 2)
    assert segment == nbytes // MIB <= sets <= segment + 2
    assert nbytes < free * MIB <= nbytes * 3 // 2, "enough for either"


def test_two_replicas_of_a_host_count_its_memory_once(tp2: Faulty, runtime: Path) -> None:
    """The other has one rank, so its second set is the whole model."""
    nbytes, weights = nbytes_of(tp2), [source(tp2.models[which]) for which in "AB"]
    with beside(tp2, runtime) as other, SyncManager(transport="shm", install="copy", timeout_s=120) as sync:
        tp2.version += 1
        assert sync.update(weights[1], tp2.version).failed == ()  # both have proven their plans
        sync.close()
        with SyncManager(transport="shm", install="standby", timeout_s=120) as manager:
            ranks = [worker.pid for card in tp2.engine.cards for worker in card.workers]
            with limited(ranks, nbytes * 3 // 2), pytest.raises(EngineUnsupported, match=SECOND_SET.pattern):
                manager.update(weights[0], tp2.version + 1)  # enough for each of them alone
            with limited([os.getpid()], nbytes * 5 // 2), pytest.raises(TransportUnavailable) as raised:
                manager.update(weights[0], tp2.version + 2)  # enough for both second sets, or for the segment
            found = TOGETHER.search(str(raised.value))
            assert found, raised.value
            sets, segment, free = (int(number) * MIB for number in found.groups())
            assert 2 * nbytes - MIB < sets <= 2 * nbytes + 4 * MIB and segment <= nbytes < free <= nbytes * 5 // 2
            for engine in (tp2.engine, other):
                assert isinstance(engine, Driver) and engine.tokens(PROMPTS, COUNT) == reference(tp2.models["B"])
            tp2.version += 3
            assert manager.update(weights[0], tp2.version).failed == ()
            for engine in (tp2.engine, other):
                assert isinstance(engine, Driver) and engine.tokens(PROMPTS, COUNT) == reference(tp2.models["A"])
    tp2.serves = "A"
    tp2.assert_serves()


@contextlib.contextmanager
def beside(tp2: Faulty, runtime: Path) -> Iterator[Driver]:
    """A second replica of the same engine, of one rank."""
    options = {"job": tp2.engine.job, poison.VARIABLE: "0"}
    if isinstance(tp2.engine, SglangDriver):
        with SglangDriver(runtime, **options) as driver:
            driver.open(tp2.models["A"])
            yield driver
    else:
        with Driver(runtime, in_process=True, **options) as driver:
            driver.open(tp2.models["A"], plain=True)
            yield driver


# --- what a report says -----------------------------------------------------------------------------------------------------


def settled(tp2: Faulty, pids: Sequence[int]) -> int:
    """What the processes hold when the engine is idle and no longer frees anything."""
    eventually(lambda: all_idle(tp2.card))
    held = held_bytes(pids)
    while True:
        time.sleep(FREED_S)
        before, held = held, held_bytes(pids)
        if abs(before - held) < MIB:
            return held


@pytest.mark.parametrize(
    ("transport", "install", "buckets"),
    [
        ("zone", "standby", 0),
        ("shm", "standby", 0),
        ("shm", "copy", 0),
        ("zmq", "standby", 2),
        ("zmq", "copy", 2),
        ("delta", "standby", 2),
        ("auto", "streaming", 0),
    ],
)
def test_what_a_report_says_of_memory_is_what_the_processes_hold(
    tp2: Faulty, transport: str, install: str, buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 3 MiB for each process, and for each rank `buckets`, which malloc keeps: of this update, or of one before the test."""
    monkeypatch.setenv("WEIGHTWIRE_BUCKET_BYTES", str(BUCKET_BYTES))
    pids = [os.getpid(), *workers(tp2)]
    tp2.update()  # what both versions take in this process is there
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # an earlier test's buckets, which malloc kept in this process
    before = settled(tp2, pids)
    with SyncManager(transport=transport, install=install, timeout_s=60) as sync:
        for _ in range(4):
            report = tp2.update(sync=sync)
        held = settled(tp2, pids) - before
    said = sum(report.memory.values())
    print(f"{transport}/{install}: {report.memory}, {held} bytes held")
    assert abs(held - said) <= len(pids) * 3 * MIB + 2 * buckets * BUCKET_BYTES
    (replica,) = report.replicas
    assert set(report.memory) == {"trainer", f"{replica.transport}/{install}"}
