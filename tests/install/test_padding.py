"""An engine pads a weight, and post-processing writes over the padding: no tensor need fill it. What it reads must be filled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.errors import EngineUnsupported, ManifestMismatch
from tests.install.installing import update
from tests.support.plain_engine import manifest_of

SIZE, ROWS, PADDED = 4, 3, 5


class Method:
    """Zeroes the rows from `ROWS` on, then scales the weight by its largest element. No checkpoint holds the unit."""

    zeroes = True

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.detach()
        if self.zeroes:
            weight[ROWS:] = 0
        layer.scale, layer.factor = float(weight.abs().max()), float(layer.unit.detach())
        layer.unit = None
        layer.weight = nn.Parameter(weight / layer.scale, requires_grad=False)


class Forgetful(Method):
    zeroes = False


class Layer(nn.Module):
    def __init__(self, method: Method) -> None:
        super().__init__()
        self.quant_method = method
        self.weight = nn.Parameter(torch.zeros(PADDED, SIZE))
        self.unit = nn.Parameter(torch.full((1,), 2.0))


class Model(nn.Module):
    def __init__(self, method: type[Method]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(method()) for _ in range(2))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data[: len(tensor)].copy_(tensor)


class Engine(LiveModel):
    post_processing = Method

    def __init__(self, method: type[Method] = Method) -> None:
        skeleton, constants = build_skeleton(lambda: Model(method), torch.no_grad())
        kept = {
            name: value for name, value in constants.items() if value.numel() == 1
        }  # those of large weights are not
        super().__init__(started(0, method), torch.device("cpu"), skeleton, kept)

    def free_bytes(self) -> int:
        return 1 << 40

    def state(self) -> list[Any]:
        return state(self.live)


def state(model: Any) -> list[Any]:
    return [(layer.weight.tolist(), layer.scale) for layer in model.layers]


def started(seed: int, method: type[Method] = Method) -> Model:
    model: Any = Model(method)
    model.load_weights(weights(seed).items())
    for layer in model.layers:
        layer.quant_method.process_weights_after_loading(layer)
    return model  # type: ignore[no-any-return]


def weights(seed: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(rows, SIZE, generator=random) for i in range(2)}


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_padding_that_post_processing_writes_over_needs_no_tensor(policy: str) -> None:
    engine, manifest = Engine(), manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=False)
    for seed in (1, 2, 0):
        update(installer, manifest, weights(seed))
        assert engine.state() == state(started(seed))


@pytest.mark.parametrize("partial", [False, True])
def test_what_post_processing_reads_must_be_filled(*, partial: bool) -> None:
    for engine, rows in ((Engine(), ROWS - 1), (Engine(Forgetful), ROWS)):
        with pytest.raises(ManifestMismatch, match=r"layers\.0"):
            ModelInstaller(engine).open(manifest_of(weights(0, rows)), "standby", partial=partial)


class Cut(Method):
    """Zeroes as many rows of each weight as its layer says."""

    def process_weights_after_loading(self, layer: Any) -> None:
        for name, rows in layer.rows.items():
            weight = layer.get_parameter(name).detach().clone()
            weight[rows:] = 0
            setattr(layer, name, nn.Parameter(weight * 2, requires_grad=False))


class CutLayer(nn.Module):
    def __init__(self, rows: dict[str, int]) -> None:
        super().__init__()
        self.quant_method, self.rows = Cut(), rows
        self.a = nn.Parameter(torch.zeros(PADDED, SIZE))
        self.b = nn.Parameter(torch.zeros(PADDED, SIZE))


class CutModel(nn.Module):
    zeroes_from: ClassVar[list[dict[str, int]]]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(CutLayer, self.zeroes_from))

    load_weights = Model.load_weights


class OtherWeight(CutModel):
    """Each layer zeroes from row 3 of `a` on. The second one is sent a part of `b`."""

    zeroes_from: ClassVar = [{"a": 3, "b": PADDED}] * 2
    sent: ClassVar = [{"a": 3, "b": PADDED}, {"a": PADDED, "b": 3}]


class OtherRows(CutModel):
    """The second layer zeroes from row 4 of `a` on, and is sent 3 rows."""

    zeroes_from: ClassVar = [{"a": 3, "b": PADDED}, {"a": 4, "b": PADDED}]
    sent: ClassVar = [{"a": 3, "b": PADDED}] * 2


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("model", [OtherWeight, OtherRows])
def test_that_one_layer_zeroes_its_padding_says_nothing_of_the_next_one(model: Any, partial: bool) -> None:
    """Else bytes that nobody sent would be served: 0xFF, which is NaN."""
    live, (skeleton, _) = model(), build_skeleton(model, torch.no_grad())
    for layer in live.layers:
        layer.quant_method.process_weights_after_loading(layer)

    class CutEngine(LiveModel):
        post_processing = Method

        def free_bytes(self) -> int:
            return 1 << 40

    sent = {f"layers.{i}.{n}": torch.ones(rows, SIZE) for i, each in enumerate(model.sent) for n, rows in each.items()}
    installer = ModelInstaller(CutEngine(live, torch.device("cpu"), skeleton, {}))
    with pytest.raises((ManifestMismatch, EngineUnsupported), match=r"layers\.1"):
        installer.open(manifest_of(sent), "standby", partial=partial)
