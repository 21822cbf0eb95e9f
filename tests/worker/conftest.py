from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rig import runtime
from tests.support.worker import Worker
from tests.worker.driver import Driver


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


@pytest.fixture
def worker(directory: Path) -> Iterator[Worker]:
    one = Worker(f"ipc://{directory}/worker")
    yield one
    one.close()


@pytest.fixture
def trainer(worker: Worker) -> Iterator[Driver]:
    driver = Driver(worker.address)
    yield driver
    driver.close()
