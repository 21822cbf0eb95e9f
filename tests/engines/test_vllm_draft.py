"""Speculative decoding in vLLM: the draft model is the group `draft`, updated apart from the served model.

The tokens are the served model's whatever the draft proposes, so the share of accepted proposals shows which draft is there: a
draft with the weights of the served model is accepted always.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inference_plugin.wire.errors import EngineUnsupported, ManifestMismatch
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, weights
from tests.support import checkpoints
from tests.support.engines import Driver
from tests.support.families import FAMILIES
from tests.support.managers import SyncManager
from tests.support.models import make_llama
from tests.support.reachable import differences
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Weights = dict[str, torch.Tensor]
LAYER = "model.layers.2."


@pytest.fixture(scope="module")
def driver(runtime: Path) -> Iterator[Driver]:
    with Driver(runtime, in_process=True) as one:
        yield one
    assert one.leftovers() == []


def open_engine(driver: Driver, served: Path, **speculative: Any) -> None:
    driver.call("close")
    config = {"num_speculative_tokens": 3, **speculative}
    driver.open(served, speculative_config=config, disable_log_stats=False)


def accepted(driver: Driver, expected: list[list[int]]) -> float:
    """The share of the draft's proposals that the served model accepts, while it makes the `expected` tokens."""
    before = driver.call("drafted")
    assert driver.tokens(PROMPTS, COUNT) == expected
    drafted, taken = (after - was for after, was in zip(driver.call("drafted"), before, strict=True))
    assert drafted > 0
    return taken / drafted


def state(driver: Driver) -> dict[str, str]:
    (found,) = driver.rpc("ext_draft_state")
    return dict(found)


def test_served_model_and_draft_are_updated_apart_and_an_equal_draft_is_accepted_always(
    driver: Driver, checkpoint: Checkpoint
) -> None:
    a, b = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    open_engine(driver, a, method="draft_model", model=str(a))
    assert accepted(driver, reference(a)) == 1
    fresh, version = state(driver), 0
    for install, transport in (("standby", "shm"), ("copy", "zmq")):
        options: Any = {"install": install, "transport": transport, "timeout_s": 60}
        with SyncManager(**options) as served, SyncManager("draft", **options) as draft:
            for target in (b, a):
                version += 1
                (report,) = served.update(ModuleAdapter(weights(target)), version).replicas
                assert report.status == "committed" and "group 'draft' updates it" in report.why
                assert accepted(driver, reference(target)) < 1, (install, target)
                (report,) = draft.update(ModuleAdapter(weights(target)), version + 100).replicas
                assert (report.status, report.mechanism, report.install) == ("committed", "plan", install)
                assert accepted(driver, reference(target)) == 1, (install, target)
                assert draft.verify(ModuleAdapter(weights(target))).ok
                if driver.stamps:  # tokens are the served model's
                    assert set(driver.generate(PROMPTS[:1], COUNT)[0]["versions"]) == {str(version)}
            lacking: Weights = dict(list(weights(b).items())[1:])
            for wrong in (lacking, {**weights(b), "no.such.weight": weights(b)["model.norm.weight"]}):
                with pytest.raises(ManifestMismatch):
                    draft.update(ModuleAdapter(wrong), 1000)
        assert differences(state(driver), fresh) == []


def together(model: Path, draft: Path) -> ModuleAdapter:
    """A source of the served model and its draft."""
    return ModuleAdapter({**weights(model), **{f"draft.{name}": t for name, t in weights(draft).items()}})


def test_one_commit_takes_the_served_model_and_its_draft_together(driver: Driver, checkpoint: Checkpoint) -> None:
    a, b = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    open_engine(driver, a, method="draft_model", model=str(a))
    fresh = state(driver)
    with SyncManager("draft", timeout_s=60) as draft:
        draft.update(ModuleAdapter(weights(b)), 1)
        with SyncManager(timeout_s=60) as both:
            with pytest.raises(ManifestMismatch, match="group 'draft' writes already: draft"):
                both.update(together(b, b), 1)
            draft.close_group()
            with pytest.raises(ManifestMismatch, match="no tensor of the manifest fills these parameters: draft"):
                both.update(
                    ModuleAdapter({**weights(b), "draft.model.norm.weight": weights(b)["model.norm.weight"]}), 1
                )
    version = 0
    for install in ("standby", "copy"):
        with SyncManager(install=install, timeout_s=60) as both:  # type: ignore[arg-type]
            for model, its_draft in ((b, b), (b, a), (a, a)):
                version += 1
                (report,) = both.update(together(model, its_draft), version).replicas
                assert (report.status, report.mechanism) == ("committed", "plan") and "'draft'" not in report.why
                assert (accepted(driver, reference(model)) == 1) == (model == its_draft)
                assert both.verify(together(model, its_draft)).ok
    assert differences(state(driver), fresh) == []


def eagle_head(directory: Path, seed: int) -> Path:
    """A tiny EAGLE head for `make_llama`: one layer, and a projection of embedding and hidden state onto it."""
    full = make_llama(directory, seed=seed, dtype=torch.float32, num_hidden_layers=1)
    tensors = {name.removeprefix("model."): t for name, t in weights(full).items() if ".layers.0." in name}
    del tensors["layers.0.input_layernorm.weight"]
    hidden = tensors["layers.0.self_attn.q_proj.weight"].shape[1]
    generator = torch.Generator().manual_seed(seed)
    tensors["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
    save_file(tensors, full / "model.safetensors", metadata={"format": "pt"})
    return full


def test_an_eagle_head_is_updated_without_the_embedding_that_it_shares_with_the_served_model(
    driver: Driver, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    a, b = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    head_a, head_b = (eagle_head(tmp_path / f"head-{seed}", seed) for seed in (1, 2))
    fresh: dict[Path, dict[str, str]] = {}
    shares: dict[Path, float] = {}
    for head in (head_b, head_a):
        open_engine(driver, a, method="eagle", model=str(head))
        shares[head], fresh[head] = accepted(driver, reference(a)), state(driver)
    with SyncManager(timeout_s=60) as served, SyncManager("draft", timeout_s=60) as draft:
        for version, head in enumerate((head_b, head_a), 1):
            (report,) = draft.update(ModuleAdapter(weights(head)), version).replicas
            assert (report.status, report.mechanism) == ("committed", "plan")
            assert accepted(driver, reference(a)) == shares[head]
            assert differences(state(driver), fresh[head]) == []
            assert draft.verify(ModuleAdapter(weights(head))).ok
        with_embedding = {**weights(head_b), "embed_tokens.weight": weights(a)["model.embed_tokens.weight"]}
        with pytest.raises(ManifestMismatch, match="embed_tokens"):
            draft.update(ModuleAdapter(with_embedding), 3)
        served.update(ModuleAdapter(weights(b)), 1)  # with the embedding, which both compute with
        changed = differences(state(driver), fresh[head_a])
        assert changed and all("embed_tokens" in name or "lm_head" in name for name in changed)
        assert driver.tokens(PROMPTS, COUNT) == reference(b)
        draft.close_group()
        (report,) = served.update(together(a, head_b), 2).replicas
        assert report.mechanism == "plan" and served.verify(together(a, head_b)).ok
        assert accepted(driver, reference(a)) == shares[head_b]
        assert differences(state(driver), fresh[head_b]) == []


def test_a_draft_group_is_refused_by_an_engine_that_has_no_draft(driver: Driver, checkpoint: Checkpoint) -> None:
    a = checkpoint("llama", tied=False, seed=1)
    driver.call("close")
    driver.open(a)
    with (
        SyncManager("draft", timeout_s=60) as draft,
        pytest.raises(EngineUnsupported, match="none that can be updated"),
    ):
        draft.update(ModuleAdapter(weights(a)), 1)
    with SyncManager(timeout_s=60) as served:
        (report,) = served.update(ModuleAdapter(weights(a)), 1).replicas
        assert "draft" not in report.why
    assert driver.tokens(PROMPTS, COUNT) == reference(a)


def with_next_token_layer(directory: Path, seed: int, family: str = "glm4_moe") -> Path:
    """A tiny model with a layer that predicts the token after the next, as published ones have it."""
    path = FAMILIES[family].maker(directory / f"{family}-{seed}", seed)
    tensors, generator = checkpoints.load(path), torch.Generator().manual_seed(seed)
    hidden = tensors["model.norm.weight"].numel()
    sizes = {"enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    own = {f"{LAYER}{name}.weight": torch.randn(*size, generator=generator) * 0.2 for name, size in sizes.items()}
    layer = {name.replace(".layers.1.", ".layers.2."): t.clone() for name, t in tensors.items() if ".layers.1." in name}
    checkpoints.rewrite(path, {**tensors, **layer, **own})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return path


def test_a_multi_token_prediction_layer_is_updated_as_the_draft_of_the_model_whose_checkpoint_has_it(
    driver: Driver, tmp_path: Path
) -> None:
    a, b = (with_next_token_layer(tmp_path, seed) for seed in (1, 2))
    fresh, says = {}, {}
    for model in (b, a):
        open_engine(driver, model, method="mtp", num_speculative_tokens=1)
        says[model], fresh[model] = driver.tokens(PROMPTS, COUNT), state(driver)
    with SyncManager(timeout_s=60) as served, SyncManager("draft", timeout_s=60) as draft:
        for version, target in enumerate((b, a), 1):
            (report,) = served.update(ModuleAdapter(weights(target)), version).replicas
            assert "group 'draft' updates it" in report.why and f"{LAYER}eh_proj.weight" in report.passed_over
            layer = {name: t for name, t in weights(target).items() if name.startswith(LAYER)}
            (report,) = draft.update(ModuleAdapter(layer), version).replicas
            assert (report.status, report.mechanism) == ("committed", "plan")
            assert driver.tokens(PROMPTS, COUNT) == says[target]
            assert differences(state(driver), fresh[target]) == []


def test_two_ranks_take_the_served_model_and_the_draft_at_the_same_time(runtime: Path, checkpoint: Checkpoint) -> None:
    a, b = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    with Driver(runtime) as ranks:
        ranks.call("close")
        two = {"tensor_parallel_size": 2, "disable_log_stats": False}
        speculative = {
            "method": "draft_model",
            "model": str(a),
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": 2,
        }
        ranks.open(a, speculative_config=speculative, **two)
        assert accepted(ranks, reference(a)) == 1
        with SyncManager(timeout_s=60) as served, SyncManager("draft", timeout_s=60) as draft:
            for version, target in enumerate((b, a), 1):
                sent = [manager.update_async(ModuleAdapter(weights(target)), version) for manager in (served, draft)]
                assert [r.status for one in sent for r in one.result(600).replicas] == ["committed"] * 2
                assert accepted(ranks, reference(target)) == 1
                assert draft.verify(ModuleAdapter(weights(target))).ok
