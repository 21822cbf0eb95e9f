"""Tensors that a module keeps in an attribute, in whatever holds them: they are followed, or refuse the model by name."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.errors import EngineUnsupported
from tests.install.installing import update
from tests.support.plain_engine import manifest_of


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept


class SlottedAbove(Slotted):
    """Has a `__dict__`, too."""


HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "list": (lambda tensor: [tensor], lambda held: held[0]),
    "set": (lambda tensor: {tensor}, lambda held: next(iter(held))),
    "deque": (lambda tensor: collections.deque([tensor]), lambda held: held[0]),
    "mapping": (lambda tensor: types.MappingProxyType({"kept": tensor}), lambda held: held["kept"]),
    "slot": (Slotted, lambda held: held.kept),
    "slot of a base class": (SlottedAbove, lambda held: held.kept),
    "closure": (lambda tensor: lambda: tensor, lambda held: held()),
    "default": (lambda tensor: lambda kept=tensor: kept, lambda held: held()),
    "keyword default": (lambda tensor: lambda *, kept=tensor: kept, lambda held: held()),
    "partial": (lambda tensor: functools.partial(torch.clone, tensor), lambda held: held.args[0]),
}
"""By kind: makes a holder of a tensor, and returns the tensor in it."""


class Model(nn.Module):
    """`layer.held` holds a view of the layer's weight."""

    def __init__(self, hold: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.layer.held = hold(self.layer.weight.t())

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


class Engine(LiveModel):
    def __init__(self, hold: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(Model(hold), torch.device("cpu"), *build_skeleton(lambda: Model(hold), torch.no_grad()))

    def free_bytes(self) -> int:
        return 1 << 40


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {"layer.weight": torch.randn(2, 2, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_view_of_a_weight_follows_every_update_whatever_holds_it(kind: str) -> None:
    hold, held_in = HOLDERS[kind]
    engine, manifest = Engine(hold), manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "standby", partial=False)
    for seed in (1, 2, 3):
        update(installer, manifest, weights(seed))
        assert torch.equal(held_in(engine.live.layer.held), weights(seed)["layer.weight"].t())  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_tensor_that_nothing_explains_refuses_the_model_whatever_holds_it(kind: str) -> None:
    engine = Engine(HOLDERS[kind][0])
    engine.live.layer.held = HOLDERS[kind][0](torch.ones(3))  # type: ignore[union-attr]
    with pytest.raises(EngineUnsupported, match=r"keeps tensors that an update might leave behind: layer\.held\."):
        ModelInstaller(engine).open(manifest_of(weights(0)), "standby", partial=False)
