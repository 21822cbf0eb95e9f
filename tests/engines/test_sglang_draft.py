"""Speculative decoding in SGLang, with its kernels for a CPU in torch: what `test_vllm_draft` asks of vLLM.

SGLang processes the result of a step during the next one here, as on a GPU. The tokens are the served model's whatever the
draft proposes, so the number of accepted proposals shows which draft is there. A draft with the weights of the served model is
not accepted always: SGLang's draft does not see the first token of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inference_plugin.wire.errors import ManifestMismatch
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_draft import LAYER, eagle_head, with_next_token_layer
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, weights
from tests.support.checkpoints import make_llama
from tests.support.families import FAMILIES, make_versions
from tests.support.greedy import greedy_batch
from tests.support.managers import SyncManager
from tests.support.reachable import differences
from tests.support.sglang_engines import SglangDriver
from tests.support.sglang_speculation import VARIABLE
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
POLICIES = ("standby", "copy", "streaming")


def started(runtime: Path, tp: int = 1) -> SglangDriver:
    return SglangDriver(runtime, tp=tp, **{VARIABLE: "overlap"})


def standalone(draft: Path) -> dict[str, Any]:
    return {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft), **CHAIN}


def accepted(driver: SglangDriver, expected: list[list[int]]) -> list[list[int]]:
    """For each prompt, how many passes took no proposal, one, two and three of them, while they made the `expected` tokens."""
    driver.rpc("flush_cache")
    done = [driver.generate([prompt], COUNT)[0] for prompt in PROMPTS]  # one by one, so that prompts don't share a pass
    assert [one["tokens"] for one in done] == expected
    return [one["accepted"] for one in done]


def state(driver: SglangDriver, directory: Path) -> dict[str, str]:
    (found,) = driver.call("draft", directory=str(directory))
    return dict(found)


def managers(**options: Any) -> Iterator[SyncManager]:
    """Of the served model, and of the draft."""
    return (SyncManager(*group, timeout_s=60, **options) for group in ((), ("draft",)))


@pytest.mark.parametrize(("tp", "installs"), [(1, POLICIES), (2, POLICIES[:1])], ids=["tp1", "tp2"])
def test_served_model_and_draft_are_updated_apart(
    runtime: Path, checkpoint: Checkpoint, tp: int, installs: tuple[str, ...]
) -> None:
    a, b = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    rejected, version = [[COUNT - 1]] * len(PROMPTS), 0
    with started(runtime, tp) as driver:
        driver.open(a, **standalone(a))
        own = {a: accepted(driver, reference(a))}
        for install in installs:
            served, draft = managers(install=install)
            with served, draft:
                for target in (b, a):
                    version += 1
                    (report,) = served.update(ModuleAdapter(weights(target)), version).replicas
                    assert report.status == "committed" and "group 'draft' updates it" in report.why
                    assert accepted(driver, reference(target)) == rejected, (install, target)
                    (report,) = draft.update(ModuleAdapter(weights(target)), version + 100).replicas
                    assert (report.status, report.mechanism, report.install) == ("committed", "plan", install)
                    taken = accepted(driver, reference(target))
                    assert taken != rejected and own.setdefault(target, taken) == taken, (install, target)
                    assert draft.verify(ModuleAdapter(weights(target))).ok
                    assert not draft.verify(ModuleAdapter(weights(a if target == b else b))).ok
                    assert set(driver.generate(PROMPTS[:1], COUNT)[0]["versions"]) == {str(version)}


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_tokens_that_are_accepted_at_once_have_the_version_that_verified_them(
    runtime: Path, checkpoint: Checkpoint, in_flight: Any
) -> None:
    models = [checkpoint("llama", tied=False, seed=seed) for seed in (1, 2)]
    with started(runtime) as driver, SyncManager(in_flight=in_flight, timeout_s=60) as manager:
        driver.open(models[0], **standalone(models[0]))
        manager.update(ModuleAdapter(weights(models[0])), 1)
        for version in range(2, 6):
            old, new = models[version % 2], models[1 - version % 2]
            prompts = [[version, 5 + i, 9] * 4 for i in range(4)]
            names = driver.submit(prompts, 100)
            driver.wait_for_tokens(names, version)
            manager.update(ModuleAdapter(weights(new)), version)
            for done, whole, prompt in zip(driver.wait(names), greedy_batch(old, prompts, 100), prompts, strict=True):
                count = done["versions"].count(str(version - 1))
                assert done["versions"] == [str(version - 1)] * count + [str(version)] * (100 - count)
                assert done["tokens"][:count] == whole[:count], "as the old weights say"
                if count < 100:
                    assert done["tokens"][count] != whole[count]
                if count < 100 and in_flight == "recompute":
                    (rest,) = greedy_batch(new, [prompt + done["tokens"][:count]], 5)
                    assert done["tokens"][count : count + 5] == rest[: 100 - count], "as the new ones go on"


def sglang_head(directory: Path, seed: int) -> Path:
    head = eagle_head(directory, seed)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle"]}))
    return head


def test_an_eagle_head_is_updated_without_what_it_shares_with_the_served_model_which_follows_the_served_model(
    runtime: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    models = [checkpoint("llama", tied=False, seed=seed) for seed in (1, 2)]
    heads = [sglang_head(tmp_path / f"head-{seed}", seed) for seed in (1, 2)]
    fresh: dict[Path, dict[str, str]] = {}
    for model, head in ((models[1], heads[1]), (models[0], heads[0])):
        with started(runtime) as driver:
            driver.open(model, speculative_algorithm="EAGLE", speculative_draft_model_path=str(head), **CHAIN)
            assert driver.tokens(PROMPTS, COUNT) == reference(
                model
            )  # SGLang chooses a form of its layers as they compute
            fresh[model] = state(driver, tmp_path)
            if model == models[1]:
                continue
            version = 0
            for install in POLICIES:
                served, draft = managers(install=install)
                with served, draft:
                    for which in (1, 0):
                        version += 1
                        served.update(ModuleAdapter(weights(models[which])), version)
                        assert (
                            draft.update(ModuleAdapter(weights(heads[which])), version).replicas[0].mechanism == "plan"
                        )
                        assert differences(state(driver, tmp_path), fresh[models[which]]) == []
                        assert draft.verify(ModuleAdapter(weights(heads[which]))).ok
                        assert driver.tokens(PROMPTS, COUNT) == reference(models[which])
                    for name in ("embed_tokens.weight", "lm_head.weight"):
                        shared = weights(models[1])[name if name in weights(models[1]) else f"model.{name}"]
                        with pytest.raises(ManifestMismatch, match=name):
                            draft.update(ModuleAdapter({**weights(heads[1]), name: shared}), 100)
            with SyncManager(timeout_s=60) as served:
                assert set(served.versions().values()) == {version}
                driver.rpc("begin_weight_update", "draft")  # SGLang's own, which may write the shared embedding
                assert set(served.versions().values()) == {None}


def eagle3_head(directory: Path, seed: int, served: Path) -> Path:
    """A tiny head of EAGLE3 for the served model's two layers, of its size and vocabulary."""
    full = make_llama(directory, seed=seed, dtype=torch.float32, num_hidden_layers=1)
    tensors = {
        name.replace("model.layers.0", "midlayer"): t for name, t in weights(full).items() if ".layers.0." in name
    }
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name] = torch.cat([tensors[name], tensors[name] / 2], 1)  # of the embedding and the hidden state
    hidden = tensors["midlayer.input_layernorm.weight"].shape[0]
    tensors["midlayer.hidden_norm.weight"], tensors["norm.weight"] = torch.ones(2, hidden).unbind()
    tensors["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(seed)) * 0.2
    save_file({name: t.clone() for name, t in tensors.items()}, full / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((full / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": json.loads((served / "config.json").read_text())["vocab_size"],
        "draft_vocab_size": None,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }
    (full / "config.json").write_text(json.dumps(config))
    return full


def test_a_draft_that_holds_a_slice_of_the_served_model_s_embedding_follows_the_served_model(
    runtime: Path, tmp_path: Path
) -> None:
    """Each rank has Gemma's embedding whole, and its draft some of the rows."""
    models = make_versions(FAMILIES["gemma3"], tmp_path)
    heads = [eagle3_head(tmp_path / f"head-{seed}", seed, models[0]) for seed in (1, 2)]
    (tmp_path / "state").mkdir()
    served, draft = managers()
    with started(runtime, tp=2) as driver, served, draft:
        driver.open(models[0], speculative_algorithm="EAGLE3", speculative_draft_model_path=str(heads[0]), **CHAIN)
        says = driver.tokens(PROMPTS, COUNT)
        before = driver.call("draft", directory=str(tmp_path / "state"))
        for version, target in enumerate((1, 0), 1):
            served.update(ModuleAdapter(weights(models[target])), version)
            assert (driver.tokens(PROMPTS, COUNT) == says) == (target == 0)
            now = driver.call("draft", directory=str(tmp_path / "state"))
            changed = ["lm_head.weight", "model.embed_tokens.weight"] if target else []
            assert [sorted(differences(*one)) for one in zip(now, before, strict=True)] == [changed, changed]
        for version, head in enumerate((heads[1], heads[0]), 1):
            assert draft.update(ModuleAdapter(weights(head)), version).replicas[0].mechanism == "plan"
            assert draft.verify(ModuleAdapter(weights(head))).ok
            now = driver.call("draft", directory=str(tmp_path / "state"))
            assert all((differences(*one) == []) == (head == heads[0]) for one in zip(now, before, strict=True))
        assert driver.tokens(PROMPTS, COUNT) == says


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_layer_for_multi_token_prediction_is_updated_as_the_draft_of_the_model_whose_checkpoint_has_it(
    runtime: Path, tmp_path: Path, family: str
) -> None:
    """DeepSeek's has latent attention: SGLang derives weights of that layer."""
    a, b = (with_next_token_layer(tmp_path, seed, family) for seed in (1, 2))
    fresh, says = {}, {}
    (tmp_path / "state").mkdir()
    for model in (b, a):
        with started(runtime) as driver:
            driver.open(model, speculative_algorithm="NEXTN", **CHAIN, **FAMILIES[family].sglang)
            says[model], fresh[model] = driver.tokens(PROMPTS, COUNT), state(driver, tmp_path / "state")
            if model == b:
                continue
            version = 0
            for install in POLICIES:
                served, draft = managers(install=install)
                with served, draft:
                    for target in (b, a):
                        version += 1
                        (report,) = served.update(ModuleAdapter(weights(target)), version).replicas
                        assert "group 'draft' updates it" in report.why
                        assert f"{LAYER}eh_proj.weight" in report.passed_over
                        layer = {name: t for name, t in weights(target).items() if name.startswith(LAYER)}
                        (report,) = draft.update(ModuleAdapter(layer), version).replicas
                        assert (report.status, report.mechanism) == ("committed", "plan")
                        assert driver.tokens(PROMPTS, COUNT) == says[target]
                        assert differences(state(driver, tmp_path / "state"), fresh[target]) == []
                        assert draft.verify(ModuleAdapter(layer)).ok
