"""Live parameters are read back in portions: none is long to read, and together they are everything."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from inference_plugin.install import replay
from inference_plugin.install.storages import storage_views
from tests.install.test_plan import Bag, Case, cut

PORTION_BYTES = 256


def whole(model: nn.Module, name: str, tensor: Tensor) -> None:
    model.get_parameter("w").data.copy_(tensor)


def columns(model: nn.Module, name: str, tensor: Tensor) -> None:
    model.get_parameter("w").data.copy_(tensor[..., 8:24])


def interleaved(model: nn.Module, name: str, tensor: Tensor) -> None:
    model.get_parameter("gate").data.copy_(tensor[:, ::2])
    model.get_parameter("up").data.copy_(tensor[:, 1::2])


CASES = {
    "a matrix": Case(lambda: Bag({"w": (100, 8)}), whole, {"w": (100, 8)}),
    "a vector": Case(lambda: Bag({"w": (1000,)}), whole, {"w": (1000,)}),
    "one long row": Case(lambda: Bag({"w": (1, 1000)}), whole, {"w": (1, 1000)}),
    "columns": Case(lambda: Bag({"w": (100, 16)}), columns, {"w": (100, 32)}),
    "a stack": Case(lambda: Bag({"w": (6, 20, 8)}), whole, {"w": (6, 20, 8)}),
    "interleaved rows": Case(lambda: Bag({"gate": (4, 30, 8), "up": (4, 30, 8)}), interleaved, {"w": (4, 60, 8)}),
}


@pytest.mark.parametrize("name", CASES)
def test_no_portion_is_larger_than_it_may_be_and_together_they_are_everything(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "PORTION_BYTES", PORTION_BYTES)
    case = CASES[name]
    plan = case.trace()
    sources = {n: torch.randn(shape) for n, shape, _ in case.tensors}
    live = case.make()
    with torch.no_grad():
        case.loader(live)(sources.items())
    seen = {n: torch.zeros(shape, dtype=torch.int) for n, shape, _ in case.tensors}
    portions = 0
    for source, box, held in replay.read_back(plan.placements, storage_views(live)):
        assert held.nbytes <= PORTION_BYTES
        assert torch.equal(held, cut(sources[source], box.offsets, box.sizes))
        cut(seen[source], box.offsets, box.sizes).add_(1)
        portions += 1
    expected = torch.zeros_like(seen["w"])
    (columns_of if name == "columns" else everything)(expected).add_(1)
    assert torch.equal(seen["w"], expected) and portions > 1


def everything(tensor: Tensor) -> Tensor:
    return tensor


def columns_of(tensor: Tensor) -> Tensor:
    return tensor[..., 8:24]
