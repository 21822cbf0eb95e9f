"""Parts of a fused layer that fill one place of the engine, such as a scale that they share: right, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.errors import ManifestMismatch, TransportUnavailable
from inference_plugin.wire.messages import BoxDigest
from tests.install.installing import segment_of, update
from tests.support.plain_engine import manifest_of

SIZE = 4


class Model(nn.Module):
    """A fused pair of layers with one scale, and one shape, for both; `staggered`: two scales that overlap in part."""

    def __init__(self, staggered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * SIZE, SIZE), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(3 if staggered else 2), requires_grad=False)
        self.shape = nn.Parameter(torch.empty(2, dtype=torch.int64), requires_grad=False)
        self.staggered = staggered

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            part, _, kind = name.partition(".")
            second = int(part == "up")
            if kind == "weight":
                self.weight.data[second * SIZE : (second + 1) * SIZE].copy_(tensor)
            elif kind == "scale":
                self.scale.data[second * self.staggered :][:2].copy_(tensor)
            else:
                self.shape.data.copy_(tensor)


class Engine(LiveModel):
    post_processing = nn.Identity

    def __init__(self, staggered: bool = False) -> None:
        live = Model(staggered)
        live.load_weights(weights(0).items())
        skeleton = build_skeleton(lambda: Model(staggered), torch.no_grad())
        super().__init__(live, torch.device("cpu"), *skeleton)

    def free_bytes(self) -> int:
        return 1 << 40


def weights(seed: int, *, apart: float = 0.0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    scale = torch.rand(2, generator=random)
    made: dict[str, torch.Tensor] = {}
    for part, rows in (("gate", SIZE), ("up", SIZE + seed)):
        made[f"{part}.weight"] = torch.randn(SIZE, SIZE, generator=random)
        made[f"{part}.scale"] = scale + (apart if part == "up" else 0.0)
        made[f"{part}.shape"] = torch.tensor([rows, SIZE])
    return made


def state(model: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in model.named_parameters()}


def cold(seed: int) -> dict[str, list[float]]:
    model = Model()
    model.load_weights(weights(seed).items())
    return state(model)


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_tensors_that_share_a_place_are_installed_where_they_are_equal_and_refused_where_they_are_not(
    policy: str,
) -> None:
    engine = Engine()
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    terms = installer.open(manifest, policy, partial=False)
    assert terms.mechanism == "plan" and {box.tensor for box in terms.needs} == set(range(6)), "all of them are checked"
    for seed in (1, 2, 0):
        update(installer, manifest, weights(seed))
        assert state(engine.live) == cold(seed)
    with pytest.raises(ManifestMismatch, match=r"in one place differ: gate\.scale and up\.scale") as raised:
        installer.prepare(segment_of(weights(1, apart=1e-3), manifest), lambda: None)
    assert raised.value.hint and state(engine.live) == cold(0)
    unreadable = {found[0] for found in installer.read_back() if isinstance(found, tuple)}
    read = {found.name for found in installer.read_back() if isinstance(found, BoxDigest)}
    assert unreadable == {"gate.scale", "gate.shape"} and read == set(weights(0)) - unreadable


def test_a_zone_has_no_place_for_both() -> None:
    with pytest.raises(TransportUnavailable, match="fill one place"):
        ModelInstaller(Engine()).open(manifest_of(weights(0)), "standby", partial=False, zone=True)


def test_what_overlaps_in_part_is_refused_when_the_group_is_opened() -> None:
    with pytest.raises(ManifestMismatch, match="fill the same elements: scale"):
        ModelInstaller(Engine(staggered=True)).open(manifest_of(weights(0)), "standby", partial=False)
