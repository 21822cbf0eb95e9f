"""A worker says that it has prepared an update once its device has, on a queue beside the engine's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inference_plugin.devices import DEVICES
from inference_plugin.install.contract import Throttle
from tests.support.devices import LateDevice
from tests.support.worker import KeepingInstaller, Worker
from tests.worker.driver import Driver, weights


class Queueing(KeepingInstaller):
    """Prepares by work that it only queues."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.device = device
        self.ran = 0

    def prepare(self, segment: torch.Tensor, brake: Throttle) -> int:
        self.device.put(self._run)
        return super().prepare(segment, brake)

    def _run(self) -> None:
        self.ran += 1


@pytest.mark.parametrize("ignored", [(), ("synchronise",)])
def test_what_is_prepared_has_ended_on_the_device_when_the_update_is_sealed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, ignored: tuple[str, ...]
) -> None:
    device = LateDevice(*ignored)
    monkeypatch.setitem(DEVICES, "cuda", device)
    device.put(lambda: pytest.fail("the engine's own queue was waited for"))
    worker = Worker(f"ipc://{directory}/worker", lambda _: Queueing(device))
    trainer = Driver(worker.address)
    try:
        trainer.open()
        trainer.begin("t1", 1)
        trainer.write(weights(1))
        trainer.seal_fully("t1")
        assert isinstance(worker.installer, Queueing)
        assert worker.installer.ran == int(not ignored)
    finally:
        trainer.close()
        worker.close()
