"""Loaders that give each run of a submodule's tensors to that one's own loader, as vLLM's do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.install.plan import grouped
from tests.install.installing import update
from tests.support.plain_engine import manifest_of

Named = Iterable[tuple[str, torch.Tensor]]


class Scaled(nn.Module):
    """Takes codes and their scale, if they come in one call; drops them if not. As DeepSeek-V3.2's indexer in vLLM."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2), requires_grad=False)

    def load_weights(self, tensors: Named) -> None:
        given = dict(tensors)
        if len(given) == 2:
            self.weight.data.copy_(given["codes"] * given["scale"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = Scaled(), nn.Linear(2, 2, bias=False)

    def load_weights(self, tensors: Named) -> None:
        for child, run in itertools.groupby(tensors, lambda pair: pair[0].partition(".")[0]):
            named = [(name.partition(".")[2], tensor) for name, tensor in run]
            if child == "model":
                self.model.load_weights(named)
            else:
                self.lm_head.weight.data.copy_(named[0][1])


class Engine(LiveModel):
    def free_bytes(self) -> int:
        return 1 << 30


def weights(value: float) -> dict[str, torch.Tensor]:
    """In an order that separates the codes from their scale."""
    scale, head, codes = torch.tensor([2.0]), torch.full((2, 2), value), torch.full((2, 2), value)
    return {"model.scale": scale, "lm_head.weight": head, "model.codes": codes}


def test_tensors_that_begin_alike_reach_a_loader_together_in_whatever_order_the_trainer_sends_them() -> None:
    live = Model()
    live.load_weights(sorted(weights(1.0).items()))
    engine = Engine(live, torch.device("cpu"), *build_skeleton(Model, torch.no_grad()))
    installer, manifest = ModelInstaller(engine), manifest_of(weights(0.0))
    installer.open(manifest, "standby", partial=False)
    for value in (3.0, 4.0):
        update(installer, manifest, weights(value))
        assert live.model.weight.tolist() == [[2 * value] * 2] * 2
        assert live.lm_head.weight.tolist() == [[value] * 2] * 2


def test_names_are_grouped_at_every_level_and_otherwise_stay_in_their_order() -> None:
    names = ["m.1.b", "h", "m.0.a", "m.1.a", "m.10.a", "m.0.b.c", "h.x"]
    assert grouped(names) == ["m.1.b", "m.1.a", "m.0.a", "m.0.b.c", "m.10.a", "h", "h.x"]
    assert grouped(sorted(names)) == sorted(names)
    deep = "a" + ".a" * 5000  # deeper than Python recurses
    assert grouped(["b", deep, "b.c"]) == ["b", "b.c", deep]
