"""`streaming`, the installer alone: any pieces in any order leave what a load leaves, or nothing is confirmed; little is held."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.errors import CommitFailed, EngineUnsupported, TornReplica
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest, TensorSpec
from tests.install.installing import update
from tests.install.test_added_parameters import Engine, Packs, Projection, cold, weights
from tests.install.test_installer import ComputingLoader
from tests.support.memory import peak_bytes
from tests.support.plain_engine import TIED, PlainEngineModel, checkpoint, digests_expected, live_digests, manifest_of
from tests.support.rig import eventually, fork, gone

NOTHING = torch.empty(0, dtype=torch.uint8)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def cut(draw: st.DrawFn, manifest: Manifest) -> list[Box]:
    """All tensors in boxes, in any order."""
    found = []
    for i, spec in enumerate(manifest.tensors):
        ends = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in spec.shape]
        for part in itertools.product(*(list(itertools.pairwise(each)) for each in ends)):
            found.append(Box(i, tuple(start for start, _ in part), tuple(end - start for start, end in part)))
    return draw(st.permutations(found))


def piece(manifest: Manifest, tensors: dict[str, torch.Tensor], box: Box) -> torch.Tensor:
    """A box's elements, of its shape."""
    part = tensors[manifest.tensors[box.tensor].name]
    return part[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))].contiguous()


def stream(installer: ModelInstaller, manifest: Manifest, tensors: dict[str, torch.Tensor], boxes: list[Box]) -> None:
    for box in boxes:
        installer.place(box, piece(manifest, tensors, box))
    installer.install(NOTHING)
    installer.finish()


def whole(manifest: Manifest) -> list[Box]:
    return [manifest.whole(i) for i in range(len(manifest.tensors))]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), rank=st.integers(0, 1), tp=st.integers(1, 2))
def test_any_pieces_in_any_order_leave_what_a_load_leaves(data: st.DataObject, rank: int, tp: int) -> None:
    model = PlainEngineModel(2, rank % tp, tp)
    manifest = manifest_of(checkpoint(0), TIED)
    installer = ModelInstaller(model)
    terms = installer.open(manifest, "streaming", partial=False)
    assert (terms.mechanism, terms.install) == ("plan", "streaming")
    for version in (1, 2, 0):
        stream(installer, manifest, checkpoint(version), data.draw(cut(manifest)))
        assert live_digests(model.live) == digests_expected(checkpoint(version), tp)[rank % tp]
        assert installer.prepare(NOTHING, lambda: None) == 0


@settings(max_examples=30, deadline=None)
@given(data=st.data(), packs=st.booleans(), dtype=DTYPES)
def test_modules_that_the_engine_makes_anew_are_made_of_the_pieces_whatever_their_order(
    data: st.DataObject, packs: bool, dtype: torch.dtype
) -> None:
    engine = Engine(packs, dtype)
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "streaming", partial=False)
    for version in (1, 2, 0):
        stream(installer, manifest, weights(version), data.draw(cut(manifest)))
        assert engine.state() == cold(version, packs, dtype)


def test_what_is_held_at_once_is_one_module_and_no_more() -> None:
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(Engine(packs=True))
    installer.open(manifest, "streaming", partial=False)
    stream(installer, manifest, weights(1), whole(manifest))
    projection = weights(1)["projection.weight"].nbytes  # for itself, and for what is derived from it
    assert installer.prepare(NOTHING, lambda: None) in (projection, 2 * projection)


def test_a_piece_that_is_missing_is_noticed_and_there_is_no_way_back() -> None:
    engine = Engine(packs=True)
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "streaming", partial=False)
    for box in whole(manifest)[1:]:
        installer.place(box, piece(manifest, weights(1), box))
    with pytest.raises(CommitFailed, match="elements arrived"):
        installer.install(NOTHING)
    with pytest.raises(TornReplica, match="have overwritten the previous version"):
        installer.undo(None)
    installer.discard()
    stream(installer, manifest, weights(2), whole(manifest))
    assert engine.state() == cold(2, packs=True)


def test_before_the_first_piece_there_is_a_way_back() -> None:
    engine = Engine(packs=True)
    installer = ModelInstaller(engine)
    installer.open(manifest_of(weights(0)), "streaming", partial=False)
    installer.undo(None)
    assert engine.state() == cold(0, packs=True)


def test_an_engine_that_goes_from_standby_to_streaming_and_back_holds_each_version() -> None:
    model = PlainEngineModel(2, 0, 1)
    manifest = manifest_of(checkpoint(0), TIED)
    installer = ModelInstaller(model)
    for version, policy in enumerate(["standby", "streaming", "copy", "streaming", "standby"], 1):
        installer.open(manifest, policy, partial=False)
        tensors = checkpoint(version)
        if policy == "streaming":
            stream(installer, manifest, tensors, whole(manifest))
        else:
            update(installer, manifest, tensors)
        assert live_digests(model.live) == digests_expected(tensors)[0]


def test_a_model_whose_loader_computes_is_refused_by_name() -> None:
    installer = ModelInstaller(ComputingLoader(2, 0, 1))
    with pytest.raises(EngineUnsupported, match="the engine's own loader has to fill it"):
        installer.open(manifest_of(checkpoint(0), TIED), "streaming", partial=False)


class Layers(nn.Module):
    """Eight projections of 16 MiB."""

    COUNT, WIDTH = 8, 2048

    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Projection(packs) for _ in range(self.COUNT))
        for layer in self.layers:
            layer.weight = nn.Parameter(torch.empty(self.WIDTH, self.WIDTH), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


class LayersEngine(LiveModel):
    post_processing = Packs

    def __init__(self, packs: bool) -> None:
        live = Layers(packs)
        live.load_weights((name, torch.zeros(live.WIDTH, live.WIDTH)) for name, _ in live.named_parameters())
        for layer in live.layers:
            Packs().process_weights_after_loading(layer)
        super().__init__(live, torch.device("cpu"), *build_skeleton(lambda: Layers(packs), torch.no_grad()))

    def free_bytes(self) -> int:
        return 1 << 40


def measure(packs: bool, out: str) -> None:
    """In a process of its own: what an update takes at its peak, what the installer says of it, and what the layers then hold."""
    engine = LayersEngine(packs)
    names = [f"layers.{i}.weight" for i in range(Layers.COUNT)]
    layer = torch.ones(Layers.WIDTH, Layers.WIDTH)
    manifest = Manifest(tuple(TensorSpec(name, "float32", tuple(layer.shape)) for name in names))
    installer = ModelInstaller(engine)
    installer.open(manifest, "streaming", partial=False)
    stream(installer, manifest, dict.fromkeys(names, 2 * layer), whole(manifest))
    threes = dict.fromkeys(names, 3 * layer)
    taken = peak_bytes(lambda: stream(installer, manifest, threes, whole(manifest)))
    held = [(parameter.min().item(), parameter.max().item()) for parameter in engine.live.parameters()]
    said = installer.prepare(NOTHING, lambda: None)
    Path(f"{out}.tmp").write_text(json.dumps([taken / layer.nbytes, said / layer.nbytes, held]))
    Path(f"{out}.tmp").rename(out)


@pytest.mark.parametrize("packs", [False, True], ids=["plain", "packed"])
def test_the_process_takes_no_memory_but_that_of_one_module(tmp_path: Path, packs: bool) -> None:
    out = tmp_path / "measured"
    pid = fork("tests.install.test_streaming:measure", packs=packs, out=str(out))
    eventually(lambda: gone(pid), "the end of the measurement")
    taken, said, held = json.loads(out.read_text())
    assert taken < (2.5 if packs else 0.5), f"{taken:.2f} layers at the peak"
    assert said == (1 if packs else 0)
    assert held == [[3, 3]] * Layers.COUNT
