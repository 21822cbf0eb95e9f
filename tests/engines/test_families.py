"""A core of the families of `make models`, those whose weights an engine derives, computes while loading, or makes anew.

What each trial asks stands in `family_trials`: five updates, there and back, each held against a fresh engine bit for bit.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inference_plugin.wire.errors import CommitFailed, EngineUnsupported, ManifestMismatch
from inference_plugin.wire.messages import InstallPolicy
from tests.support.checkpoints import load
from tests.support.engines import Driver
from tests.support.families import FAMILIES, make_versions
from tests.support.family_trials import Host, SglangAnswers, SglangHost, VllmHost, run_trial
from tests.support.quantised import that_start
from tests.support.reachable import differences
from tests.support.trials import COUNT, PROMPTS, whole
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VLLM = [
    *("deepseek_v2", "deepseek_v3", "mamba2", "phi", "falcon", "hunyuan_moe", "bert-classifier", "qwen3-classifier"),
    *("llama-w4a16", "llama-w8a8-int8-static", "llama-gptq", "llama-awq", "llama-fp8-by-the-engine"),
    *("llama-fp8_per_tensor-without-its-kernel", "llama-compressed-nvfp4", "llama-fp8-one-kv-scale"),
]
SGLANG: list[tuple[str, InstallPolicy]] = [
    *((name, "standby") for name in ("glm4_moe", "gemma2", "helium", "apertus", "bert-embedding", "minicpm3")),
    ("deepseek_v3", "copy"),
    # with stand-ins for kernels
    *((name, "standby") for name in ("gpt_oss", "gemma4", "qwen3_next", "qwen3_moe-fp8-by-sglang", "kimi-k2.5")),
    *((name, "copy") for name in ("llama-fp8-by-sglang", "qwen3-fp8-blocks", "llama-fp8-static", "kimi_linear")),
    ("longcat_flash", "copy"),
    ("bailing_moe_v3", "copy"),
    # as on a GPU
    ("glm_moe_dsa-fp8-blocks", "standby"),
    ("qwen3_moe-w4a16", "copy"),
    ("glm5-next", "copy"),
]


@pytest.fixture(scope="module")
def vllm(runtime: Path) -> Iterator[Host]:
    host = VllmHost(runtime)
    yield host
    host.close()


@pytest.mark.parametrize("install", ["copy", "standby"])
@pytest.mark.parametrize("name", that_start(VLLM))
def test_a_family_in_vllm_is_a_fresh_engine_after_every_update(
    vllm: Host, tmp_path: Path, name: str, install: InstallPolicy
) -> None:
    family = FAMILIES[name]
    trial = run_trial(vllm, family, make_versions(family, tmp_path), plain=False, install=install)
    assert (trial.outcome, trial.updates) == ("right", 5), trial


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v32-fp8-blocks", "kimi_linear", "qwen3_moe-w4a16"])
def test_a_family_that_vllm_has_for_gpus_only_holds_a_fresh_engine_s_weights_after_every_update(
    vllm: Host, tmp_path: Path, name: str
) -> None:
    """It computes nothing on a CPU. Its weights are loaded and post-processed by vLLM's own code."""
    family = FAMILIES[name]
    trial = run_trial(vllm, family, make_versions(family, tmp_path), plain=True, install="standby")
    assert (trial.outcome, trial.updates) == ("right", 5), trial


def test_the_text_model_of_qwen_3_5_is_a_fresh_engine_after_every_update_under_every_policy(
    vllm: Host, tmp_path: Path
) -> None:
    """Its engine's process also has torchvision, which vLLM's module of the model imports."""
    family = FAMILIES["qwen3_5_moe_text"]
    versions = make_versions(family, tmp_path)
    policies: list[InstallPolicy] = ["standby", "copy"]
    for install in policies:
        trial = run_trial(vllm, family, versions, plain=False, install=install)
        assert (trial.outcome, trial.updates, trial.verified) == ("right", 5, "verified"), trial


def test_learned_rotary_embeddings_that_vllm_sums_up_in_its_first_step_are_summed_up_anew_after_every_update(
    vllm: Host, tmp_path: Path
) -> None:
    """InternS1-Pro. Its engine's process is that of the test before."""
    family = FAMILIES["interns1-pro"]
    trial = run_trial(vllm, family, make_versions(family, tmp_path), plain=True, install="copy")
    assert (trial.outcome, trial.updates, trial.words) == ("right", 5, ""), trial


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
        (other,) = manager.verify(misspelt).replicas
    assert verified.differ == () and other.differ == ("held by no rank: pooler.dense.bais (1 in all)",)
    assert [words.partition(": ")[0] for words in verified.unreadable] == ["passed over by the engine's loader"]


def test_a_trainer_in_bfloat16_sends_what_this_engine_keeps_in_float32_as_float32(vllm: Host, tmp_path: Path) -> None:
    """Qwen3-Next keeps `A_log` in float32; its checkpoint is in bfloat16."""
    family = FAMILIES["qwen3_next"]
    model_a, model_b = make_versions(family, tmp_path)
    vllm.open(family, model_b, plain=True)
    fresh = vllm.say(family)
    vllm.open(family, model_a, plain=True)
    with SyncManager(install="standby", timeout_s=60) as manager:
        with pytest.raises(
            ManifestMismatch,
            match=r"linear_attn\.A_log: the trainer sends torch\.bfloat16, the engine holds torch\.float32 in",
        ):
            manager.update(load(model_b), 1)
        report = manager.update(load(model_b), 1, dtype="engine")
        assert report.engine_dtypes == {"model.layers.*.linear_attn.A_log": "float32", "*": "bfloat16"}
        assert vllm.say(family) == fresh


def test_a_group_is_opened_in_the_middle_of_a_step_whose_shared_experts_hold_what_they_computed(
    vllm: Host, tmp_path: Path
) -> None:
    family = FAMILIES["deepseek_v2"]
    model_a, model_b = make_versions(family, tmp_path)
    vllm.open(family, model_b, plain=True)
    fresh = vllm.say(family)
    vllm.open(family, model_a, plain=True)
    assert vllm.driver is not None
    (held,) = vllm.driver.rpc("ext_hold_shared_outputs", True)
    assert held > 0
    with SyncManager(install="standby", timeout_s=60) as manager:
        manager.update(load(model_b), 1, dtype="engine")
        vllm.driver.rpc("ext_hold_shared_outputs", False)
        assert vllm.say(family) == fresh


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


def test_an_engine_whose_first_step_comes_after_its_first_update_takes_the_second_one(
    vllm: Host, tmp_path: Path
) -> None:
    """The first step gives a table of rotary embeddings the dtype of the queries, which no update writes."""
    family = FAMILIES["gpt_oss"]
    model_a, model_b = make_versions(family, tmp_path)
    vllm.open(family, model_b, plain=True)
    fresh = vllm.say(family)
    policies: list[InstallPolicy] = ["standby", "copy", "streaming"]
    for install in policies:
        vllm.open(family, model_a, plain=True)
        with SyncManager(install=install, timeout_s=60) as manager:
            for version, target in enumerate((model_b, model_a, model_b)):
                manager.update(load(target), version, dtype="engine")
                assert (vllm.say(family) == fresh) == (target == model_b)


def test_dense_layers_that_vllm_reads_beside_the_checkpoint_are_refused_by_name_and_stay_in_a_partial_group(
    vllm: Host, tmp_path: Path
) -> None:
    family = FAMILIES["qwen3-embedding"]
    model_a, model_b = make_versions(family, tmp_path)
    add_dense_layer(model_a)
    add_dense_layer(model_b)
    vllm.open(family, model_b, plain=True)
    fresh = vllm.say(family)
    vllm.open(family, model_a, plain=True)
    with (
        SyncManager(install="standby", timeout_s=60) as manager,
        pytest.raises(EngineUnsupported, match=r"outside its model.*projector\.0\.weight.*partial=True"),
    ):
        manager.update(load(model_b), 1)
    with SyncManager(install="standby", timeout_s=60, partial=True) as manager:
        manager.update(load(model_b), 1)
        assert vllm.say(family) == fresh


def add_dense_layer(checkpoint: Path) -> None:
    """The last module of a model of sentence-transformers, the same in every checkpoint."""
    modules = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (checkpoint / "modules.json").write_text(json.dumps(modules))
    layer = {"in_features": 64, "out_features": 32, "activation_function": "torch.nn.modules.linear.Identity"}
    (checkpoint / "2_Dense").mkdir()
    (checkpoint / "2_Dense" / "config.json").write_text(json.dumps(layer))
    made = torch.Generator().manual_seed(0)
    tensors = {"linear.weight": torch.randn(32, 64, generator=made), "linear.bias": torch.randn(32, generator=made)}
    save_file(tensors, checkpoint / "2_Dense" / "model.safetensors")


THROUGH_TRANSFORMERS = {"model_impl": "transformers"}


@pytest.mark.parametrize("name", ["qwen3_moe", "llama-tied", "gpt_oss"])
def test_a_model_that_vllm_runs_through_transformers_is_a_fresh_engine_after_every_update(
    vllm: Host, tmp_path: Path, name: str
) -> None:
    family = replace(FAMILIES[name], vllm=FAMILIES[name].vllm | THROUGH_TRANSFORMERS)
    trial = run_trial(vllm, family, make_versions(family, tmp_path), plain=False, install="standby")
    assert (trial.outcome, trial.mechanism, trial.verified) == ("right", "plan", "verified"), trial


@pytest.mark.parametrize("name", ["qwen3_moe", "llama-tied"])
def test_a_model_that_sglang_runs_through_transformers_is_a_fresh_engine_after_every_update(
    runtime: Path, tmp_path: Path, name: str
) -> None:
    """SGLang's class for them looks its experts up in a table of the process, and replaces parameters that are on meta: a second
    instance of the model must leave the first one's experts there, and keep the functions that load its own."""
    family, host = replace(FAMILIES[name], sglang=FAMILIES[name].sglang | THROUGH_TRANSFORMERS), SglangHost(runtime)
    try:
        trial = run_trial(host, family, make_versions(family, tmp_path), plain=True, install="standby", updates=2)
    finally:
        host.close()
    assert (trial.outcome, trial.mechanism, trial.verified) == ("right", "plan", "verified"), trial


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


def test_an_engine_that_quantises_by_a_maximum_over_all_ranks_is_a_fresh_engine_after_every_update(
    runtime: Path, tmp_path: Path
) -> None:
    """Each rank holds what a fresh engine's does, and they answer alike. Post-processing that fails on one rank in the middle of
    the commit is undone on both."""
    family = FAMILIES["llama-fp8-by-the-engine"]
    models = make_versions(family, tmp_path)
    faults = tmp_path / "faults"
    faults.write_text("[]")
    options = {"tensor_parallel_size": 2, "dtype": family.dtype, **family.vllm}
    with Driver(runtime) as engine:
        engine.open(models[1], **options)
        fresh = {models[1]: (engine.rpc("ext_state"), engine.tokens(PROMPTS, COUNT))}
    plugin = "tests.support.fault_plugin:plugin"
    with Driver(runtime, WEIGHTWIRE_PLUGINS=plugin, WEIGHTWIRE_TEST_FAULTS=str(faults)) as engine:
        engine.open(models[0], **options)
        fresh[models[0]] = engine.rpc("ext_state"), engine.tokens(PROMPTS, COUNT)
        assert fresh[models[0]][1] != fresh[models[1]][1]
        version = 0
        policies: list[InstallPolicy] = ["standby", "copy"]
        for install in policies:
            with SyncManager(install=install, timeout_s=60) as manager:
                for target in (models[1], models[0]):
                    version += 1
                    manager.update(whole(target), version)
                    check_equal(engine, fresh[target])
                rank = policies.index(install)
                faults.write_text(json.dumps([{"rank": rank, "step": "reduce", "when": 1}]))
                with pytest.raises(CommitFailed, match=f"planned fault: reduce on rank {rank}"):
                    manager.update(whole(models[1]), version + 1)
                check_equal(engine, fresh[models[0]])
                faults.write_text("[]")


def check_equal(engine: Driver, fresh: tuple[list[dict[str, str]], list[list[int]]]) -> None:
    """What each rank of the engine holds, and what they answer, is what a fresh engine does."""
    states, tokens = fresh
    for held, wanted in zip(engine.rpc("ext_state"), states, strict=True):
        assert differences(held, wanted) == []
    assert engine.tokens(PROMPTS, COUNT) == tokens
