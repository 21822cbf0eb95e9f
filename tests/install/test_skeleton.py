"""The second instance of a model that an engine's file builds without weights."""

from __future__ import annotations

import torch
from torch import nn

from inference_plugin.engines.skeleton import build_skeleton


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 3.0))


class ReadsANumber(nn.Module):
    """Its constructor looks at the value of a parameter, in a module that it drops, and of one that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.starts_at = float(Norm(1).weight)
        self.norm = Norm(8)
        self.scale = nn.Parameter(torch.empty(1))
        self.again = self.scale
        with torch.no_grad():
            self.scale.fill_(5.0)
        self.is_five = bool(self.scale == 5)


def test_a_constructor_may_read_the_value_of_a_parameter_of_one_element() -> None:
    register = nn.Module.register_parameter
    skeleton = build_skeleton(ReadsANumber, torch.no_grad())
    model = skeleton.model
    assert (model.starts_at, model.is_five) == (3.0, True)
    assert {name: (p.device.type, tuple(p.shape)) for name, p in model.named_parameters()} == {
        "scale": ("meta", (1,)),
        "norm.weight": ("meta", (8,)),
    }
    assert model.again is model.scale
    assert {name: held.tolist() for name, held in skeleton.constants.items()} == {
        "scale": [5.0],
        "again": [5.0],
        "norm.weight": [3.0] * 8,
    }
    assert nn.Module.register_parameter is register


def test_what_a_constructor_enters_into_tables_of_the_engine_is_not_there_afterwards() -> None:
    """Where forward looks modules up by name, the live model would compute with those of the skeleton."""
    live = Norm(8)
    modules, others = {"norm": live}, {}

    def make() -> nn.Module:
        assert "norm" not in modules, "a constructor takes what is there for its own"
        modules["norm"], others["of the skeleton"] = Norm(8), 1
        return modules["norm"]

    skeleton = build_skeleton(make, torch.no_grad(), modules, others)
    assert skeleton.model is not live
    assert (modules, others) == ({"norm": live}, {})
