"""Speculative decoding in vLLM: the draft model is the group `draft`, updated apart from the served model.

The tokens are the served model's whatever the draft proposes, so the share of accepted proposals shows which draft is there: a
draft with the weights of the served model is accepted always.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inference_plugin.wire.errors import EngineUnsupported, ManifestMismatch
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, weights
from tests.support.engines import Driver
from tests.support.managers import SyncManager
from tests.support.models import make_llama
from tests.support.reachable import differences
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Weights = dict[str, torch.Tensor]


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


def test_a_draft_group_is_refused_by_an_engine_that_has_no_draft(driver: Driver, checkpoint: Checkpoint) -> None:
    a = checkpoint("llama", tied=False, seed=1)
    open_engine(driver, a, method="ngram", prompt_lookup_max=3)
    with (
        SyncManager("draft", timeout_s=60) as draft,
        pytest.raises(EngineUnsupported, match="none that can be updated"),
    ):
        draft.update(ModuleAdapter(weights(a)), 1)
    with SyncManager(timeout_s=60) as served:
        (report,) = served.update(ModuleAdapter(weights(a)), 1).replicas
        assert "draft" not in report.why
    assert driver.tokens(PROMPTS, COUNT) == reference(a)
