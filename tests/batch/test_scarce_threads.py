"""A process that may start no more threads: a store, pool or worker that can't be made is a typed error and leaves nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inference_plugin.wire.closing import Closing
from inference_plugin.wire.errors import TransportUnavailable
from tests.batch.rollout_support import BUDGET, generate
from tests.support.rig import eventually, runtime
from tests.support.scarce_threads import Starts
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.rollouts.worker import RolloutWorker
from trainer_adapters.batch.store import Store


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


@pytest.mark.parametrize("kind", ["store", "pool", "worker"])
def test_what_can_t_start_its_threads_is_a_typed_error_and_leaves_nothing(
    kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread after the other of those that it starts."""
    with Store(budget_bytes=BUDGET) as store:
        makers: dict[str, Callable[[], Closing]] = {
            "store": lambda: Store(budget_bytes=BUDGET),
            "pool": RolloutPool,
            "worker": lambda: RolloutWorker(generate, slots=1, store=store),
        }
        make = makers[kind]
        make().close()  # the threads that a process keeps are there
        threads = threading.active_count()
        starts = Starts(monkeypatch)
        make().close()
        count = len(starts.names)
        assert count >= 4
        gc.collect()
        before, files = len(list(Path("/proc/self/fd").iterdir())), sorted(directory.rglob("*"))
        for lacks in range(1, count + 1):
            starts.but(lacks)
            with pytest.raises(TransportUnavailable, match="no thread can be started"):
                make()
            gc.collect()
            eventually(lambda: threading.active_count() <= threads, "the end of its threads")
            eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before, "the end of its sockets")
            assert sorted(directory.rglob("*")) == files
        starts.but(0)
        make().close()
