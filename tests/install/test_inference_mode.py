"""An engine whose thread runs in torch's inference mode, as SGLang's does: tensors that are made there have no version by which a
write to them shows."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.messages import BoxDigest
from tests.install.installing import segment_of
from tests.support.plain_engine import manifest_of

SIZE = 4


class Derives:
    """Packs the weight, and writes what it derives into tensors that are there: an attribute's, and a buffer's."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.sums.copy_(layer.weight.sum(1))  # type: ignore[union-attr, operator]
        layer.greatest.copy_(layer.weight.amax(1))  # type: ignore[union-attr, operator]
        layer.weight.copy_(layer.weight.flip(1))  # type: ignore[union-attr, operator]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Derives()
        self.weight = nn.Parameter(torch.empty(SIZE, SIZE), requires_grad=False)
        self.sums = torch.zeros(SIZE)
        self.register_buffer("greatest", torch.zeros(SIZE), persistent=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)

    def loaded(self, seed: int) -> Model:
        self.load_weights(weights(seed).items())
        with torch.no_grad():
            self.layer.quant_method.process_weights_after_loading(self.layer)
        return self

    def held(self) -> list[list[float]]:
        return [t.tolist() for t in (self.layer.sums, self.layer.greatest, self.layer.weight)]  # type: ignore[operator]


class Engine(LiveModel):
    post_processing = Derives

    def __init__(self) -> None:
        skeleton = build_skeleton(Model, torch.no_grad())
        super().__init__(Model().loaded(0), torch.device("cpu"), *skeleton)

    def free_bytes(self) -> int:
        return 1 << 40


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {"layer.weight": torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("policy", ["copy", "standby", "streaming"])
def test_what_post_processing_writes_in_place_follows_updates_in_inference_mode_and_is_read_back(policy: str) -> None:
    engine, manifest = Engine(), manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=False)
    for seed in (1, 2, 3):
        segment = segment_of(weights(seed), manifest)
        if policy != "streaming":
            installer.prepare(segment, lambda: None)
        with torch.inference_mode():
            if policy == "streaming":
                installer.place(manifest.whole(0), weights(seed)["layer.weight"])
            installer.install(segment)
            installer.finish()
            assert engine.live.held() == Model().loaded(seed).held()  # type: ignore[operator]
            read = [box for box in installer.read_back() if isinstance(box, BoxDigest)]
        assert [box.name for box in read] == ["layer.weight"]
        assert read == [box for box in installer.read_back() if isinstance(box, BoxDigest)]
