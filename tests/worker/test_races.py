"""Managers that know nothing of each other, and an engine that commits: whatever overtakes what, each version is whole."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator

import pytest

from inference_plugin.transports.shm import ShmSender
from inference_plugin.wire.errors import VersionConflict, WeightwireError
from inference_plugin.wire.messages import Begin, Begun, CloseGroup, Done, GroupOpened, OpenGroup, Release, Sender
from tests.support.rig import eventually
from tests.support.worker import Worker
from tests.transports.cases import assert_equal_bytes
from tests.worker.driver import MANIFEST, Driver, weights

MANAGERS = 3
ROUNDS = 25


class Manager(threading.Thread):
    """Updates, and gives up, closes and opens at random. Version and bytes follow from the transaction's id."""

    def __init__(self, worker: Worker, number: int, seed: int, probe: bytes, versions: Iterator[int]) -> None:
        super().__init__(name=f"manager {number}")
        self.probe = probe
        self.driver = Driver(worker.address)
        self.random = random.Random(f"{seed} {number}")
        self.versions = versions
        self.wrong: list[BaseException] = []

    def run(self) -> None:
        for _ in range(ROUNDS):
            try:
                self._turn()
            except WeightwireError as error:
                committing = (
                    "still under way here" in error.message
                )  # the answer while another manager's version goes in
                if type(error) is WeightwireError or (isinstance(error, TimeoutError) and not committing):
                    self.wrong.append(error)  # a bug of ours, or nobody answered
            except BaseException as error:  # noqa: BLE001 -- the test raises it
                self.wrong.append(error)
        self.driver.close()

    def _turn(self) -> None:
        driver, chance = self.driver, self.random.random()
        if chance < 0.1:
            driver.ask(self.random.choice([CloseGroup("policy"), Release("policy")]), Done)
        version = next(self.versions)
        txn = str(version)
        if self.random.random() < 0.7:
            time.sleep(self.random.random() * 0.1)
        install = "copy" if chance < 0.2 else "auto"
        driver.ask(OpenGroup("policy", MANIFEST, "zmq" if chance < 0.15 else "shm", self.probe, install), GroupOpened)
        driver.begin(txn, version)
        driver.write(weights(version))
        if chance > 0.9 or (not driver.seal(txn, wait_s=0).done and chance > 0.8):
            driver.abort(txn)
        else:
            driver.seal_fully(txn)
            time.sleep(self.random.random() * 0.03)  # the engine may come to it, or may not


@pytest.mark.parametrize("seed", range(2))
def test_what_is_committed_is_one_managers_version_and_the_next_update_works(worker: Worker, seed: int) -> None:
    prober, versions = ShmSender(), itertools.count(1)
    managers = [Manager(worker, number, seed, prober.probe(), versions) for number in range(MANAGERS)]
    for manager in managers:
        manager.start()
    engine = random.Random(seed)
    committed: list[int] = []
    while any(manager.is_alive() for manager in managers):
        time.sleep(0.001)
        for status in worker.table.statuses():
            if status.state != "sealed":
                continue
            try:
                group = worker.table.named("policy")
                if group.check_sealed(status.txn, int(status.txn)) is not None:
                    continue
            except WeightwireError:
                continue  # it was overtaken
            if engine.random() < 0.2:
                group.release()
                continue
            group.install(status.txn)
            assert_equal_bytes(group.installer.installed, weights(int(status.txn)))  # type: ignore[attr-defined]
            if engine.random() < 0.2:
                group.undo("the test says so")
                continue
            assert group.finish(status.txn, 0.0).version == int(status.txn)
            committed.append(int(status.txn))
    for manager in managers:
        manager.join()
        assert manager.wrong == []
    assert committed
    last = Driver(worker.address)
    last.open()
    last.update("last", 1000, weights(1000))
    worker.commit("last", 1000)
    assert_equal_bytes(worker.installer.installed, weights(1000))
    last.ask(CloseGroup("policy"), Done)
    last.close(), prober.close()
    eventually(
        lambda: not any(thread.name.startswith("weightwire-group") for thread in threading.enumerate()),
        "the end of the groups' threads",
    )


def test_an_abort_while_the_staging_is_being_opened_leaves_nothing(worker: Worker, trainer: Driver) -> None:
    """`Begin` is decided at once and its memory is mapped later: what comes in between must find it."""
    trainer.open()
    worker.installer.gate.clear()
    trainer.begin("t1", 1)
    trainer.write(weights(1))
    assert not trainer.seal("t1", wait_s=0).done
    with worker.channel() as other:
        segment = trainer.shm.allocate(MANIFEST, frozenset(trainer.shm.owned))
        other.send(Begin("policy", "t2", 2, Sender("s"), 60.0, MANIFEST.fingerprint, segment))
        eventually(lambda: worker.status().txn in ("t2", ""), "the second transaction")
        assert trainer.abort("t2") == Done()
        try:
            assert other.receive(Begun, timeout_s=60) == Begun()
        except VersionConflict as error:
            assert "dropped" in error.message  # noqa: PT017 -- either may come first
    assert (worker.status().state, worker.status().txn) == ("idle", "")
    worker.installer.gate.set()
    trainer.update("t3", 3, weights(3))
    worker.commit("t3", 3)
    assert_equal_bytes(worker.installer.installed, weights(3))


def test_terms_that_two_managers_change_in_turn_never_mix(worker: Worker) -> None:
    """Each opens by its own terms until its update begins; what is committed went by the terms of its manager."""
    one, two = Driver(worker.address), Driver(worker.address)
    for version, driver in enumerate([one, two, one, two], start=1):
        other = two if driver is one else one
        other.channel.send(OpenGroup("policy", MANIFEST, "shm", other.shm.probe()))
        other.channel.receive(object, timeout_s=60)
        driver.open()
        driver.update(f"t{version}", version, weights(version))
        worker.commit(f"t{version}", version)
        assert_equal_bytes(worker.installer.installed, weights(version))
    one.close(), two.close()
