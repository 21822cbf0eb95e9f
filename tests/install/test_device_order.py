"""Installing into a device's memory: no step reads half of a version, and no buffer is written before what reads it has ended.

The device is `LateDevice`; each wait is left out once, to show that the test finds out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inference_plugin.devices import DEVICES
from inference_plugin.install import replay
from inference_plugin.install import staged as staged_installer
from inference_plugin.install.contract import EngineModel
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.install.negotiation import agree
from inference_plugin.install.plan import Placement
from inference_plugin.install.policies import WayBack
from inference_plugin.install.replay import Copies, Replay
from inference_plugin.install.staged import StagedInstaller
from inference_plugin.install.trial_load import loaded, poison
from inference_plugin.install.upload import LARGE_BYTES, Upload
from inference_plugin.install.zones import ZoneCopyInstaller, zone_installer, zone_layout
from inference_plugin.wire.errors import CommitFailed
from inference_plugin.wire.geometry import Region
from inference_plugin.wire.manifest import DTYPE_BYTES, Manifest
from inference_plugin.wire.tensors import bytes_view, torch_dtype
from inference_plugin.wire.zone import ZoneLayout
from tests.install.installing import segment_of
from tests.install.test_added_parameters import Engine, cold, weights
from tests.support.devices import DeviceTensor, LateDevice, foreach_copy_of_a_gpu
from tests.support.plain_engine import TIED, PlainEngineModel, checkpoint, digests_expected, live_digests, manifest_of
from tests.transports.cases import any_bits

NOWHERE = torch.device("cuda", 0)


def held(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.held for tensor in tensors if isinstance(tensor, DeviceTensor)]


def batches(count: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(7 + i, 5, generator=generator), torch.randn(3, generator=generator).to(torch.bfloat16)]
        for i in range(count)
    ]


@pytest.mark.parametrize("ignored", [(), ("finish",)])
def test_a_buffer_is_packed_anew_once_the_device_has_read_it(ignored: tuple[str, ...]) -> None:
    device = LateDevice(*ignored)
    sent = batches(5)
    upload = Upload(device, max(sum(map(Upload.room, batch)) for batch in sent))
    targets = [[device.tensor(torch.zeros_like(each)) for each in batch] for batch in sent]
    with torch.inference_mode():
        for batch, places in zip(sent, targets, strict=True):
            upload.copy(places, [tensor.clone() for tensor in batch])
    device.drain(NOWHERE)
    arrived = all(
        torch.equal(here, there)
        for batch, places in zip(sent, targets, strict=True)
        for here, there in zip(batch, held(list(places)), strict=True)
    )
    assert arrived is not bool(ignored)


class PageLocked(LateDevice):
    """Reads all of the host's memory at full speed."""

    def is_page_locked(self, memory: torch.Tensor) -> bool:
        return True


def test_what_is_page_locked_is_read_where_it_lies() -> None:
    device = PageLocked()
    large = torch.randn(3, LARGE_BYTES // 4, generator=torch.Generator().manual_seed(1))
    sources = [large, large[:, ::2], large[0, :5], large.to(torch.bfloat16)]
    targets = [device.tensor(torch.zeros(source.shape, dtype=source.dtype)) for source in sources]
    upload = Upload(device, sum(map(Upload.room, sources)))
    with torch.inference_mode():
        upload.copy(targets, sources)
        late = large.clone()
        large[0, 0] = 7  # only what is large, contiguous and of one dtype is read later
        device.drain(NOWHERE)
    assert torch.equal(targets[0].held, large) and not torch.equal(targets[0].held, late)
    assert torch.equal(targets[1].held, late[:, ::2]) and torch.equal(targets[2].held, late[0, :5])
    assert torch.equal(targets[3].held, late.to(torch.bfloat16))


@pytest.mark.parametrize("step_bytes", [64, 1000, 16 << 20])
def test_rows_columns_and_whole_tensors_of_the_host_arrive_in_a_devices_memory(
    monkeypatch: pytest.MonkeyPatch, step_bytes: int
) -> None:
    device = LateDevice()
    monkeypatch.setitem(DEVICES, "cuda", device)
    origin = torch.randn(40, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    flat = device.tensor(torch.full((40 * 16 + 40 * 64,), -7.0, dtype=torch.bfloat16))
    columns = Placement(Region("w", 8, (40, 16), (64, 1)), Region("p", 0, (40, 16), (16, 1)), torch.bfloat16, (40, 64))
    turned = Placement(
        Region("w", 0, (64, 40), (1, 64)), Region("p", 40 * 16, (64, 40), (40, 1)), torch.bfloat16, (40, 64)
    )
    monkeypatch.setattr(replay, "STEP_BYTES", step_bytes)
    Replay(Copies([columns, turned]), {"w": origin}, {"p": flat}).run(between=lambda: None)
    device.drain(NOWHERE)
    assert torch.equal(flat.held[: 40 * 16].view(40, 16), origin[:, 8:24])
    assert torch.equal(flat.held[40 * 16 :].view(64, 40), origin.T)


@pytest.mark.parametrize("between", [None, lambda: None], ids=["at once", "in steps"])
def test_many_copies_to_a_device_pass_through_the_page_locked_memory_of_one_step(
    monkeypatch: pytest.MonkeyPatch, between: Callable[[], None] | None
) -> None:
    device, asked = LateDevice(), []
    made = device.host_memory
    monkeypatch.setattr(device, "host_memory", lambda nbytes: asked.append(nbytes) or made(nbytes))
    monkeypatch.setitem(DEVICES, "cuda", device)
    monkeypatch.setattr(replay, "STEP_BYTES", 1000)
    origin = any_bits(torch.bfloat16, 40, 100)
    rows = [
        Placement(Region("w", 100 * i, (100,), (1,)), Region("p", 100 * i, (100,), (1,)), torch.bfloat16, (40, 100))
        for i in range(40)
    ]
    flat = device.tensor(torch.zeros(4000, dtype=torch.bfloat16))
    Replay(Copies(rows), {"w": origin}, {"p": flat}).ready().run(between=between)
    device.drain(NOWHERE)
    assert torch.equal(bytes_view(flat.held), bytes_view(origin).reshape(-1))
    assert asked and max(asked) < 3000


def test_large_small_and_turned_copies_within_a_device_are_made_in_the_order_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last placement writes over a part of the first one, as loaders do that fill and then correct."""
    device = LateDevice()
    monkeypatch.setitem(DEVICES, "cuda", device)
    rows, columns = LARGE_BYTES // 256, 128
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    size, shape, other = values.numel(), (rows, columns), torch.full((7,), 5.0, dtype=torch.bfloat16)
    flat = device.tensor(torch.full((2 * size,), -7.0, dtype=torch.bfloat16))
    sources = {"w": device.tensor(values), "small": device.tensor(other)}
    whole = Placement(Region("w", 0, (size,), (1,)), Region("p", 0, (size,), (1,)), torch.bfloat16, shape)
    turned = Placement(
        Region("w", 0, (columns, rows), (1, columns)),
        Region("p", size, (columns, rows), (rows, 1)),
        torch.bfloat16,
        shape,
    )
    small = Placement(Region("small", 0, (7,), (1,)), Region("p", 100, (7,), (1,)), torch.bfloat16, (7,))
    copies = Replay(Copies([whole, turned, small]), sources, {"p": flat})
    assert values.nbytes >= LARGE_BYTES
    for _ in range(2):
        flat.held.fill_(-7.0)
        copies.run()
        device.drain(NOWHERE)
        expected = values.reshape(-1).clone()
        expected[100:107] = other
        assert torch.equal(flat.held[:size], expected)
        assert torch.equal(flat.held[size:].view(columns, rows), values.T)


@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
def test_every_dtype_is_copied_to_a_device_and_within_it(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Scales of float8_e8m0fnu are copied by themselves where the engine makes a module anew."""
    device, kind = LateDevice(), torch_dtype(dtype)
    monkeypatch.setitem(DEVICES, "cuda", device)
    monkeypatch.setattr(torch, "_foreach_copy_", foreach_copy_of_a_gpu)
    values = any_bits(kind, 40, 6)
    turned = Placement(Region("w", 0, (6, 40), (1, 6)), Region("p", 240, (6, 40), (40, 1)), kind, (40, 6))
    whole = Placement(Region("w", 0, (240,), (1,)), Region("p", 0, (240,), (1,)), kind, (40, 6))
    for sources in ({"w": values}, {"w": device.tensor(values)}):
        flat = device.tensor(any_bits(kind, 480, seed=1))
        Replay(Copies([whole, turned]), sources, {"p": flat}).run()
        device.drain(NOWHERE)
        expected = torch.cat([values.reshape(-1), values.T.reshape(-1)])
        assert torch.equal(bytes_view(flat.held), bytes_view(expected))


class Stepping(LateDevice):
    """The host's memory as a device's: a step that was only queued reads it later."""

    type = "cpu"


@pytest.mark.parametrize("ignored", [(), ("drain",)])
@pytest.mark.parametrize("policy", ["copy", "standby", "streaming"])
def test_a_step_that_was_queued_before_an_installation_reads_the_weights_of_before(
    monkeypatch: pytest.MonkeyPatch, policy: str, ignored: tuple[str, ...]
) -> None:
    model, manifest = PlainEngineModel(2, 0, 1), manifest_of(checkpoint(0), TIED)
    installer = ModelInstaller(model)
    installer.open(manifest, policy, partial=False)
    device = Stepping(*ignored)
    monkeypatch.setitem(DEVICES, "cpu", device)
    seen: list[dict[str, int]] = []
    digests = live_digests(model.live)
    device.put(lambda: seen.append(live_digests(model.live)))
    if policy == "streaming":
        for i, spec in enumerate(manifest.tensors):
            installer.place(manifest.whole(i), checkpoint(1)[spec.name])
        installer.install(torch.empty(0, dtype=torch.uint8))
    else:
        segment = segment_of(checkpoint(1), manifest)
        installer.prepare(segment, lambda: None)
        installer.install(segment)
    if ignored:
        device.ignores = frozenset()
        device.drain(NOWHERE)
    assert (seen == [digests]) is not bool(ignored)
    assert [live_digests(model.live)] == digests_expected(checkpoint(1), 1, 2)


def staged(model: EngineModel, manifest_tensors: dict[str, torch.Tensor], tied: dict[str, str]) -> StagedInstaller:
    return StagedInstaller(agree(model, manifest_of(manifest_tensors, tied), partial=False), WayBack())


@pytest.mark.parametrize(("rank", "tp"), [(0, 1), (0, 2), (1, 2)])
def test_staged_bytes_are_copied_into_the_live_parameters_whose_addresses_stay(rank: int, tp: int) -> None:
    model, manifest = PlainEngineModel(2, rank, tp), manifest_of(checkpoint(0), TIED)
    installer = staged(model, checkpoint(0), TIED)
    addresses = {name: parameter.data_ptr() for name, parameter in model.live.named_parameters()}
    previous = segment_of(checkpoint(0), manifest)
    for seed in (1, 2, 0, 3):
        segment = segment_of(checkpoint(seed), manifest)
        before = live_digests(model.live)
        assert installer.prepare(segment, lambda: None) >= sum(p.nbytes for p in model.live.parameters())
        assert live_digests(model.live) == before
        segment.fill_(0xFF)  # the bytes are the device's by now
        installer.install(segment)
        assert live_digests(model.live) == digests_expected(checkpoint(seed), tp, 2)[rank]
        if seed == 2:
            installer.undo(previous)
            assert live_digests(model.live) == before
            continue
        installer.finish()
        previous = segment_of(checkpoint(seed), manifest)
    assert addresses == {name: parameter.data_ptr() for name, parameter in model.live.named_parameters()}
    with pytest.raises(CommitFailed, match="nothing was prepared"):
        installer.install(previous)


def test_copies_that_stay_bound_bring_every_version_across_and_end_with_the_second_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer's two segments are used in turn. In between the engine gives its parameters other memory, the second set is
    dropped, and an installation is undone."""
    model, manifest = PlainEngineModel(2, 0, 1), manifest_of(checkpoint(0), TIED)
    installer, second_set = staged(model, checkpoint(0), TIED), []

    def new_memory(live: torch.Tensor) -> torch.Tensor:
        memory = torch.empty_like(live)
        second_set.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(staged_installer, "poisoned_like", new_memory)
    segments = [segment_of(checkpoint(0), manifest) for _ in range(2)]
    for update in range(10):
        segment = segments[update % 2]
        segment.copy_(segment_of(checkpoint(update), manifest))
        before = live_digests(model.live)
        installer.prepare(segment, lambda: None)
        installer.install(segment)
        assert live_digests(model.live) == digests_expected(checkpoint(update), 1, 2)[0]
        if update % 4 == 3:
            installer.undo(segments[1 - update % 2])
            assert live_digests(model.live) == before
            segment.copy_(segments[1 - update % 2])
        else:
            installer.finish()
        if update == 4:
            with torch.no_grad():
                for parameter in model.live.parameters():
                    parameter.data = parameter.detach().clone()
        if update == 6:
            assert second_set and all(memory() is not None for memory in second_set)
            installer.drop_second_set()
            assert all(memory() is None for memory in second_set)
            second_set.clear()


@pytest.mark.parametrize("packs", [False, True], ids=["plain", "packed"])
def test_what_the_engine_makes_of_the_weights_is_made_before_the_stop_too(packs: bool) -> None:
    model = Engine(packs)
    manifest = manifest_of(weights(0))
    installer = staged(model, weights(0), {})
    for seed in (1, 2, 0):
        segment = segment_of(weights(seed), manifest)
        installer.prepare(segment, lambda: None)
        segment.fill_(0xFF)
        installer.install(segment)
        installer.finish()
        assert model.state() == cold(seed, packs)


@pytest.mark.parametrize(("rank", "tp"), [(0, 1), (0, 2), (1, 2)])
def test_a_zone_is_copied_into_the_live_parameters_whose_addresses_stay(rank: int, tp: int) -> None:
    model = PlainEngineModel(2, rank, tp)
    agreement = agree(model, manifest_of(checkpoint(0), TIED), partial=False)
    layout, kind = zone_layout(agreement, StagedInstaller), zone_installer(StagedInstaller)
    assert kind is ZoneCopyInstaller
    installer = kind(agreement, WayBack())
    addresses = {name: parameter.data_ptr() for name, parameter in model.live.named_parameters()}
    zones = [torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8) for _ in range(2)]
    versions: list[int] = []
    for seed in (1, 2, 0, 3, 1):
        zone, previous = zones[len(versions) % 2], zones[(len(versions) + 1) % 2]
        fill(zone, layout, agreement.manifest, checkpoint(seed))
        before = live_digests(model.live)
        installer.prepare(zone, lambda: None)
        assert live_digests(model.live) == before
        installer.install(zone)
        assert live_digests(model.live) == digests_expected(checkpoint(seed), tp, 2)[rank]
        if seed == 0:  # another rank failed
            installer.undo(previous)
            assert live_digests(model.live) == before
            installer.discard()
            zones[len(versions) % 2] = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
            continue
        installer.finish()
        versions.append(seed)
    assert addresses == {name: parameter.data_ptr() for name, parameter in model.live.named_parameters()}


def fill(zone: torch.Tensor, layout: ZoneLayout, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a checkpoint into a zone, as trainer ranks do."""
    for place in layout.check(manifest).places:
        tensor = tensors[manifest.tensors[place.box.tensor].name]
        part = tensor[tuple(slice(o, o + n) for o, n in zip(place.box.offsets, place.box.sizes, strict=True))]
        for landing in layout.landings(manifest, place.box):
            landing.view(zone, tensor.dtype).copy_(part)


@pytest.mark.parametrize("ignored", [(), ("synchronise",), ("drain",)])
def test_a_loader_that_copies_on_threads_of_its_own_writes_after_us_and_is_read_once_it_is_done(
    monkeypatch: pytest.MonkeyPatch, ignored: tuple[str, ...]
) -> None:
    """As SGLang's for DeepSeek: what it copies from the host's memory is there at once, what it computes is queued."""
    device = LateDevice(*ignored)
    monkeypatch.setitem(DEVICES, "cpu", device)
    with torch.device("meta"):
        skeleton = torch.nn.ParameterDict({name: torch.empty(6) for name in ("copied", "computed")})
    sent = {"copied": torch.arange(6.0), "computed": torch.arange(6.0) + 10}

    def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        def write(name: str, tensor: torch.Tensor) -> None:
            device.enter(device.new_queue())
            place = skeleton[name].data

            def copy() -> None:
                place.copy_(tensor)

            copy() if name == "copied" else device.put(copy)

        with ThreadPoolExecutor() as pool:
            for _ in pool.map(lambda each: write(*each), tensors):
                pass

    def start(key: str, storage: torch.Tensor) -> None:
        storage.zero_()
        device.put(lambda: poison(storage))

    with loaded(skeleton, {*sent}, load_weights, sent.items(), start, torch.device("cpu")) as held:
        is_right = all(torch.equal(held.flats[name], tensor) for name, tensor in sent.items())
    assert is_right is not bool(ignored)
