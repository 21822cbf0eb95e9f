"""What only a GPU shows: streams, page-locked memory, captured graphs. `make test-gpu` runs this file on one GPU.

Without a GPU it is skipped. `WEIGHTWIRE_TEST_DEVICE=cpu` runs it in the host's memory, all but what needs streams, so that it is
known to be in order before there is a GPU. `test_far_memory.py` runs it in memory that the host can't touch, all but what needs
streams, NCCL or CUDA's shared memory.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from inference_plugin.devices import DEVICES, device_of
from inference_plugin.engines.transformers import TransformersEngine
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.net import addresses
from inference_plugin.transports.pieces import pieces_of
from inference_plugin.transports.shm import ShmReceiver, ShmSender
from inference_plugin.wire.config import PIECE_BYTES
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.tensors import bytes_view
from tests.install.installing import segment_of
from tests.support import far_memory
from tests.support.managers import SyncManager
from tests.support.models import make_qwen3
from tests.support.plain_engine import (
    TIED,
    PlainEngineModel,
    PlainModel,
    ShardSource,
    checkpoint,
    digests_expected,
    live_digests,
    manifest_of,
)
from tests.support.rig import PYTHON_PATH, ROOT, Rig, eventually, runtime
from tests.support.shared_host import ON_SHARED_HOST, SharedHost, can_be_built
from tests.transports.cases import any_bits
from trainer_adapters import FSDPAdapter, LocalSlice, ModuleAdapter

if library := os.environ.get(far_memory.VARIABLE):
    far_memory.register(library)
DEVICE = torch.device(os.environ.get("WEIGHTWIRE_TEST_DEVICE", "cuda:0"))
CYCLES = 200_000_000
"""About a tenth of a second of a GPU: an update that does not wait for it reads what was there before."""
PROMPTS = [[1, 5, 9], [200, 3, 17, 40, 41]]
COUNT = 12

needs_streams = pytest.mark.skipif(DEVICE.type != "cuda", reason="only CUDA has streams and graphs")
needs_sharing = pytest.mark.skipif(
    DEVICE.type == "far" or (DEVICE.type == "cpu" and not can_be_built()),
    reason="needs CUDA, or a C compiler for a library in its place",
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


@pytest.fixture
def rig(directory: Path) -> Iterator[Rig]:
    """An engine in the host's memory: what arrives there does not depend on the GPU's good will."""
    one = Rig(directory)
    yield one
    one.end()


def holds(rig: Rig, seed: int) -> bool:
    return rig.peek() == digests_expected(checkpoint(seed, rig.layers), rig.tp, rig.layers)


class Trained(ShardSource):
    """Weights on the GPU. A `step` takes its time there, and returns at once."""

    def __init__(self, seed: int) -> None:
        super().__init__({name: tensor.to(DEVICE) for name, tensor in checkpoint(seed).items()})

    def step(self, seed: int) -> None:
        made = {name: tensor.to(DEVICE) for name, tensor in checkpoint(seed).items()}
        if DEVICE.type == "cuda":
            torch.cuda._sleep(CYCLES)
        for name, tensor in made.items():
            self.tensors[name].copy_(tensor)


@pytest.fixture
def colocated(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two checkpoints, and an engine of the first one on the device, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH}
    if DEVICE.type == "cpu":
        shared = SharedHost()
        monkeypatch.setitem(DEVICES, "cpu", shared)
        monkeypatch.setitem(DEVICES, "cuda", shared)  # which torch for CUDA takes to be present
        environment |= ON_SHARED_HOST
    paths = [make_qwen3(tmp_path / str(seed), seed=seed, tied=True, dtype=torch.float32) for seed in (1, 2)]
    command = [sys.executable, "-m", "tests.gpu.engine", str(paths[0]), str(DEVICE)]
    engine = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE)
    try:
        eventually(lambda: addresses.discover() or engine.poll() is not None, "the engine's card")
        assert engine.poll() is None, "the engine ended"
        yield paths[0], paths[1]
    finally:
        engine.kill()
        engine.wait()


@needs_sharing
def test_an_engine_of_another_process_shares_its_memory_and_takes_every_version(colocated: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(path).to(DEVICE) for path in colocated]
    with SyncManager(timeout_s=120, transport="cuda_ipc") as manager:
        for version in range(1, 6):
            report = manager.update(ModuleAdapter(models[version % 2]), version)
            assert [(one.status, one.transport) for one in report.replicas] == [("committed", "cuda_ipc")]
            assert manager.verify(ModuleAdapter(models[version % 2])).ok
        assert not manager.verify(ModuleAdapter(models[0])).ok


@needs_sharing
def test_a_trainer_with_fsdp2_and_an_optimizer_is_followed_step_by_step(
    colocated: tuple[Path, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    backend = "gloo" if DEVICE.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model = AutoModelForCausalLM.from_pretrained(colocated[1]).to(DEVICE)
        mesh = init_device_mesh(DEVICE.type, (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        tokens, adapter = torch.tensor([[1, 5, 9, 200]], device=DEVICE), FSDPAdapter(model)
        with SyncManager(timeout_s=120, transport="cuda_ipc") as manager:
            for version in (1, 2, 3):
                model(tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                manager.update(adapter, version)
                assert manager.verify(adapter).ok
            optimizer.step()
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            assert not manager.verify(adapter).ok
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["zone", "shm", "zmq", "delta", "stream"])
def test_an_update_waits_for_the_step_that_the_caller_has_only_queued(rig: Rig, transport: str) -> None:
    source = Trained(1)
    install = "streaming" if transport == "stream" else "standby"
    with SyncManager(timeout_s=60, transport=transport, install=install) as manager:
        for version in (1, 2, 3):
            source.step(10 + version)
            manager.update(source, version)
            assert holds(rig, 10 + version)


@needs_streams
def test_the_step_may_be_on_a_stream_of_the_callers_own(rig: Rig) -> None:
    source, stream = Trained(1), torch.cuda.Stream(DEVICE)
    with SyncManager(timeout_s=60) as manager, torch.cuda.stream(stream):
        for version in (1, 2):
            source.step(10 + version)
            manager.update(source, version)
            assert holds(rig, 10 + version)


def test_the_weights_may_change_once_they_are_released(rig: Rig) -> None:
    source = Trained(1)
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2, 3):
            source.step(10 + version)
            pending = manager.update_async(source, version)
            pending.wait_released()
            source.step(20 + version)
            pending.result()
            assert holds(rig, 10 + version)


@pytest.mark.parametrize("shape", [(3 * PIECE_BYTES // 4 + 5,), (1100, 2048), (2048, 1100), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_come_to_the_host_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    tensor = values.to(DEVICE)
    if len(shape) == 2:
        values, tensor = values.T, tensor.T
    manifest = manifest_of({"weight": torch.empty(values.shape, dtype=dtype, device="meta")})
    item = LocalSlice(Box(0, (0,) * values.dim(), tuple(values.shape)), tensor)
    arrived = torch.cat([torch.from_numpy(data.copy()) for _, data in pieces_of(manifest, item)])
    assert torch.equal(arrived, bytes_view(values.to(dtype).contiguous()).view(-1))


def test_digests_on_the_device_are_those_of_the_host() -> None:
    """On a GPU by the Triton kernels."""
    sizes = (0, 1, 17, 240, 241, 1024, 1025, 70_001, PIECE_BYTES, PIECE_BYTES + 1)
    tensors = [any_bits(torch.uint8, size, seed=size) for size in sizes]
    memory = any_bits(torch.bfloat16, 3001, 40)
    tensors += [memory[1:], memory[:, 3:17], memory.view(-1)[5:]]
    expected = [digest_bytes(bytes_view(tensor.contiguous()).numpy()) for tensor in tensors]
    assert device_of(DEVICE).digests([tensor.to(DEVICE) for tensor in tensors]) == expected


def test_a_page_locked_segment_is_read_by_the_device() -> None:
    manifest = manifest_of({"weight": any_bits(torch.bfloat16, 1100, 2048)})
    sender, receiver = ShmSender(), ShmReceiver()
    staging = receiver.open(manifest, sender.allocate(manifest, frozenset()), ())
    assert DEVICE.type != "cuda" or device_of(DEVICE).is_page_locked(staging.segment)
    arrived = torch.zeros_like(staging.segment, device=DEVICE)
    device_of(DEVICE).copy(arrived, staging.segment)
    device_of(DEVICE).drain(DEVICE)
    assert torch.equal(arrived.cpu(), staging.segment)
    receiver.close()
    sender.close()


class OnDevice(PlainEngineModel):
    def __init__(self, rank: int, tp: int, *, fixed_addresses: bool) -> None:
        super().__init__(2, rank, tp)
        self.live.to(DEVICE)
        self.device = DEVICE
        self.fixed_addresses = fixed_addresses

    @property
    def digests(self) -> dict[str, int]:
        return live_digests(copy.deepcopy(self.live).cpu())


@pytest.mark.parametrize("fixed_addresses", [False, True])
@pytest.mark.parametrize("policy", ["copy", "standby"])
@pytest.mark.parametrize(("rank", "tp"), [(0, 1), (1, 2)])
def test_an_installed_version_is_what_a_load_leaves_there_and_back(
    policy: str, rank: int, tp: int, fixed_addresses: bool
) -> None:
    model, manifest = OnDevice(rank, tp, fixed_addresses=fixed_addresses), manifest_of(checkpoint(0), TIED)
    installer = ModelInstaller(model)
    terms = installer.open(manifest, policy, partial=False)
    addresses = [parameter.data_ptr() for parameter in model.live.parameters()]
    previous = segment_of(checkpoint(0), manifest)
    for seed in (1, 2, 0):
        segment = segment_of(checkpoint(seed), manifest)
        before = model.digests
        installer.prepare(segment, lambda: None)
        assert model.digests == before
        installer.install(segment)
        assert model.digests == digests_expected(checkpoint(seed), tp)[rank]
        if seed == 2:
            installer.undo(previous)
            assert model.digests == before
            continue
        installer.finish()
        previous = segment
    if fixed_addresses:
        assert terms.install == "copy"
        assert addresses == [parameter.data_ptr() for parameter in model.live.parameters()]


def test_streamed_pieces_leave_what_a_load_leaves() -> None:
    model, manifest = OnDevice(0, 1, fixed_addresses=True), manifest_of(checkpoint(0), TIED)
    installer = ModelInstaller(model)
    installer.open(manifest, "streaming", partial=False)
    for seed in (1, 2, 0):
        for i, spec in enumerate(manifest.tensors):
            installer.place(manifest.whole(i), checkpoint(seed)[spec.name])
        installer.install(torch.empty(0, dtype=torch.uint8))
        installer.finish()
        assert model.digests == digests_expected(checkpoint(seed))[0]


@needs_streams
def test_a_captured_graph_computes_with_the_new_weights() -> None:
    model, manifest = OnDevice(0, 1, fixed_addresses=True), manifest_of(checkpoint(0), TIED)
    installer = ModelInstaller(model)
    installer.open(manifest, "auto", partial=False)
    tokens = torch.arange(8, device=DEVICE)

    def embed(live: PlainModel) -> torch.Tensor:
        return torch.nn.functional.layer_norm(live.embed(tokens).float(), (16,), live.norm.weight.float())

    live = model.live
    assert isinstance(live, PlainModel)
    with torch.inference_mode():
        embed(live)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = embed(live)
    for seed in (1, 2, 0):
        segment = segment_of(checkpoint(seed), manifest)
        installer.prepare(segment, lambda: None)
        graph.replay()  # a step that is only queued when the installation begins
        installer.install(segment)
        installer.finish()
        graph.replay()
        with torch.inference_mode():
            assert torch.equal(out, embed(live))
        assert torch.equal(live.embed.weight.cpu(), checkpoint(seed)["embed.weight"])


def taken_bytes() -> int:
    if DEVICE.type == "far":
        return far_memory.taken_bytes()
    return torch.cuda.memory_allocated(DEVICE) if DEVICE.type == "cuda" else 0


@pytest.mark.parametrize("captured_length", [None, 256])
def test_a_hundred_updates_of_an_engine_on_the_trainers_gpu_leave_its_tokens_and_no_memory(
    directory: Path, tmp_path: Path, captured_length: int | None
) -> None:
    """256: a CUDA graph replays its decode steps, and reads the weights where they lay when it was captured."""
    from transformers import AutoModelForCausalLM

    paths = [make_qwen3(tmp_path / str(seed), seed=seed, tied=True, dtype=torch.float32) for seed in (1, 2)]
    fresh = []
    for path in paths:
        with TransformersEngine(path, device=DEVICE, captured_length=captured_length) as engine:
            fresh.append([engine.generate(prompt, COUNT).result(600).tokens for prompt in PROMPTS])
    assert fresh[0] != fresh[1]
    models = [AutoModelForCausalLM.from_pretrained(path).to(DEVICE) for path in paths]
    with (
        TransformersEngine(paths[0], device=DEVICE, captured_length=captured_length) as engine,
        SyncManager(timeout_s=120) as manager,
    ):
        held: list[int] = []
        for version in range(1, 101):
            manager.update(ModuleAdapter(models[version % 2]), version)
            held.append(taken_bytes())
            if version in (1, 2, 99, 100):
                said = [engine.generate(prompt, COUNT).result(600).tokens for prompt in PROMPTS]
                assert said == fresh[version % 2]
        assert manager.verify(ModuleAdapter(models[0])).ok
    assert max(held[10:]) <= max(held[:10])
