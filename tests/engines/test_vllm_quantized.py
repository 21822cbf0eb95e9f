"""A trainer in bfloat16 into a vLLM that was started from a quantised checkpoint: five updates there and back, each a fresh
engine of the checkpoint that other code would have made of the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inference_plugin.wire.errors import ManifestMismatch
from tests.support.checkpoints import load, rewrite
from tests.support.models import make_llama
from tests.support.quantising import config_of, quantised
from tests.support.trials import House, trial
from trainer_adapters import ModuleAdapter, QuantizedAdapter, SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 32


@pytest.fixture(scope="module")
def house(runtime: Path) -> Iterator[House]:
    one = House(runtime)
    yield one
    one.close()


@pytest.mark.parametrize("install", ["copy", "standby"])
@pytest.mark.parametrize("kind", ["int8 per channel", "fp8 in blocks"])
def test_a_trainer_in_bfloat16_updates_an_engine_of_a_quantised_checkpoint(
    house: House, tmp_path: Path, kind: str, install: str
) -> None:
    weights: dict[Path, dict[str, torch.Tensor]] = {}
    for seed in (1, 2):
        model = make_llama(tmp_path / str(seed), seed=seed, dtype=torch.bfloat16)
        weights[model] = load(model)
        rewrite(model, quantised(weights[model], kind, BLOCK), quantization_config=config_of(kind, BLOCK))
    served, other = weights

    def source(target: Path) -> QuantizedAdapter:
        return QuantizedAdapter(ModuleAdapter(weights[target]), served)

    outcome = trial(house, served, other, plain=False, install=install, source=source, dtype="bfloat16")
    assert (outcome.end, outcome.after) == ("right", 5), outcome
    with SyncManager(timeout_s=60) as manager:
        for dtype in (None, "engine", "bfloat16"):
            with pytest.raises(ManifestMismatch, match=r"holds quantised weights.*QuantizedAdapter"):
                manager.update(weights[other], dtype=dtype)
