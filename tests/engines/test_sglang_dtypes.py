"""`dtype="engine"` with a real SGLang: a trainer's tensors travel in the dtypes of the engine's own model, there and back.

GLM4-MoE in bfloat16: SGLang keeps in float32 what experts are chosen by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.messages import InstallPolicy
from tests.support.checkpoints import load, rewrite
from tests.support.families import FAMILIES, make_versions
from tests.support.family_trials import LOGPROBS, SglangAnswers
from tests.support.trials import COUNT, PROMPTS
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHOOSING = ("model.layers.*.mlp.gate.e_score_correction_bias", "model.layers.*.mlp.gate.weight")


@pytest.mark.parametrize("install", ["standby", "copy"])
@pytest.mark.parametrize("trainer", ["float32", "bfloat16"])
def test_a_trainer_in_any_dtype_sends_what_sglang_keeps_there_and_back(
    runtime: Path, tmp_path: Path, trainer: str, install: InstallPolicy
) -> None:
    family, fresh = FAMILIES["glm4_moe"], {}
    models = make_versions(family, tmp_path)
    for model in models:
        rewrite(model, {name: tensor.to(getattr(torch, trainer)) for name, tensor in load(model).items()})
    for model in reversed(models):
        with SglangAnswers(runtime) as engine:
            engine.open(model, dtype="bfloat16", disable_radix_cache=True, **family.sglang)
            say = functools.partial(engine.call, "say", prompts=PROMPTS, count=COUNT, logprobs=LOGPROBS)
            fresh[model] = say()
            if model == models[0]:
                check_there_and_back(say, models, fresh, install)
    assert fresh[models[0]] != fresh[models[1]]


def check_there_and_back(
    say: Callable[[], object], models: tuple[Path, Path], fresh: dict[Path, object], install: InstallPolicy
) -> None:
    sets = [load(model) for model in models]
    with SyncManager(install=install, timeout_s=60) as manager:
        with pytest.raises(ManifestMismatch, match="dtypes differ"):
            manager.update(sets[1], 1)
        assert say() == fresh[models[0]]
        for version, which in enumerate((1, 0, 1), 1):
            report = manager.update(sets[which], version, dtype="engine")
            assert report.engine_dtypes == dict.fromkeys(CHOOSING, "float32") | {"*": "bfloat16"}
            assert say() == fresh[models[which]]
        assert manager.verify(sets[1], dtype="engine").ok
