"""A trainer in bfloat16 into a vLLM that was started from a quantised checkpoint: five updates there and back, each a fresh
engine of the checkpoint that other code would have made of the trainer's weights."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from inference_plugin.wire.errors import ManifestMismatch
from tests.support.checkpoints import load, rewrite
from tests.support.engines import ROOT
from tests.support.models import make_llama
from tests.support.quantised import that_start
from tests.support.quantising import INT4, config_of, quantised
from tests.support.trials import House, trial
from tests.trainers.launching import run_ranks
from trainer_adapters import ModuleAdapter, QuantizedAdapter, SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 32
KINDS = ("int8 per channel", "fp8 in blocks", INT4, "nvfp4", "modelopt fp8", "modelopt nvfp4", "mxfp8")
"""The first and third have kernels of vLLM's for CPUs. NVFP4 and MXFP8 it multiplies as on a GPU without a kernel for them."""


@pytest.fixture(scope="module")
def house(runtime: Path) -> Iterator[House]:
    one = House(runtime)
    yield one
    one.close()


Served = Callable[[str], dict[Path, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Of one kind: two quantised checkpoints, and the weights that they were made of."""

    @functools.cache
    def make(kind: str) -> dict[Path, dict[str, torch.Tensor]]:
        weights = {}
        for seed in (1, 2):
            model = make_llama(tmp_path_factory.mktemp("served") / "model", seed=seed, dtype=torch.bfloat16)
            weights[model] = load(model)
            rewrite(model, quantised(weights[model], kind, BLOCK), quantization_config=config_of(kind, BLOCK))
        return weights

    return make


@pytest.mark.parametrize("install", ["copy", "standby"])
@pytest.mark.parametrize("kind", that_start(KINDS))
def test_a_trainer_in_bfloat16_updates_an_engine_of_a_quantised_checkpoint(
    house: House, served: Served, kind: str, install: str
) -> None:
    weights = served(kind)
    one, other = weights

    def source(target: Path) -> QuantizedAdapter:
        return QuantizedAdapter(ModuleAdapter(weights[target]), one)

    outcome = trial(house, one, other, plain=False, install=install, source=source, dtype="bfloat16")
    assert (outcome.end, outcome.after) == ("right", 5), outcome
    with SyncManager(timeout_s=60) as manager:
        for dtype in (None, "engine", "bfloat16"):
            with pytest.raises(ManifestMismatch, match=r"quantised.*QuantizedAdapter\(source, checkpoint\)"):
                manager.update(weights[other], dtype=dtype)


@pytest.mark.parametrize("kind", that_start(KINDS))
def test_ranks_that_share_blocks_update_it_after_each_step(
    house: House, served: Served, tmp_path: Path, kind: str
) -> None:
    """Two steps of the example, whose shards end within blocks."""
    (one, weights), _ = served(kind).items()
    house.open(one, plain=False, dtype="bfloat16")
    plain, exported = tmp_path / "plain", tmp_path / "exported"
    shutil.copytree(one, plain)
    rewrite(plain, weights, quantization_config=None)
    script = ROOT / "examples" / "trainers" / "quantized.py"
    printed = run_ranks(script, 2, tmp_path, str(plain), str(one), "--export", str(exported))
    assert printed.count("committed") == 2
    said = house.say()
    rewrite(exported, quantised(load(exported), kind, BLOCK), quantization_config=config_of(kind, BLOCK))
    assert said == house.fresh_says(exported, plain=False, dtype="bfloat16")
