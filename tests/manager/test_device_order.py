"""A trainer whose tensors lie in device memory: what engines get is what its step made, whichever thread reads it.

The device is `LateDevice`, which does nothing before somebody waits for it. Each test is run once more on one that leaves a wait
out, and then finds other bytes: so the test would notice if we left it out.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from inference_plugin.devices import DEVICES
from inference_plugin.transports.pieces import pieces_of
from inference_plugin.wire.config import PIECE_BYTES
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.tensors import bytes_view
from tests.manager.conftest import Start
from tests.support.devices import DeviceTensor, LateDevice
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected, manifest_of
from tests.support.rig import Rig
from trainer_adapters import LocalSlice


def late(monkeypatch: pytest.MonkeyPatch, *ignores: str) -> LateDevice:
    device = LateDevice(*ignores)
    monkeypatch.setitem(DEVICES, "cuda", device)
    return device


class Trained(ShardSource):
    """The plain engine's checkpoint in device memory. A `step` queues, on the calling thread's queue, that it becomes another
    checkpoint."""

    def __init__(self, device: LateDevice, seed: int) -> None:
        super().__init__({name: device.tensor(tensor) for name, tensor in checkpoint(seed).items()})
        self.device = device

    def step(self, seed: int) -> None:
        for name, tensor in checkpoint(seed).items():
            self.device.copy(self.tensors[name], tensor)


class Gathered(Trained):
    """Makes its slices together with other ranks: by work that it queues for each."""

    def made_together(self) -> frozenset[int]:
        return frozenset(range(len(self.tensors)))

    def slices(self) -> Iterator[LocalSlice]:
        for item in super().slices():
            yield LocalSlice(item.box, item.tensor.clone())


def holds(rig: Rig, seed: int) -> bool:
    return rig.peek() == digests_expected(checkpoint(seed, rig.layers), rig.tp, rig.layers)


class Offloaded(Trained):
    """Keeps its weights in page-locked memory of the host, where each step queues their copies from the device."""

    def __init__(self, device: LateDevice, seed: int) -> None:
        super().__init__(device, seed)
        self.tensors = checkpoint(seed)


class Merged(Offloaded):
    """Computes its slices from that memory, as adapters that merge LoRA into the weights do."""

    def slices(self) -> Iterator[LocalSlice]:
        for item in super().slices():
            yield LocalSlice(item.box, item.tensor.clone())


class PageLocking(LateDevice):
    """Says of all memory of the host that it is page-locked."""

    def is_page_locked(self, memory: torch.Tensor) -> bool:
        return True


@pytest.mark.parametrize(
    ("transport", "ignored"),
    [("zone", ()), ("shm", ()), ("zmq", ()), ("delta", ()), ("stream", ()), ("shm", ("synchronise",))],
)
@pytest.mark.parametrize("kind", [Offloaded, Merged])
def test_weights_that_a_step_copies_to_the_host_are_read_once_they_have_arrived(
    start: Start, monkeypatch: pytest.MonkeyPatch, kind: type[Offloaded], transport: str, ignored: tuple[str, ...]
) -> None:
    rig = start()
    device = PageLocking(*ignored)
    monkeypatch.setitem(DEVICES, "cuda", device)
    source = kind(device, 1)
    install = "streaming" if transport == "stream" else "standby"
    with SyncManager(timeout_s=60, transport=transport, install=install) as manager:
        source.step(2)
        manager.update(source, 1)
        assert holds(rig, 2) is not bool(ignored)


@pytest.mark.parametrize("transport", ["zone", "shm", "zmq", "delta", "nixl", "stream"])
@pytest.mark.parametrize("kind", [Trained, Gathered])
def test_engines_get_what_the_step_made_that_the_caller_had_only_queued(
    start: Start, monkeypatch: pytest.MonkeyPatch, kind: type[Trained], transport: str
) -> None:
    rig = start()
    source = kind(late(monkeypatch), 1)
    install = "streaming" if transport == "stream" else "standby"
    with SyncManager(timeout_s=60, transport=transport, install=install) as manager:
        source.step(2)
        manager.update(source, 1)
        assert holds(rig, 2)
        source.step(3)
        manager.update(source, 2)
        assert holds(rig, 3)
        source.step(4)
        assert manager.verify(source).ok is False


@pytest.mark.parametrize("kind", [Trained, Gathered])
def test_without_the_wait_for_the_step_they_would_get_the_weights_before_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, kind: type[Trained]
) -> None:
    rig = start()
    source = kind(late(monkeypatch, "wait"), 1)
    with SyncManager(timeout_s=60, check_finite=False) as manager:
        source.step(2)
        manager.update(source, 1)
        assert not holds(rig, 2)


@pytest.mark.parametrize("kind", [Trained, Gathered])
def test_a_step_that_is_queued_after_the_weights_were_released_changes_nothing_that_is_sent(
    start: Start, monkeypatch: pytest.MonkeyPatch, kind: type[Trained]
) -> None:
    rig = start()
    device = late(monkeypatch)
    source = kind(device, 1)
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2, 3):
            source.step(10 + version)
            pending = manager.update_async(source, version)
            pending.wait_released()
            source.step(20 + version)
            device.drain(torch.device("cuda", 0))
            pending.result()
            assert holds(rig, 10 + version)


class Contributing(Trained):
    """Queues, at the end of its slices, that another rank is given this rank's part: `given` holds it."""

    def __init__(self, device: LateDevice, seed: int) -> None:
        super().__init__(device, seed)
        self.given = {name: device.host_memory(tensor.nbytes) for name, tensor in self.tensors.items()}

    def slices(self) -> Iterator[LocalSlice]:
        yield from super().slices()
        for name, tensor in self.tensors.items():
            self.device.copy(self.given[name].view(tensor.dtype).view(tensor.shape), tensor)


@pytest.mark.parametrize("ignored", [(), ("synchronise",)])
def test_the_weights_are_released_once_other_ranks_have_what_they_get_of_them(
    start: Start, monkeypatch: pytest.MonkeyPatch, ignored: tuple[str, ...]
) -> None:
    start()
    device = late(monkeypatch, *ignored)
    source = Contributing(device, 1)
    with SyncManager(timeout_s=60) as manager:
        pending = manager.update_async(source, 1)
        pending.wait_released()
        for name in source.tensors:  # the next step, on a queue that runs ahead of all others
            source.tensors[name].held.zero_()
        pending.result()
        device.drain(torch.device("cuda", 0))
    sent = checkpoint(1)
    arrived = all(
        torch.equal(bytes_view(sent[name].contiguous()).view(-1), given) for name, given in source.given.items()
    )
    assert arrived is not bool(ignored)


def read(tensor: DeviceTensor, dtype: str) -> torch.Tensor:
    """The bytes of a tensor as a transport sees them, piece by piece, each copied at once."""
    manifest = manifest_of({"weight": torch.empty(tensor.shape, dtype=getattr(torch, dtype), device="meta")})
    item = LocalSlice(Box(0, (0,) * tensor.dim(), tuple(tensor.shape)), tensor)
    return torch.cat([torch.from_numpy(data.copy()) for _, data in pieces_of(manifest, item)])


@pytest.mark.parametrize("ignored", [(), ("finish",)])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3 * PIECE_BYTES // 4 + 5,), "float32"),
        ((1100, 2048), "bfloat16"),
        ((1, 7), "bfloat16"),
        ((), "float32"),
        ((5 * PIECE_BYTES // 2,), "bfloat16"),
    ],
)
def test_each_piece_is_given_once_it_has_arrived_and_until_the_next_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: str, ignored: tuple[str, ...]
) -> None:
    device = late(monkeypatch, *ignored)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wanted = bytes_view(values.to(getattr(torch, dtype)).contiguous())
    assert torch.equal(read(device.tensor(values), dtype), wanted.view(-1)) is not bool(ignored)


def test_a_transposed_tensor_on_a_device_is_sent_in_c_order(monkeypatch: pytest.MonkeyPatch) -> None:
    device = late(monkeypatch)
    values = torch.randn(2048, 1100, generator=torch.Generator().manual_seed(2))
    transposed = device.tensor(values).transpose(0, 1)
    assert torch.equal(read(transposed, "float32"), bytes_view(values.T.contiguous()).view(-1))  # type: ignore[arg-type]


def test_nothing_is_left_under_way_on_the_device_after_an_update(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    device = late(monkeypatch)
    source = Gathered(device, 1)
    with SyncManager(timeout_s=60) as manager:
        source.step(2)
        manager.update(source, 1)
        assert device.unfinished == 0


def test_what_reads_no_weights_does_not_wait_for_the_step(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    device = late(monkeypatch)
    source = Trained(device, 1)
    with SyncManager(timeout_s=60) as manager:
        manager.update(source, 1)
        source.step(2)
        manager.pause()
        manager.resume()
        manager.close_group()
        assert device.unfinished == len(source.tensors)
