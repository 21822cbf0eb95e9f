"""A core of the families of `make models`, those whose weights an engine derives, computes while loading, or makes anew.

What each trial asks stands in `family_trials`: five updates, there and back, each held against a fresh engine bit for bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_plugin.wire.errors import EngineUnsupported, ManifestMismatch
from inference_plugin.wire.messages import InstallPolicy
from tests.support.checkpoints import load
from tests.support.engines import Driver
from tests.support.families import FAMILIES, make_versions
from tests.support.family_trials import Host, SglangAnswers, SglangHost, VllmHost, run_trial
from tests.support.reachable import differences
from tests.support.trials import COUNT, PROMPTS, whole
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VLLM = [
    *("deepseek_v2", "deepseek_v3", "mamba2", "phi", "falcon", "hunyuan_moe", "bert-classifier", "qwen3-classifier"),
    *("llama-w4a16", "llama-w8a8-int8-static", "llama-gptq", "llama-awq", "llama-fp8-by-the-engine"),
]
SGLANG: list[tuple[str, InstallPolicy]] = [
    *((name, "standby") for name in ("glm4_moe", "gemma2", "helium", "apertus", "bert-embedding", "minicpm3")),
    ("deepseek_v3", "copy"),
]


@pytest.fixture(scope="module")
def vllm(runtime: Path) -> Iterator[Host]:
    host = VllmHost(runtime)
    yield host
    host.close()


@pytest.mark.parametrize("install", ["copy", "standby"])
@pytest.mark.parametrize("name", VLLM)
def test_a_family_in_vllm_is_a_fresh_engine_after_every_update(
    vllm: Host, tmp_path: Path, name: str, install: InstallPolicy
) -> None:
    family = FAMILIES[name]
    trial = run_trial(vllm, family, make_versions(family, tmp_path), plain=False, install=install)
    assert (trial.outcome, trial.updates) == ("right", 5), trial


def test_the_pooler_that_an_embedding_model_passes_over_is_reported_and_a_misspelt_one_refused(
    vllm: Host, tmp_path: Path
) -> None:
    family = FAMILIES["bert-embedding"]
    model_a, model_b = make_versions(family, tmp_path)
    vllm.open(family, model_b, plain=True)
    fresh = vllm.say(family)
    vllm.open(family, model_a, plain=True)
    tensors = load(model_b)
    with SyncManager(install="standby", timeout_s=60) as manager:
        misspelt = {name.replace("pooler.dense.bias", "pooler.dense.bais"): tensor for name, tensor in tensors.items()}
        with pytest.raises(ManifestMismatch, match=r"no place for: pooler\.dense\.bais \(1 in all\)"):
            manager.update(misspelt, 1)
        (replica,) = manager.update(tensors, 1).replicas
        assert set(replica.passed_over) == {"pooler.dense.bias", "pooler.dense.weight"}
        assert vllm.say(family) == fresh
        (verified,) = manager.verify(tensors).replicas
    assert verified.differ == ()
    assert [words.partition(": ")[0] for words in verified.unreadable] == ["passed over by the engine's loader"]


@pytest.mark.parametrize(("name", "install"), SGLANG)
def test_a_family_in_sglang_is_a_fresh_engine_after_every_update(
    runtime: Path, tmp_path: Path, name: str, install: InstallPolicy
) -> None:
    family, host = FAMILIES[name], SglangHost(runtime)
    try:
        trial = run_trial(host, family, make_versions(family, tmp_path), plain=True, install=install)
    finally:
        host.close()
    assert (trial.outcome, trial.updates) == ("right", 5), trial


@pytest.mark.parametrize("name", ["deepseek_v2", "mamba2"])
def test_what_each_rank_derives_from_its_shard_follows_the_updates(runtime: Path, tmp_path: Path, name: str) -> None:
    """Each rank holds what a fresh engine's does, in everything that its modules reach. Tokens are not compared: with two
    ranks a DeepSeek-V2 of this engine does not repeat its own."""
    family = FAMILIES[name]
    model_a, model_b = make_versions(family, tmp_path)
    fresh = {}
    for model in (model_b, model_a):
        with Driver(runtime) as engine:
            engine.open(model, tensor_parallel_size=2, dtype=family.dtype, **family.vllm)
            fresh[model] = engine.rpc("ext_state")
            if model == model_a:
                with SyncManager(install="standby", timeout_s=60) as manager:
                    for version, target in enumerate((model_b, model_a, model_b, model_a)):
                        manager.update(whole(target), version)
                        for held, wanted in zip(engine.rpc("ext_state"), fresh[target], strict=True):
                            assert differences(held, wanted) == []
                    assert [replica.differ for replica in manager.verify(whole(model_a)).replicas] == [()]
    assert differences(fresh[model_a][1], fresh[model_b][1])


@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3"])
def test_what_each_rank_of_sglang_derives_from_its_shard_follows_the_updates(
    runtime: Path, tmp_path: Path, name: str
) -> None:
    """With each policy there and back, twice; with two ranks each derives the weights of its own heads."""
    family = FAMILIES[name]
    model_a, model_b = make_versions(family, tmp_path)
    fresh = {}
    for model in (model_b, model_a):
        with SglangAnswers(runtime, tp=2) as engine:
            engine.open(model, dtype=family.dtype, disable_radix_cache=True, **family.sglang)
            said = functools.partial(engine.call, "say", prompts=PROMPTS, count=COUNT, logprobs=3)
            fresh[model] = said()
            assert said() == fresh[model], "the engine does not repeat itself"
            versions = itertools.count(1)
            for install in ("standby", "copy", "streaming") if model == model_a else ():
                with SyncManager(install=install, timeout_s=60) as manager:
                    for target in (model_b, model_a, model_b, model_a):
                        manager.update(whole(target), next(versions))
                        assert said() == fresh[target]
                    assert [replica.differ for replica in manager.verify(whole(model_a)).replicas] == [()]
    assert fresh[model_a] != fresh[model_b]


def test_an_engine_that_quantises_by_a_maximum_over_all_ranks_refuses_and_serves_on(
    runtime: Path, tmp_path: Path
) -> None:
    family = FAMILIES["llama-fp8-by-the-engine"]
    model_a, model_b = make_versions(family, tmp_path)
    with Driver(runtime) as engine:
        engine.open(model_a, tensor_parallel_size=2, dtype=family.dtype, **family.vllm)
        served = engine.tokens(PROMPTS, COUNT)
        words = r"post-processing of model\.layers\.\d+\.\S+ talks to the other ranks"
        with SyncManager(timeout_s=60) as manager, pytest.raises(EngineUnsupported, match=words):
            manager.update(whole(model_b), 1)
        assert engine.tokens(PROMPTS, COUNT) == served
