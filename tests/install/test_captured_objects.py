"""What post-processing makes beside parameters, where captured graphs hold it: the tensors inside a kernel stay where they are
and get an update's values, and anything else that a graph would go on with refuses the model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.install.negotiation import agree
from inference_plugin.install.policies import PolicyInstaller, WayBack
from inference_plugin.install.staged import StagedInstaller
from inference_plugin.wire.errors import EngineUnsupported
from tests.install.installing import segment_of
from tests.support.plain_engine import manifest_of

EXPERTS, SIZE = 3, 4


class Scales:
    """As the quantisation configuration of a kernel for experts: refers to parameters, and holds tensors of its own."""

    def __init__(self, layer: Any) -> None:
        self.weight_scale = layer.weight_scale
        self.bias = layer.bias
        self.inverse = (1 / layer.input_scale).expand(EXPERTS)


class Kernel:
    """As a kernel for experts: keeps the scales, and constants on the device."""

    def __init__(self, scales: Scales) -> None:
        self.scales = scales
        self.strides = [torch.full((EXPERTS,), SIZE, dtype=torch.int64)]
        self.runs: Callable[[], torch.Tensor] = lambda: scales.inverse + 1
        self.last_exchange: Any = None


class Method:
    """A quantisation method: one scale for each expert, and a kernel that is made anew after each load."""

    kernel: Kernel | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight_scale = nn.Parameter(layer.weight_scale.max(1).values, requires_grad=False)
        self.kernel = Kernel(Scales(layer))


class KeepsANumber(Method):
    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        assert self.kernel is not None
        self.kernel.scales.factor = float(layer.weight_scale.detach().max())  # type: ignore[attr-defined]


class OnlyConstants(Method):
    """Makes a kernel that has nothing of the weights in it, beside what it makes of these."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight_scale = nn.Parameter(layer.weight_scale.max(1).values, requires_grad=False)
        self.kernel = Kernel(Scales(layer))
        self.kernel.scales.weight_scale = layer.bias
        self.kernel.scales.inverse = torch.ones(EXPERTS)


class Product:
    """As oneDNN's: owns something outside of torch, whose address it keeps in a tensor."""

    alive: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self.address = torch.tensor(1 + max(self.alive, default=0))
        self.alive.add(int(self.address))

    def __del__(self) -> None:
        self.alive.discard(int(self.address))


class Owns(Method):
    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        assert self.kernel is not None
        self.kernel.product = Product()  # type: ignore[attr-defined]


class Experts(nn.Module):
    def __init__(self, method: Method) -> None:
        super().__init__()
        self.quant_method = method
        for name, tensor in weights(-1).items():
            self.register_parameter(name, nn.Parameter(torch.empty_like(tensor), requires_grad=False))


class Model(nn.Module):
    def __init__(self, method: type[Method]) -> None:
        super().__init__()
        self.experts = Experts(method())

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(f"experts.{name}").data.copy_(tensor)

    def finish(self) -> Model:
        self.experts.quant_method.process_weights_after_loading(self.experts)
        return self

    def held(self) -> dict[str, torch.Tensor]:
        """What a step reads, as a graph would hold it: by address."""
        layer: Any = self.experts
        kernel = layer.quant_method.kernel
        (captured,) = (cell.cell_contents for cell in kernel.runs.__closure__)
        return {
            "weight": layer.weight, "scale": layer.weight_scale, "scale in the kernel": kernel.scales.weight_scale,
            "bias in the kernel": kernel.scales.bias, "inverse": kernel.scales.inverse, "strides": kernel.strides[0],
            "captured by a function": captured.inverse,
        }  # fmt: skip


class Engine(LiveModel):
    post_processing = Method
    fixed_addresses = captures_graphs = True
    runtime_state = frozenset({"last_exchange"})

    def __init__(self, method: type[Method] = Method) -> None:
        live = Model(method)
        live.load_weights(weights(0).items())
        super().__init__(live.finish(), torch.device("cpu"), *build_skeleton(lambda: Model(method), torch.no_grad()))
        self.graph = live.held()

    def free_bytes(self) -> int:
        return 1 << 40


def weights(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(EXPERTS, SIZE, SIZE, generator=random),
        "weight_scale": torch.rand(EXPERTS, 2, generator=random) + 1,
        "input_scale": torch.rand(1, generator=random) + 1,
        "bias": torch.randn(EXPERTS, SIZE, generator=random),
    }


def held(engine: Engine) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = engine.live.held()  # type: ignore[operator]
    return found


def values(held: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in held.items()}


def cold(seed: int) -> dict[str, list[Any]]:
    """What an engine that starts with these weights computes with."""
    live = Model(Method)
    live.load_weights(weights(seed).items())
    return values(live.finish().held())


def installer_of(engine: Engine, how: str) -> ModelInstaller | PolicyInstaller:
    manifest = manifest_of(weights(0))
    if how == "staged":  # as on a device with room for a second set
        return StagedInstaller(agree(engine, manifest, partial=False), WayBack())
    installer = ModelInstaller(engine)
    installer.open(manifest, how, partial=False)
    return installer


@pytest.mark.parametrize("how", ["copy", "standby", "staged", "streaming"])
def test_a_graph_that_was_captured_before_reads_each_update_and_the_way_back(how: str) -> None:
    engine, manifest = Engine(), manifest_of(weights(0))
    assert values(engine.graph) == cold(0)
    installer = installer_of(engine, how)
    segments = {seed: segment_of(weights(seed), manifest) for seed in range(4)}

    def install(seed: int) -> None:
        if how == "streaming":
            for i, spec in enumerate(manifest.tensors):
                installer.place(manifest.whole(i), weights(seed)[spec.name])
        installer.prepare(segments[seed], lambda: None)
        installer.install(segments[seed])
        assert values(engine.graph) == values(held(engine)) == cold(seed)

    for seed in (1, 2, 0):
        install(seed)
        installer.finish()
    install(3)
    if how != "streaming":  # it has no way back
        installer.undo(segments[0])
        assert values(engine.graph) == values(held(engine)) == cold(0)
        install(2)


@pytest.mark.parametrize("fixed", [True, False])
def test_what_is_staged_for_the_next_update_is_in_no_object_that_computes(fixed: bool) -> None:
    engine, manifest = Engine(), manifest_of(weights(0))
    engine.fixed_addresses = engine.captures_graphs = fixed
    installer = installer_of(engine, "staged")
    for seed in (1, 2):
        segment = segment_of(weights(seed), manifest)
        installer.prepare(segment, lambda: None)
        if seed == 2:
            assert values(held(engine)) == cold(1)
            installer.discard()
            break
        installer.install(segment)
        installer.finish()
    assert values(held(engine)) == cold(1)


def test_a_number_that_a_graph_would_go_on_with_refuses_the_model_by_name() -> None:
    engine = Engine(KeepsANumber)
    with pytest.raises(EngineUnsupported, match=r"captured graphs.*experts\.quant_method\.kernel"):
        installer_of(engine, "copy")
    engine.captures_graphs = False  # asleep, for instance: a fresh object does
    installer_of(engine, "copy")


def test_what_a_kernel_derived_at_first_use_refuses_the_model_unless_it_is_working_memory() -> None:
    engine = Engine()
    kernel = engine.live.experts.quant_method.kernel  # type: ignore[union-attr]
    kernel.last_exchange = [torch.zeros(3)]
    installer_of(engine, "copy")
    kernel.scales.lazily = torch.zeros(3)
    with pytest.raises(EngineUnsupported, match=r"experts\.quant_method\.kernel"):
        installer_of(engine, "copy")


@pytest.mark.parametrize("policy", ["copy", "standby"])
@pytest.mark.parametrize("fixed", [True, False])
def test_an_object_that_has_nothing_of_the_weights_stays_with_what_the_engine_put_into_it(
    policy: str, fixed: bool
) -> None:
    """As vLLM puts the slots of adapters into kernels for experts."""
    engine, manifest = Engine(OnlyConstants), manifest_of(weights(0))
    engine.fixed_addresses = engine.captures_graphs = fixed
    kernel = engine.live.experts.quant_method.kernel  # type: ignore[union-attr]
    slots = kernel.last_exchange = [torch.zeros(3)]
    installer = installer_of(engine, policy)
    for seed in (1, 2):
        if seed == 2:
            kernel.strides[0].fill_(-1)  # asleep, its memory was discarded
        segment = segment_of(weights(seed), manifest)
        installer.prepare(segment, lambda: None)
        installer.install(segment)
        installer.finish()
        layer: Any = engine.live.experts
        assert layer.quant_method.kernel is kernel and kernel.last_exchange is slots
        assert torch.equal(layer.bias, weights(seed)["bias"]) and torch.equal(kernel.scales.bias, layer.bias)
        assert kernel.strides[0].tolist() == [SIZE] * EXPERTS


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_an_object_that_owns_something_is_replaced_as_a_whole_and_refused_where_a_graph_would_go_on_with_it(
    policy: str,
) -> None:
    engine, manifest = Engine(Owns), manifest_of(weights(0))
    with pytest.raises(EngineUnsupported, match=r"captured graphs.*experts\.quant_method\.kernel"):
        installer_of(engine, policy)
    engine.captures_graphs = False
    installer = installer_of(engine, policy)
    for seed in (1, 2):
        segment = segment_of(weights(seed), manifest)
        installer.prepare(segment, lambda: None)
        installer.install(segment)
        installer.finish()
        gc.collect()
        assert values(held(engine)) == cold(seed)
        product = engine.live.experts.quant_method.kernel.product  # type: ignore[union-attr]
        assert int(product.address) in Product.alive
