"""vLLM's models that post-process as a whole: which of them can be updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from inference_plugin.engines.vllm.whole_model import finish_nothing_in, whole_finishers, why_whole
from inference_plugin.install.graph import Boundary


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(4, 2, device="meta"))
        self.sums: torch.Tensor | None = None


class Inner(nn.Module):
    """As DeepSeek-V4's in vLLM."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.start_layer, self.end_layer = 0, 2

    def finalize_mhc_broadcast_weights(self) -> None:
        first: Any = self.layers[self.start_layer]
        if first.sums is None:
            first.sums = first.mix.detach().sum(1)
        else:
            first.sums.copy_(first.mix.detach().sum(1))


class Model(nn.Module):
    def __init__(self, act: Callable[[Any], object]) -> None:
        super().__init__()
        self.model, self.act = Inner(), act

    def load_weights(self) -> None:
        self.process_weights_after_loading()

    def process_weights_after_loading(self) -> None:
        self.act(self)


class WithATower(nn.Module):
    """As DeepSeek-V4's class for images."""

    def __init__(self, language_model: Model) -> None:
        super().__init__()
        self.language_model = language_model

    def load_weights(self) -> None:
        self.language_model.load_weights()

    def process_weights_after_loading(self) -> None:
        self.language_model.process_weights_after_loading()
        self._weights_finalized = True


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda model: [layer for layer in model.modules() if isinstance(layer, nn.Linear)], None),
        (lambda model: model.model.finalize_mhc_broadcast_weights(), None),
        (lambda model: model.model.layers[1].mix.is_cuda, "uses"),
        (lambda model: model.model.layers[1].mix.detach().sum(), "uses"),
        (lambda model: setattr(model.model.layers[1], "sums", 1), "as a whole"),
        (lambda model: setattr(model.model.layers[1], "mix", None), "as a whole"),
        (lambda model: model.absent, "absent"),
    ],
)
def test_a_model_that_post_processes_as_a_whole_is_refused_unless_that_does_nothing_or_is_known(
    act: Callable[[Any], object], why: str | None
) -> None:
    """What the weights are told by a look at them, such as where they lie, may decide what is done to the engine's own."""
    skeleton = Model(act)
    finish_nothing_in(skeleton)
    skeleton.load_weights()
    assert skeleton.model.layers[0].sums is None
    found = why_whole(skeleton, Boundary())
    assert found is None if why is None else found is not None and why in found and "Model" in found


@pytest.mark.parametrize("within", ["", "language_model."])
def test_what_a_model_sums_up_of_its_first_layer_follows_each_update(within: str) -> None:
    model = Model(lambda model: model.model.finalize_mhc_broadcast_weights())
    skeleton = WithATower(model) if within else model
    assert why_whole(skeleton, Boundary()) is None
    finish_nothing_in(skeleton)
    skeleton.load_weights()
    ((name, finish),) = whole_finishers(skeleton).items()
    assert name == f"{within}model.layers.0"
    stand_in: Any = Layer()
    stand_in.mix = nn.Parameter(torch.arange(8.0).view(4, 2))
    finish(stand_in)
    assert stand_in.sums.tolist() == [1, 5, 9, 13]
    assert model.model.layers[0].sums is None


def test_a_model_without_such_a_method_is_not_asked() -> None:
    skeleton = nn.Sequential(nn.Linear(2, 2))
    finish_nothing_in(skeleton)
    assert why_whole(skeleton, Boundary()) is None and not whole_finishers(skeleton)
