from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.manager.trainer import Trainer
from tests.support import poison
from tests.support.rig import Rig, runtime

Start = Callable[..., Rig]


@pytest.fixture(scope="module", autouse=True)
def poisoned() -> Iterator[None]:
    """The trainer's side of it: segments that start as 0xFF."""
    undo = poison.spread()
    yield
    undo()


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    """Starts replicas, with the options of `Rig`; they end with the test."""
    rigs: list[Rig] = []

    def begin(**options: Any) -> Rig:
        rigs.append(Rig(directory, **options))
        return rigs[-1]

    yield begin
    for rig in rigs:
        rig.end()


@pytest.fixture
def trainer(directory: Path) -> Iterator[Callable[..., Trainer]]:
    """Starts trainers, with the arguments of `Trainer`; they end with the test."""
    started: list[Trainer] = []

    def begin(world: int, steps: list[dict[str, Any]], **options: Any) -> Trainer:
        started.append(Trainer(directory, world, steps, **options))
        return started[-1]

    yield begin
    for ranks in started:
        ranks.end()
