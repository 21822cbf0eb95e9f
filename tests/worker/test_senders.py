"""A worker knows its trainer's process by pid and start, with a pidfd and without one."""

from __future__ import annotations

import errno
import os
import time

import pytest

from inference_plugin.net import addresses
from inference_plugin.net.processes import start_ticks
from inference_plugin.wire.messages import Begin, Begun, Sender
from tests.support.rig import eventually, fork, kill
from tests.support.worker import Worker
from tests.worker.driver import MANIFEST, WAIT_S, Driver


@pytest.mark.parametrize("code", ["EPERM", "EMFILE", "ENOSYS"])
def test_without_a_pidfd_a_living_trainer_keeps_its_update_and_a_killed_one_loses_it(
    worker: Worker, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise OSError(getattr(errno, code), "the test refuses")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    pid = fork("tests.worker.test_groups:trainer_that_hangs", address=worker.address, seal=True)
    eventually(lambda: worker.table.statuses() and worker.status().state == "sealed", "a sealed update")
    looked_s = time.monotonic() + 1.2  # the worker has looked twice by then
    while time.monotonic() < looked_s:
        assert worker.status().state == "sealed"
        time.sleep(0.05)
    kill(pid)
    eventually(lambda: worker.status().state == "idle", "the end of the update, an hour before its lease ends")


def test_an_update_ends_at_once_when_its_trainers_pid_is_another_processs(worker: Worker, trainer: Driver) -> None:
    trainer.open("zmq")
    sender = Sender("session", os.getpid(), addresses.boot_id(), start_ticks() - 1)
    trainer.ask(Begin("policy", "t1", 1, sender, WAIT_S, MANIFEST.fingerprint), Begun)
    eventually(lambda: worker.status().state == "idle", "the end of the update")
    living = Sender("session", os.getpid(), addresses.boot_id(), start_ticks())
    trainer.ask(Begin("policy", "t2", 2, living, WAIT_S, MANIFEST.fingerprint), Begun)
    trainer.renew("t2")
    assert worker.status().state == "receiving"
