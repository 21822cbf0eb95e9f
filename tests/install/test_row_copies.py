"""Copies on all cores: every part once, in threads that the engine's own binding does not hold to one core."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inference_plugin.install import row_copies as rows
from inference_plugin.install.plan import Placement
from inference_plugin.install.row_copies import row_table
from inference_plugin.wire.geometry import Region


def placed(source: Region, dest: Region, shape: tuple[int, ...]) -> Placement:
    return Placement(source, dest, torch.bfloat16, shape)


@pytest.mark.parametrize("part_bytes", [64, 1000, 4 << 20])
def test_columns_into_rows_and_whole_tensors_arrive_part_by_part(
    monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(rows, "PART_BYTES", part_bytes)
    origin = torch.randn(40, 64).to(torch.bfloat16)
    flat = torch.full((40 * 16 + 40 * 64,), -7.0, dtype=torch.bfloat16)
    columns = placed(Region("w", 8, (40, 16), (64, 1)), Region("p", 0, (40, 16), (16, 1)), (40, 64))
    whole = placed(Region("w", 0, (40 * 64,), (1,)), Region("p", 40 * 16, (40 * 64,), (1,)), (40, 64))
    table = row_table([whole, columns])
    assert table is not None
    assert table.copies["row_bytes"].max() * table.copies["rows"].min() <= max(part_bytes, 128)
    table.bound({"w": origin}, {"p": flat}).copy()
    assert torch.equal(flat[: 40 * 16].view(40, 16), origin[:, 8:24])
    assert torch.equal(flat[40 * 16 :].view(40, 64), origin)


@pytest.mark.parametrize(
    ("source", "dest"),
    [
        (Region("w", 0, (40, 64), (1, 40)), Region("p", 0, (40, 64), (64, 1))),
        (Region("w", 0, (40, 64), (0, 1)), Region("p", 0, (40, 64), (1, 40))),
        (Region("w", 0, (2, 3, 4), (64, 8, 1)), Region("p", 0, (2, 3, 4), (100, 10, 1))),
        (Region("w", 0, (4, 6), (0, 1)), Region("p", 0, (4, 6), (6, 1))),
    ],
    ids=["transposed", "columns", "three dimensions", "one row many times"],
)
def test_what_are_no_rows_is_left_to_torch(source: Region, dest: Region) -> None:
    assert row_table([placed(source, dest, (40, 64))]) is None


def test_placements_that_may_lie_over_each_other_are_never_copied_at_the_same_time() -> None:
    parts = [placed(Region("w", 0, (60,), (1,)), Region("p", at, (60,), (1,)), (100,)) for at in (0, 40)]
    assert row_table(parts) is None


@pytest.mark.parametrize("step_bytes", [1, 3000, 10_000, 1 << 20])
def test_steps_hold_every_copy_once_in_order_and_about_as_many_bytes_as_asked(step_bytes: int) -> None:
    numbers = [3, 1000, 17, 999, 4000, 1, 1]
    starts = [sum(numbers[:i]) for i in range(len(numbers))]
    placements = [
        placed(Region(f"w{i % 2}", 5 * i, (n,), (1,)), Region("p", at, (n,), (1,)), (5000,))
        for i, (at, n) in enumerate(zip(starts, numbers, strict=True))
    ]
    origins = {f"w{i}": torch.randn(5000).to(torch.bfloat16) for i in range(2)}
    flat = torch.zeros(sum(numbers), dtype=torch.bfloat16)
    table = row_table(placements)
    assert table is not None
    bound = table.bound(origins, {"p": flat})
    steps = bound.steps(step_bytes)
    assert [copy.tolist() for step in steps for copy in step.copies] == [copy.tolist() for copy in bound.copies]
    assert sum(step.nbytes for step in steps) == bound.nbytes == flat.nbytes
    assert all(step.nbytes < step_bytes + 2 * max(numbers) for step in steps)
    for step in steps:
        step.copy()
    wanted = [origins[f"w{i % 2}"][5 * i : 5 * i + n] for i, n in enumerate(numbers)]
    assert torch.equal(flat, torch.cat(wanted))


@pytest.fixture
def two_helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also on one core."""
    own = os.sched_getaffinity(0)
    monkeypatch.setattr(rows, "PART_BYTES", 100)
    monkeypatch.setattr(rows, "usable_cores", lambda: frozenset(own) | {max(own) + 1 if len(own) == 1 else min(own)})
    rows.helper_pool.cache_clear()
    yield
    rows.helper_pool.cache_clear()


def two_parts() -> tuple[rows.BoundRows, torch.Tensor]:
    """A table of two copies, and its target."""
    flat = torch.zeros(200, dtype=torch.uint8)
    whole = Placement(Region("w", 0, (200,), (1,)), Region("p", 0, (200,), (1,)), torch.uint8, (200,))
    table = row_table([whole])
    assert table is not None
    return table.bound({"w": torch.ones(200, dtype=torch.uint8)}, {"p": flat}), flat


@pytest.mark.usefixtures("two_helpers")
def test_nothing_is_written_any_more_once_a_copy_is_said_to_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, flat = two_parts()
    begun, copy_share = threading.Event(), rows.copy_share

    def copy(share: rows.BoundRows) -> float:
        if share.copies["target_start"][0] == 0:
            assert begun.wait(600)
            raise MemoryError("no memory for the table")
        begun.set()
        time.sleep(0.2)
        return copy_share(share)

    monkeypatch.setattr(rows, "copy_share", copy)
    with pytest.raises(MemoryError, match="no memory for the table"):
        bound.copy()
    flat.zero_()  # the way back
    time.sleep(0.4)
    assert not flat.any()


@pytest.mark.usefixtures("two_helpers")
@pytest.mark.parametrize("started", [0, 1])
def test_where_the_system_starts_no_more_threads_one_thread_copies_all(
    monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    """A failure then would leave a part written, and another one queued that is written later."""
    start, begun = threading.Thread.start, [0]

    def start_no_more(self: threading.Thread) -> None:
        begun[0] += 1
        if begun[0] > started:
            raise RuntimeError("can't start new thread")
        start(self)

    bound, flat = two_parts()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_no_more)
        bound.copy()
    assert bool((flat == 1).all()) and begun[0] == started + 1
    flat.zero_()
    bound.copy()
    assert bool((flat == 1).all())


@pytest.mark.usefixtures("two_helpers")
def test_a_fork_copies_with_threads_of_its_own() -> None:
    """It has none of its parent's, and would wait for them for ever."""
    bound, flat = two_parts()
    bound.copy()
    flat.zero_()
    if (child := os.fork()) == 0:
        signal.alarm(20)
        bound.copy()
        os._exit(int(not (flat == 1).all()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_helpers_work_counts_as_work_of_the_thread_that_they_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the throttle would let a copy on all cores take more of the time than its share."""
    monkeypatch.setattr(rows, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(
        rows, "usable_cores", lambda: frozenset(os.sched_getaffinity(0)) | {-1}
    )  # two threads, also on one core
    monkeypatch.setattr(rows, "helper_pool", lambda threads: ThreadPoolExecutor(threads))
    origin, flat = torch.ones(32 << 20, dtype=torch.uint8), torch.zeros(32 << 20, dtype=torch.uint8)
    whole = Placement(Region("w", 0, (32 << 20,), (1,)), Region("p", 0, (32 << 20,), (1,)), torch.uint8, (32 << 20,))
    table, before_s = row_table([whole]), rows.helped_s()
    assert table is not None
    table.bound({"w": origin}, {"p": flat}).copy()
    assert rows.helped_s() > before_s and torch.equal(flat, origin)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_helpers_run_on_every_core_of_the_process_though_the_caller_is_bound_to_one() -> None:
    own = os.sched_getaffinity(0)
    helpers: list[set[int]] = []
    rows.helper_pool.cache_clear()
    bound = threading.Event()

    def call() -> None:
        os.sched_setaffinity(0, {min(own)})
        bound.set()
        assert rows.usable_cores() >= own
        helpers.extend(rows.helper_pool(2).map(lambda _: os.sched_getaffinity(0), range(2)))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert bound.is_set() and helpers == [own] * 2
    rows.helper_pool.cache_clear()
