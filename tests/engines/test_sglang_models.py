"""Incomplete manifests and parts of a model on one real SGLang engine: refused when the group is opened, or right.

Memory that the installation makes starts as 0xFF.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.engines.conftest import Versions
from tests.support import checkpoints
from tests.support.greedy import greedy_batch
from tests.support.sglang_engines import SglangDriver
from tests.support.trials import COUNT, PROMPTS, UPDATES, incomplete, not_refused, too_small, whole
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KIND = "qwen3-moe-biased"
"""Experts, and biases on queries, keys, values and the attention's output."""


@functools.cache
def reference(checkpoint: Path) -> list[list[int]]:
    return greedy_batch(checkpoint, PROMPTS, COUNT)


@pytest.fixture(scope="module")
def engine(runtime: Path, versions: Versions) -> Iterator[SglangDriver]:
    with SglangDriver(runtime) as driver:
        driver.open(versions(KIND)[0])
        yield driver
    assert driver.leftovers() == [] and driver.family() == []


def tokens(engine: SglangDriver) -> Sequence[Sequence[int]]:
    return engine.tokens(PROMPTS, COUNT)


def test_a_manifest_that_lacks_anything_is_refused_when_the_group_is_opened(
    engine: SglangDriver, versions: Versions
) -> None:
    """Each tensor in turn, the end of a tensor of each kind, whole experts, layers and kinds; the engine goes on as it was."""
    model_a, model_b = versions(KIND)
    assert tokens(engine) == reference(model_a) != reference(model_b)
    tensors = checkpoints.load(model_b)
    wrong = not_refused([*incomplete(tensors), *too_small(tensors)])
    assert not wrong, f"{len(wrong)} not refused: " + "; ".join(wrong)
    assert tokens(engine) == reference(model_a)


@pytest.mark.parametrize("install", ["copy", "standby"])
def test_five_updates_in_a_row_are_right(engine: SglangDriver, versions: Versions, install: str) -> None:
    with SyncManager(install=install, timeout_s=60) as manager:  # type: ignore[arg-type]
        version = 100 + max(v or 0 for v in manager.versions().values())
        for i in range(UPDATES):
            model = versions(KIND)[(i + 1) % 2]
            manager.update(whole(model), version + i)
            assert tokens(engine) == reference(model)
