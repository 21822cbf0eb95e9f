"""Copies on all cores: every part once, in threads that the engine's own binding does not hold to one core."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from inference_plugin.install import row_copies as rows
from inference_plugin.install.plan import Placement
from inference_plugin.install.row_copies import copy_on_all_cores, row_copies
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
    copies = row_copies([whole, columns], {"w": origin}, {"p": flat})
    assert copies is not None
    copy_on_all_cores(copies)
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
    flat = torch.zeros(40 * 64, dtype=torch.bfloat16)
    assert row_copies([placed(source, dest, (40, 64))], {"w": flat}, {"p": flat.clone()}) is None


def test_placements_that_may_lie_over_each_other_are_never_copied_at_the_same_time() -> None:
    flat = torch.zeros(100, dtype=torch.bfloat16)
    parts = [placed(Region("w", 0, (60,), (1,)), Region("p", at, (60,), (1,)), (100,)) for at in (0, 40)]
    assert row_copies(parts, {"w": flat}, {"p": flat.clone()}) is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_helpers_run_on_every_core_of_the_process_though_the_caller_is_bound_to_one() -> None:
    own = os.sched_getaffinity(0)
    helpers: list[set[int]] = []
    rows._helpers.cache_clear()
    bound = threading.Event()

    def call() -> None:
        os.sched_setaffinity(0, {min(own)})
        bound.set()
        assert rows._cores() >= own
        helpers.extend(rows._helpers(2).map(lambda _: os.sched_getaffinity(0), range(2)))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert bound.is_set() and helpers == [own] * 2
    rows._helpers.cache_clear()
