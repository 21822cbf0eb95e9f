"""The second instance of a model that an engine's file builds without weights."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.wire.errors import EngineUnsupported


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


class MovesItsParts(nn.Module):
    """Moves what it has made to the engine's device, as Kimi-K2.5 in vLLM."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Norm(8).to(device="cpu", dtype=torch.bfloat16)
        self.projector = Norm(8).to("cpu")


def test_a_constructor_may_move_a_part_of_the_model_to_a_device_and_to_a_dtype() -> None:
    move = nn.Module.to
    model, constants = build_skeleton(MovesItsParts, torch.no_grad())
    assert all(parameter.is_meta for parameter in model.parameters())
    dtypes = {"tower.weight": torch.bfloat16, "projector.weight": torch.float32}
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes
    assert {name: held.dtype for name, held in constants.items()} == dtypes
    assert nn.Module.to is move


LAYERS: dict[str, nn.Module] = {}
"""As an engine has them: `vllm.model_executor.layers.hpc.rope_norm._hpc_rope_norm_instances`, for one."""


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_constructor_enters_into_tables_of_the_process_is_not_there_afterwards(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Where forward looks modules up by name, the live model would compute with those of the skeleton."""
    live, ropes = {"norm": Norm(8), "gone": Norm(8)}, {"rope": Norm(8)}
    for name, module in live.items():
        monkeypatch.setitem(LAYERS, name, module)
    rope = ropes["rope"]

    def make() -> nn.Module:
        assert not ropes, "a constructor takes what is there for its own"
        LAYERS["norm"] = LAYERS["another"] = ropes["rope"] = Norm(8)
        del LAYERS["gone"]
        if fails:
            raise ValueError
        return LAYERS["norm"]

    with pytest.raises(EngineUnsupported) if fails else nullcontext():
        build_skeleton(make, torch.no_grad(), ropes)
    assert live == LAYERS and ropes == {"rope": rope}
