"""An error's text may be anything that Python puts into one: it must reach the peer, and end nobody's thread."""

from __future__ import annotations

import os

import pytest

from inference_plugin.wire import codec
from inference_plugin.wire.errors import ManifestMismatch, WeightwireError
from inference_plugin.wire.messages import Failed, GroupOpened, OpenGroup
from tests.support.worker import Worker
from tests.worker.driver import MANIFEST, Driver

NAME = os.fsdecode(b"caf\xe9")  # a file's name in another encoding


def test_a_text_that_utf_8_cannot_carry_reaches_the_peer_and_the_worker_goes_on(
    worker: Worker, trainer: Driver
) -> None:
    trainer.open()
    for error in (ManifestMismatch(f"no file {NAME}"), FileNotFoundError(2, "No such file", NAME)):
        worker.installer.fail["open"] = error
        request = OpenGroup("policy", MANIFEST, "shm", trainer.shm.probe(), "standby")
        with pytest.raises(WeightwireError, match=r"caf\\udce9"):
            trainer.channel.request(request, GroupOpened, timeout_s=60)
    assert trainer.describe() == worker.card()


def test_every_error_can_be_written_into_a_message() -> None:
    error = WeightwireError.wrap(OSError(NAME)).at(phase="open")
    answer = codec.decode(codec.encode(Failed(error.info()))).body
    assert answer == Failed(error.info()) and r"caf\udce9" in str(error)
