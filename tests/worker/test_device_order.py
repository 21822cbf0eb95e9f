"""A worker says that it has prepared an update once its device has, on a queue beside the engine's own."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from inference_plugin.devices import DEVICES, in_use
from inference_plugin.engines.rank_runtime import RankIdentity, RankRuntime
from inference_plugin.install.contract import Throttle
from inference_plugin.net import addresses
from inference_plugin.transports.backends import BACKENDS
from inference_plugin.transports.base import Delivery, Target
from inference_plugin.transports.registry import transport_named
from inference_plugin.transports.topology import SENDER
from inference_plugin.wire.config import Config
from tests.support.devices import LateDevice
from tests.support.plain_engine import PlainEngineModel, manifest_of
from tests.support.worker import KeepingInstaller, Worker
from tests.transports.cases import any_bits, whole_slices
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


class Several(LateDevice):
    """Eight devices. As with CUDA, each thread begins with the first."""

    def __init__(self) -> None:
        super().__init__()
        self._current = threading.local()

    def current(self) -> int:
        return getattr(self._current, "index", 0)

    def use(self, index: int | None) -> None:
        self._current.index = self.current() if index is None else index

    def new_queue(self) -> Any:
        return self.current(), super().new_queue()

    def enter(self, queue: Any) -> None:
        index, own = queue
        self.use(index)
        super().enter(own)


class Asking(KeepingInstaller):
    """Notes on which device each step is done."""

    def __init__(self, device: Several) -> None:
        super().__init__()
        self.device = device
        self.on: list[int] = []

    def _note(self, name: str) -> None:
        super()._note(name)
        self.on.append(self.device.current())


def test_a_worker_works_on_the_device_of_its_model_whichever_is_the_current_one_of_who_made_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Several()
    monkeypatch.setitem(DEVICES, "cuda", device)
    model, installer = PlainEngineModel(2, 0, 1), Asking(device)
    monkeypatch.setattr(model, "device", torch.device("cuda", 5))
    monkeypatch.setattr(model, "installer", lambda group: installer)
    device.use(3)
    runtime = RankRuntime(RankIdentity(addresses.new_replica_id("test"), 0, tp_rank=0), model)
    assert device.current() == 3
    trainer = Driver(runtime.card().address)
    try:
        trainer.open()
        trainer.begin("t1", 1)
        trainer.write(weights(1))
        trainer.seal_fully("t1")
        assert installer.calls == ["open", "prepare"] and installer.on == [5, 5]
    finally:
        trainer.close()
        runtime.close()


class Noting(dist.ProcessGroupGloo):
    """Notes on which queue of the device each rank broadcasts: NCCL waits there before, and the bytes are copied there after."""

    on: ClassVar[list[tuple[int, object]]] = []

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        Noting.on.append((self.rank(), in_use().current_queue()))
        return super().broadcast(tensors, options)  # type: ignore[misc]  # torch leaves it out of its stubs


def test_what_collectives_bring_comes_on_a_queue_beside_the_engines_own(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice()
    monkeypatch.setitem(DEVICES, "cuda", device)
    monkeypatch.setitem(BACKENDS, "gloo", dataclasses.replace(BACKENDS["gloo"], module=__name__, group_class="Noting"))
    monkeypatch.setattr(Noting, "on", [])
    tensors = {"a": any_bits(torch.uint8, 5000), "b": any_bits(torch.float32, 3, 5)}
    manifest, here = manifest_of(tensors), addresses.boot_id()
    target = Target("r", 0, "ipc:///nowhere", os.getpid(), here, tuple(map(manifest.whole, range(2))))
    sender, receiver = transport_named("collective").sender(), transport_named("collective").receiver()
    sender.config = Config(collective_backend="gloo")
    sender.meet([target], 1, 60.0, "auto")
    description = sender.allocate(manifest, frozenset())
    beside = device.new_queue()
    device.enter(beside)  # as the thread that does the group's work
    staging = receiver.open(manifest, description, target.needs)
    slices = whole_slices(tensors)
    delivery = Delivery("t", "policy", 0, manifest, description, slices, [target], time.monotonic() + 60)
    pieces, _ = sender.write(delivery)
    assert staging.check(manifest, pieces, lambda: None) == manifest.nbytes
    assert {queue for rank, queue in Noting.on if rank != SENDER} == {beside}
    staging.close()
    receiver.close()
    sender.close()
