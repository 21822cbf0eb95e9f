"""Parameters that no checkpoint tensor fills, because post-processing makes them: as SGLang's layers in FP8 have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.errors import ManifestMismatch
from tests.install.installing import segment_of, update
from tests.install.test_streaming import stream, whole
from tests.support.plain_engine import manifest_of

SIZE = 4


class Method:
    """What an engine gives a layer that is quantised."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        raise NotImplementedError


class Quantises(Method):
    """Divides weights by scales that it takes from them: one is a new parameter, one is written over."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.up_scale = nn.Parameter(layer.up.detach().abs().amax(1), requires_grad=False)
        layer.up.data.div_(layer.up_scale[:, None])
        for row in range(SIZE):
            layer.down_scale[row] = layer.down[row].abs().max()
            layer.down.data[row].div_(layer.down_scale[row])


class ScalesItsCache(Method):
    """As SGLang's `BaseKVCacheMethod`: a checkpoint has both scales, or none, or that of the keys."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if layer.key_scale <= 0 and layer.value_scale <= 0:
            key = value = 1.0
        elif layer.value_scale <= 0:
            key = value = float(layer.key_scale)
        else:
            assert layer.key_scale > 0
            key, value = float(layer.key_scale), float(layer.value_scale)
        layer.key_scale.fill_(key)
        layer.value_scale.fill_(value)
        layer.scales = key, value


class Layer(nn.Module):
    def __init__(self, method: Method, **parameters: torch.Tensor) -> None:
        super().__init__()
        self.quant_method = method
        for name, data in parameters.items():
            self.register_parameter(name, nn.Parameter(data, requires_grad=False))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Layer(
            Quantises(),
            up=torch.empty(SIZE, SIZE),
            down=torch.empty(SIZE, SIZE),
            up_scale=torch.ones(SIZE, 2),
            down_scale=torch.ones(SIZE),
            bias=torch.zeros(SIZE),
        )
        self.cache = Layer(ScalesItsCache(), key_scale=torch.tensor(-1.0), value_scale=torch.tensor(-1.0))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


class Engine(LiveModel):
    post_processing = Method

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(started(tensors), torch.device("cpu"), *build_skeleton(Model, torch.no_grad()))

    def free_bytes(self) -> int:
        return 1 << 40


def started(tensors: dict[str, torch.Tensor]) -> Model:
    model = Model()
    model.load_weights(tensors.items())
    for layer in (model.linear, model.cache):
        layer.quant_method.process_weights_after_loading(layer)
    return model


def held(model: nn.Module) -> dict[str, object]:
    return {name: tensor.tolist() for name, tensor in model.named_parameters()} | {"scales": model.cache.scales}


def weights(seed: int, **more: float) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    made = {f"linear.{name}": torch.randn(SIZE, SIZE, generator=random) for name in ("up", "down")}
    made |= {"linear.bias": torch.randn(SIZE, generator=random)}
    return made | {f"cache.{name}": torch.tensor(value) for name, value in more.items()}


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_scales_that_post_processing_makes_need_no_tensor_and_follow_every_update(policy: str) -> None:
    """None of them is in a checkpoint without quantisation."""
    engine = Engine(weights(0))
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=False)
    before = torch.empty(0)
    for seed in (1, 2, 0, 3):
        before = update(installer, manifest, weights(seed))
        assert held(engine.live) == held(started(weights(seed)))
    segment = segment_of(weights(4), manifest)
    installer.prepare(segment, lambda: None)
    installer.install(segment)
    assert held(engine.live) == held(started(weights(4)))
    installer.undo(before if policy == "copy" else None)
    assert held(engine.live) == held(started(weights(3)))


def test_scales_that_post_processing_writes_over_follow_what_is_streamed() -> None:
    engine = Engine(weights(0))
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "streaming", partial=False)
    for seed in (1, 2, 0):
        stream(installer, manifest, weights(seed), whole(manifest))
        assert held(engine.live) == held(started(weights(seed)))


@pytest.mark.parametrize("own", [{"key_scale": 2.0}, {"key_scale": 2.0, "value_scale": 3.0}], ids=["one", "both"])
def test_scales_that_the_engines_checkpoint_filled_must_be_sent(own: dict[str, float]) -> None:
    engine = Engine(weights(0, **own))
    with pytest.raises(ManifestMismatch, match=r"no tensor of the manifest fills .*cache\.key_scale"):
        ModelInstaller(engine).open(manifest_of(weights(0)), "standby", partial=False)
    manifest = manifest_of(weights(0, key_scale=2.0, value_scale=3.0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "standby", partial=False)
    update(installer, manifest, weights(1, key_scale=4.0, value_scale=5.0))
    assert held(engine.live) == held(started(weights(1, key_scale=4.0, value_scale=5.0)))


class ReadsItsCheckpoint(Engine):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.own = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return self.own


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_a_scale_that_the_engines_checkpoint_lacks_too_is_made_of_the_one_that_is_sent(policy: str) -> None:
    """As `kv_scale` in vLLM's and SGLang's caches in FP8: the scale of the keys, which the values share."""
    engine = ReadsItsCheckpoint(weights(0, key_scale=2.0))
    with pytest.raises(ManifestMismatch, match=r"no tensor of the manifest fills .*cache\.key_scale"):
        ModelInstaller(engine).open(manifest_of(weights(0)), policy, partial=False)
    manifest = manifest_of(weights(0, key_scale=2.0))
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=False)
    for seed in (1, 2, 0):
        update(installer, manifest, weights(seed, key_scale=3.0 + seed))
        assert held(engine.live) == held(started(weights(seed, key_scale=3.0 + seed)))


@pytest.mark.parametrize("name", ["linear.up", "linear.down"])
def test_weights_of_which_scales_are_made_must_be_sent(name: str) -> None:
    without = {key: tensor for key, tensor in weights(0).items() if key != name}
    with pytest.raises(ManifestMismatch, match=rf"no tensor of the manifest fills .*{name}"):
        ModelInstaller(Engine(weights(0))).open(manifest_of(without), "standby", partial=False)


def test_a_bias_of_the_constructors_value_must_be_sent() -> None:
    """Post-processing leaves it as it is, and a checkpoint may hold that value."""
    zeros = weights(0) | {"linear.bias": torch.zeros(SIZE)}
    without = {name: tensor for name, tensor in zeros.items() if name != "linear.bias"}
    with pytest.raises(ManifestMismatch, match=r"no tensor of the manifest fills .*linear\.bias"):
        ModelInstaller(Engine(zeros)).open(manifest_of(without), "standby", partial=False)
