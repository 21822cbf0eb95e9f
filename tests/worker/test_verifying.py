"""What a verification does to one worker: a portion at a time, and nothing of an older version beside a newer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_plugin.wire.messages import BoxDigest
from inference_plugin.worker import engine_side
from tests.support.worker import KeepingInstaller, Worker
from tests.worker.driver import Driver, weights

BYTES = 1 << 20


class Readable(KeepingInstaller):
    """Holds 20 boxes of a MiB, and one parameter that can't be read."""

    def read_back(self) -> Iterator[BoxDigest | tuple[str, str]]:
        for i in range(20):
            yield BoxDigest("w", (i,), (BYTES // 2,), "bfloat16", i)
        yield "packed", "its layout is unknown"


@pytest.fixture
def worker(directory: Path) -> Iterator[Worker]:
    one = Worker(f"ipc://{directory}/worker", lambda _: Readable())
    yield one
    one.close()


@pytest.fixture
def trainer(worker: Worker) -> Iterator[Driver]:
    driver = Driver(worker.address)
    driver.open()
    driver.update("t1", 1, weights(1))
    worker.commit("t1", 1)
    yield driver
    driver.close()


def test_a_portion_is_a_buckets_work_and_all_of_them_are_everything(worker: Worker, trainer: Driver) -> None:
    group = worker.table.named("policy")
    group.start_reading("one")
    portions = []
    while True:
        found, left = group.read_on("one")
        portions.append(found)
        if left != "more":
            break
    assert left == "" and [len(found.boxes) for found in portions] == [8, 8, 4]
    assert [box.digest for found in portions for box in found.boxes] == list(range(20))
    assert portions[-1].unreadable == {"packed": "its layout is unknown"} and {found.version for found in portions} == {
        1
    }
    again, left = group.read_on("one")
    assert (again.boxes, left) == ((), ""), "a rank that is done waits for the others"


@pytest.mark.parametrize("event", ["commit", "undo", "tear", "open", "another verification", "stop"])
def test_whatever_may_change_the_weights_between_two_portions_ends_the_reading(
    worker: Worker, trainer: Driver, event: str
) -> None:
    group = worker.table.named("policy")
    group.start_reading("one")
    assert group.read_on("one")[1] == "more"
    if event in ("commit", "undo"):
        trainer.update("t2", 2, weights(2))
        assert group.read_on("one")[1] == "more", "nothing is installed yet"
        if event == "commit":
            worker.commit("t2", 2)
        else:
            group.check_sealed("t2", 2)
            group.undo("the test says so")
    elif event == "tear":
        worker.table.tear("policy", "", "the test says so")
    elif event == "open":
        trainer.open(install="copy")
    elif event == "stop":
        group.stop_reading("one")
    else:
        group.start_reading("two")
    found, left = group.read_on("one")
    assert (found.boxes, left) == ((), "changed")
    assert event != "another verification" or group.read_on("two")[1] == "more", "the later one goes on"


def test_an_installer_that_fails_while_it_is_read_is_begun_anew(
    worker: Worker, trainer: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = worker.table.named("policy")
    group.start_reading("one")
    with monkeypatch.context() as patch:
        patch.setattr(engine_side, "PORTION_BYTES", None)  # comparing with it fails
        with pytest.raises(TypeError):
            group.read_on("one")
    assert group.read_on("one")[1] == "changed"
