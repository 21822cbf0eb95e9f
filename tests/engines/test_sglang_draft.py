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

from inference_plugin.wire.errors import ManifestMismatch, WeightwireError
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_draft import LAYER, Weights, eagle_head, together, with_next_token_layer
from tests.engines.test_vllm_faults import PLUGIN
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


def started(runtime: Path, tp: int = 1, faults: Path | None = None) -> SglangDriver:
    """`faults`: the file that orders installations to fail."""
    failing = {}
    if faults is not None:
        faults.write_text("[]")
        failing = {"WEIGHTWIRE_PLUGINS": PLUGIN, "WEIGHTWIRE_TEST_FAULTS": str(faults)}
    return SglangDriver(runtime, tp=tp, **{VARIABLE: "overlap"}, **failing)


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


def as_draft(tensors: Weights) -> Weights:
    """Under their names in a group of the served model and its draft."""
    return {f"draft.{name}": tensor for name, tensor in tensors.items()}


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


@pytest.mark.parametrize(("tp", "installs"), [(1, POLICIES), (2, POLICIES[:2])], ids=["tp1", "tp2"])
def test_one_commit_takes_the_served_model_and_its_draft_together(
    runtime: Path, checkpoint: Checkpoint, tmp_path: Path, tp: int, installs: tuple[str, ...]
) -> None:
    a, b = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    rejected, version = [[COUNT - 1]] * len(PROMPTS), 0
    (tmp_path / "state").mkdir()

    def drafts(driver: SglangDriver) -> list[dict[str, str]]:
        return list(driver.call("draft", directory=str(tmp_path / "state")))

    with started(runtime, tp, faults := tmp_path / "faults") as driver:
        driver.open(a, **standalone(a))
        own, fresh = {a: accepted(driver, reference(a))}, drafts(driver)
        with SyncManager("draft", timeout_s=60) as draft, SyncManager(timeout_s=60) as both:
            draft.update(ModuleAdapter(weights(a)), 1)
            with pytest.raises(ManifestMismatch, match="group 'draft' writes already: draft"):
                both.update(together(b, b), 1)
            draft.close_group()
            norm = weights(b)["model.norm.weight"]
            whole = {**weights(b), **as_draft(weights(b))}
            with pytest.raises(ManifestMismatch, match="no tensor of the manifest fills these parameters: draft"):
                both.update(ModuleAdapter({**weights(b), "draft.model.norm.weight": norm}), 1)
            with pytest.raises(ManifestMismatch, match=r"draft\.no\.such\.weight"):
                both.update(ModuleAdapter({**whole, "draft.no.such.weight": norm}), 1)
        for install in installs:
            with SyncManager(install=install, timeout_s=60) as both:  # type: ignore[arg-type]
                for model, its_draft in ((b, b), (b, a), (a, a)):
                    version += 1
                    (report,) = both.update(together(model, its_draft), version).replicas
                    assert (report.status, report.mechanism, report.install) == ("committed", "plan", install)
                    assert "'draft'" not in report.why
                    taken = accepted(driver, reference(model))
                    assert (taken == rejected) == (model != its_draft), (install, model, its_draft)
                    if model == its_draft:
                        assert own.setdefault(model, taken) == taken
                    assert both.verify(together(model, its_draft)).ok
                    assert not both.verify(together(model, a if its_draft == b else b)).ok
                    assert set(driver.generate(PROMPTS[:1], COUNT)[0]["versions"]) == {str(version)}
                assert [differences(*one) for one in zip(drafts(driver), fresh, strict=True)] == [[]] * tp
                if install != "streaming":
                    faults.write_text(json.dumps([{"rank": tp - 1, "step": "install", "when": "after"}]))
                    with pytest.raises(WeightwireError, match="planned fault"):
                        both.update(together(b, b), version + 1)
                    faults.write_text("[]")
                    assert accepted(driver, reference(a)) == own[a] and both.verify(together(a, a)).ok
        with SyncManager(partial=True, timeout_s=60) as part:
            some = {name: t for name, t in weights(b).items() if "layers.1." in name}
            part.update(ModuleAdapter({**some, **as_draft(some)}), version + 1)
            mixed = ModuleAdapter({**weights(a), **some})
            changed = [differences(*one) for one in zip(drafts(driver), fresh, strict=True)]
            assert all(found and all("layers.1." in name for name in found) for found in changed)
            part.close_group()
        with SyncManager("draft", timeout_s=60) as draft, SyncManager("served", timeout_s=60) as served:
            (report,) = served.update(mixed, 1).replicas
            assert "names that begin with 'draft.'" in report.why
            draft.update(mixed, 1)
            assert served.verify(mixed).ok and draft.verify(mixed).ok


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
            differs: list[bool] = []
            for done, whole, prompt in zip(driver.wait(names), greedy_batch(old, prompts, 100), prompts, strict=True):
                count = done["versions"].count(str(version - 1))
                assert done["versions"] == [str(version - 1)] * count + [str(version)] * (100 - count)
                assert done["tokens"][:count] == whole[:count], "as the old weights say"
                if count < 100:
                    differs.append(done["tokens"][count] != whole[count])
                if count < 100 and in_flight == "recompute":
                    (rest,) = greedy_batch(new, [prompt + done["tokens"][:count]], 5)
                    assert done["tokens"][count : count + 5] == rest[: 100 - count], "as the new ones go on"
            assert sum(differs) * 2 >= len(differs), "both may say the same now and then"


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
                    draft.close_group()
                    head = {**weights(heads[1]), "lm_head.weight": shared}
                    with pytest.raises(ManifestMismatch, match=r"draft\.lm_head\.weight"):
                        served.update(ModuleAdapter({**weights(models[1]), **as_draft(head)}), 100)
                    for which in (1, 0):
                        version += 1
                        (report,) = served.update(together(models[which], heads[which]), version).replicas
                        assert (report.mechanism, report.install) == ("plan", install)
                        assert differences(state(driver, tmp_path), fresh[models[which]]) == []
                        assert served.verify(together(models[which], heads[which])).ok
                        assert driver.tokens(PROMPTS, COUNT) == reference(models[which])
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
        with started(runtime, faults=(faults := tmp_path / "faults")) as driver:
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
                    draft.close_group()
                    for target in (b, a):
                        version += 1
                        (report,) = served.update(with_layer_as_draft(target), version).replicas
                        assert (report.status, report.mechanism, report.install) == ("committed", "plan", install)
                        assert "'draft'" not in report.why
                        assert driver.tokens(PROMPTS, COUNT) == says[target]
                        assert differences(state(driver, tmp_path / "state"), fresh[target]) == []
                        assert served.verify(with_layer_as_draft(target)).ok
                    if install == "copy" and family == "deepseek_v3":  # of two layers and that of the draft
                        faults.write_text(json.dumps([{"rank": 0, "step": "post-process", "when": 2}]))
                        with pytest.raises(WeightwireError, match="planned fault: post-process"):
                            served.update(with_layer_as_draft(b), version + 1)
                        assert driver.tokens(PROMPTS, COUNT) == says[a]
                        assert differences(state(driver, tmp_path / "state"), fresh[a]) == []
                        assert served.verify(with_layer_as_draft(a)).ok


def with_layer_as_draft(model: Path) -> ModuleAdapter:
    """A source of the served model, and of its layer for multi-token prediction as the draft."""
    layer = {name: t for name, t in weights(model).items() if name.startswith(LAYER)}
    served = {name: t for name, t in weights(model).items() if name not in layer}
    return ModuleAdapter({**served, **as_draft(layer)})
