"""Parameters that an engine adds after a load, or makes anew during one: they follow every update, or the model is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.errors import EngineUnsupported, TransportUnavailable
from tests.install.installing import segment_of, update
from tests.support.plain_engine import manifest_of

SIZE = 4


class Packs:
    """A quantisation method that turns the weight around, and leaves it to be read so."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if layer.packs:
            layer.weight = nn.Parameter(layer.get_parameter("weight").detach().t().contiguous(), requires_grad=False)


class Projection(nn.Module):
    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.packs = packs
        self.quant_method = Packs()
        self.weight = nn.Parameter(torch.empty(2 * SIZE, SIZE), requires_grad=False)


class Attention(nn.Module):
    """As multi-head latent attention: cuts the weight of a projection, which belongs to its parent as well, in two."""

    def __init__(self, projection: Projection, dtype: torch.dtype) -> None:
        super().__init__()
        self.projection = projection
        self.dtype = dtype

    def process_weights_after_loading(self) -> None:
        whole = self.projection.weight.detach()
        for name, part in zip(
            ("up", "down"), whole.t().chunk(2, 1) if whole.shape[0] > SIZE else whole.chunk(2, 1), strict=True
        ):
            setattr(self, name, nn.Parameter(part.to(self.dtype).transpose(0, 1), requires_grad=False))


class Model(nn.Module):
    def __init__(self, packs: bool = False, dtype: torch.dtype = torch.float32, anew: bool = False) -> None:
        super().__init__()
        self.projection = Projection(packs)
        self.attention = Attention(self.projection, dtype)
        self.norm = nn.Parameter(torch.empty(SIZE), requires_grad=False)
        self.bias: nn.Parameter | None = None
        self.anew = anew

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "bias" and self.anew:
                self.bias = nn.Parameter(torch.empty(SIZE, device="cpu"), requires_grad=False)
            self.get_parameter(name).data.copy_(tensor)

    def finish(self) -> Model:
        self.projection.quant_method.process_weights_after_loading(self.projection)
        self.attention.process_weights_after_loading()
        return self


class Engine(LiveModel):
    post_processing = Packs

    def __init__(self, packs: bool = False, dtype: torch.dtype = torch.float32, anew: bool = False) -> None:
        live = Model(packs, dtype, anew)
        live.load_weights(weights(0, anew).items())
        skeleton = build_skeleton(lambda: Model(packs, dtype, anew), torch.no_grad())
        super().__init__(live.finish(), torch.device("cpu"), *skeleton)

    def finishers(self):  # type: ignore[no-untyped-def]
        return {**super().finishers(), "attention": lambda module: module.process_weights_after_loading()}

    def reads(self, module: nn.Module) -> tuple[str, ...]:
        return ("projection",) if isinstance(module, Attention) else ()

    def free_bytes(self) -> int:
        return 1 << 40

    def state(self) -> dict[str, list[float]]:
        return {name: tensor.tolist() for name, tensor in self.live.named_parameters()}


def weights(seed: int, with_bias: bool = False) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    made = {
        "projection.weight": torch.randn(2 * SIZE, SIZE, generator=random),
        "norm": torch.randn(SIZE, generator=random),
    }
    return made | ({"bias": torch.randn(SIZE, generator=random)} if with_bias else {})


def cold(
    seed: int, packs: bool = False, dtype: torch.dtype = torch.float32, anew: bool = False
) -> dict[str, list[float]]:
    """What an engine that starts with these weights computes with."""
    live = Model(packs, dtype, anew)
    live.load_weights(weights(seed, anew).items())
    return {name: tensor.tolist() for name, tensor in live.finish().named_parameters()}


@pytest.mark.parametrize("policy", ["copy", "standby"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["views", "own-memory"])
@pytest.mark.parametrize("packs", [False, True], ids=["plain", "packed"])
def test_parameters_derived_from_another_module_follow_every_update_and_the_way_back(
    packs: bool, dtype: torch.dtype, policy: str
) -> None:
    engine = Engine(packs, dtype)
    assert engine.state() == cold(0, packs, dtype)
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    terms = installer.open(manifest, policy, partial=False)
    assert terms.untouched == ()
    before = torch.empty(0)
    for seed in (1, 2, 0, 3, 1):
        before = update(installer, manifest, weights(seed))
        assert engine.state() == cold(seed, packs, dtype)
    segment = segment_of(weights(2), manifest)
    installer.prepare(segment, lambda: None)
    installer.install(segment)
    assert engine.state() == cold(2, packs, dtype)
    installer.undo(before if policy == "copy" else None)
    assert engine.state() == cold(1, packs, dtype)
    update(installer, manifest, weights(3))
    assert engine.state() == cold(3, packs, dtype)


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_a_head_that_computes_with_a_module_of_the_model_keeps_nothing_outside_it(policy: str) -> None:
    """As a pooler of vLLM's in a dict, whose head is the model's classifier; post-processing added a scale to that."""
    engine = Engine(dtype=torch.bfloat16)
    live: Any = engine.live
    live.poolers = {"classify": nn.Sequential(live.attention)}
    installer, manifest = ModelInstaller(engine), manifest_of(weights(0))
    installer.open(manifest, policy, partial=False)
    update(installer, manifest, weights(1))
    assert engine.state() == cold(1, dtype=torch.bfloat16)


def test_a_part_of_the_model_without_the_projection_leaves_what_is_derived_from_it() -> None:
    engine = Engine(True)
    manifest = manifest_of({"norm": weights(0)["norm"]})
    installer = ModelInstaller(engine)
    installer.open(manifest, "standby", partial=True)
    update(installer, manifest, {"norm": weights(1)["norm"]})
    assert engine.state() == cold(0, True) | {"norm": cold(1)["norm"]}


def test_a_parameter_that_the_loader_makes_anew_at_each_load_has_the_bytes_of_the_update() -> None:
    engine = Engine(anew=True)
    manifest = manifest_of(weights(0, True))
    installer = ModelInstaller(engine)
    terms = installer.open(manifest, "standby", partial=False)
    assert terms.mechanism == "loader"
    with pytest.raises(TransportUnavailable):
        installer.open(manifest, "standby", partial=False, zone=True)
    installer.open(manifest, "standby", partial=False)
    for seed in (1, 2, 0, 3):
        update(installer, manifest, weights(seed, True))
        assert engine.state() == cold(seed, anew=True)


class Renames(Packs):
    """As NVFP4 and MXFP4 of compressed-tensors in vLLM: the weight that is loaded stays where it is, under another name."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight = nn.Parameter(layer.get_parameter("packed").data, requires_grad=False)
        del layer.packed


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.quant_method = Renames()  # type: ignore[assignment]
        self.layer.packed = nn.Parameter(torch.empty(SIZE), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_a_parameter_that_post_processing_renames_has_the_bytes_of_the_update(policy: str) -> None:
    class RenamedEngine(LiveModel):
        post_processing = Packs

        def free_bytes(self) -> int:
            return 1 << 40

    sent = [{"layer.packed": torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))} for seed in range(3)]
    live, (skeleton, constants) = Renamed(), build_skeleton(Renamed, torch.no_grad())
    live.load_weights(sent[0].items())
    Renames().process_weights_after_loading(live.layer)
    installer, manifest = (
        ModelInstaller(RenamedEngine(live, torch.device("cpu"), skeleton, constants)),
        manifest_of(sent[0]),
    )
    installer.open(manifest, policy, partial=False)
    before = update(installer, manifest, sent[1])
    assert torch.equal(live.get_parameter("layer.weight"), sent[1]["layer.packed"])
    segment = segment_of(sent[2], manifest)
    installer.prepare(segment, lambda: None)
    installer.install(segment)
    assert torch.equal(live.get_parameter("layer.weight"), sent[2]["layer.packed"])
    installer.undo(before if policy == "copy" else None)
    assert torch.equal(live.get_parameter("layer.weight"), sent[1]["layer.packed"])


def test_a_live_parameter_that_nothing_explains_refuses_the_model_by_name() -> None:
    engine = Engine()
    engine.live.gain = nn.Parameter(torch.ones(SIZE), requires_grad=False)
    with pytest.raises(EngineUnsupported, match=r"might leave behind: gain"):
        ModelInstaller(engine).open(manifest_of(weights(0)), "standby", partial=False)


class Rebinds:
    """As vLLM 0.33 replaces a parameter: the object stays, and the memory that it had is freed."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight")
        scale = weight.detach().abs().amax(1)
        weight.data = weight.detach().t().contiguous()
        for i in range(64):  # one of them gets the address
            layer.register_parameter(f"made{i}", nn.Parameter(scale * (i + 1), requires_grad=False))


class RebindingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Module()
        self.projection.quant_method = Rebinds()  # type: ignore[assignment]
        self.projection.weight = nn.Parameter(torch.empty(2 * SIZE, SIZE), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)

    def loaded(self, seed: int) -> RebindingModel:
        self.load_weights({"projection.weight": weights(seed)["projection.weight"]}.items())
        Rebinds().process_weights_after_loading(self.projection)
        return self


class RebindingEngine(LiveModel):
    post_processing = Rebinds

    def __init__(self) -> None:
        super().__init__(
            RebindingModel().loaded(0), torch.device("cpu"), *build_skeleton(RebindingModel, torch.no_grad())
        )

    def free_bytes(self) -> int:
        return 1 << 40


@pytest.mark.parametrize("install", ["copy", "standby"])
def test_what_is_made_in_memory_that_a_parameter_has_just_let_go_of_follows_every_update(install: Any) -> None:
    engine = RebindingEngine()
    installer = ModelInstaller(engine)
    given = {"projection.weight": weights(0)["projection.weight"]}
    manifest = manifest_of(given)
    installer.open(manifest, install, partial=False)
    for seed in (1, 2, 0):
        update(installer, manifest, {"projection.weight": weights(seed)["projection.weight"]})
        fresh = RebindingModel().loaded(seed)
        assert all(torch.equal(engine.live.get_parameter(name), held) for name, held in fresh.named_parameters())
