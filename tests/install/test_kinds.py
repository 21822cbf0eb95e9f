"""Modules of one class that the engine post-processes in different ways: each way is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from tests.install.installing import update
from tests.support.plain_engine import manifest_of


class Negates:
    """A quantisation method that negates the weight where the layer, or an attribute of its own, says so."""

    def __init__(self, always: bool = False) -> None:
        self.always = always

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if self.always or layer.negates or layer.mode != "keep" or layer.scale is not None or layer.table is not None:
            layer.weight.data.neg_()  # type: ignore[union-attr, operator]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Negates()
        self.negates = False
        self.mode = "keep"
        self.scale: float | None = None
        self.register_buffer("table", None)
        self.weight = nn.Parameter(torch.empty(2, 2), requires_grad=False)


CHOICES: dict[str, Callable[[Layer], object]] = {
    "the method's flag": lambda layer: setattr(layer, "quant_method", Negates(always=True)),
    "the layer's flag": lambda layer: setattr(layer, "negates", True),
    "the layer's mode": lambda layer: setattr(layer, "mode", "negate"),
    "an attribute that others lack": lambda layer: setattr(layer, "scale", 1.0),
    "a buffer that others lack": lambda layer: layer.register_buffer("table", torch.ones(2), persistent=False),
}


class Model(nn.Module):
    """Two layers, of which the second one is negated after a load."""

    def __init__(self, choose: Callable[[Layer], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        choose(self.layers[1])  # type: ignore[arg-type]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


class Engine(LiveModel):
    post_processing = Negates

    def __init__(self, choose: Callable[[Layer], object]) -> None:
        skeleton = build_skeleton(lambda: Model(choose), torch.no_grad())
        live = Model(choose)
        live.load_weights(weights(1.0).items())
        for layer in live.layers:
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]
        super().__init__(live, torch.device("cpu"), *skeleton)

    def free_bytes(self) -> int:
        return 1 << 30


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.full((2, 2), value) for i in range(2)}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_layer_that_is_post_processed_otherwise_than_another_of_its_class_is_made_anew(choice: str) -> None:
    model = Engine(CHOICES[choice])
    installer = ModelInstaller(model)
    manifest = manifest_of(weights(0.0))
    installer.open(manifest, "copy", partial=False)
    for value in (2.0, 3.0):
        update(installer, manifest, weights(value))
        assert [float(layer.weight[0, 0]) for layer in model.live.layers] == [value, -value]  # type: ignore[union-attr, index, arg-type]
