"""LoRA from an FSDP2 trainer of two ranks into real vLLM engines: merged into the base model, and by itself into vLLM's own
LoRA slots. What is right is what PEFT says, on an unsharded twin with the same step behind it, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_plugin.wire.errors import ManifestMismatch
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, IN_FLIGHT, PROMPTS, reference, source
from tests.support.engines import Driver
from tests.support.lora_trainer import LoRATrainer
from trainer_adapters import ModuleAdapter, SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ADAPTER = ("policy", 1, "no/such/path")
PLUGIN = "tests.support.fault_plugin:plugin"
SLOTS = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
HIDDEN, Q_ROWS = 64, 128
"""Of the tiny models: the columns and the rows of a `q_proj`."""


class Trained:
    """An engine with LoRA slots, the base model that it serves, and a trainer."""

    def __init__(self, driver: Driver, trainer: LoRATrainer, ranks: int, base: Path, faults: Path) -> None:
        self.driver, self.trainer, self.ranks, self.base, self.faults = driver, trainer, ranks, base, faults
        self.version = 0
        said = self.train(seed=2, verify=False)  # until a request names the adapter it is in no slot
        assert self.adapted() == said["tokens"] != self.plain()

    def train(self, seed: int, **plan: Any) -> dict[str, Any]:
        """One update by two ranks; what the adapted model says, and the update's error if it had one."""
        self.version += 1
        usual = {
            "checkpoint": str(self.base),
            "group": "lora.policy",
            "way": "adapter",
            "version": self.version,
            "seed": seed,
            "r": 4,
            "targets": TARGETS,
            "in_flight": "keep",
            "verify": True,
            "count": COUNT,
            "prompts": PROMPTS,
        }
        return self.trainer.run(**usual | plan)

    def serve(self, checkpoint: Path) -> None:
        """The base becomes that one."""
        self.version += 1
        with SyncManager(timeout_s=180) as manager:
            manager.update(source(checkpoint), self.version)

    def adapted(self, number: int = 1) -> list[list[int]]:
        """What requests are told that name the adapter; vLLM wants a number and a path with the name, which is never read."""
        done = self.driver.wait(self.driver.submit(PROMPTS, COUNT, ("policy", number, "no/such/path")))
        assert [r["finish_reason"] for r in done] == ["length"] * len(PROMPTS), done
        return [r["tokens"] for r in done]

    def plain(self) -> list[list[int]]:
        return self.driver.tokens(PROMPTS, COUNT)

    def stamps(self) -> set[str]:
        """The versions on answers by the base."""
        return {stamp for r in self.driver.generate(PROMPTS, COUNT) for stamp in r["versions"]}


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest,
    runtime: Path,
    checkpoint: Checkpoint,
    lora_trainer: LoRATrainer,
    tmp_path_factory: Any,
) -> Iterator[Trained]:
    kind, ranks = request.param
    base = checkpoint(kind, tied=False, seed=1)
    faults = tmp_path_factory.mktemp("lora") / "faults"
    faults.write_text("[]")
    with Driver(runtime, WEIGHTWIRE_PLUGINS=PLUGIN, WEIGHTWIRE_TEST_FAULTS=str(faults)) as driver:
        driver.open(base, tensor_parallel_size=ranks, **SLOTS)
        yield Trained(driver, lora_trainer, ranks, base, faults)
    assert driver.leftovers() == [] and driver.family() == []


engines = pytest.mark.parametrize("trained", [("qwen3", 1), ("llama", 2)], ids=["tp1", "tp2"], indirect=True)


@engines
def test_adapters_in_their_slots_say_what_peft_says_and_the_base_is_not_touched(trained: Trained) -> None:
    first = trained.train(seed=3)
    assert first["error"] is None
    assert trained.adapted() == first["tokens"], "of a request that came after the update"
    assert trained.plain() == reference(trained.base) != first["tokens"]
    second = trained.train(seed=4)
    assert trained.adapted() == second["tokens"] != first["tokens"]
    assert trained.plain() == reference(trained.base)
    assert second["bytes"] < trained.base.joinpath("model.safetensors").stat().st_size / 4


@engines
def test_an_adapter_that_does_not_fit_is_refused_with_names_and_the_old_one_serves(trained: Trained) -> None:
    good = trained.train(seed=5)
    large = trained.train(seed=6, r=9)["error"]
    assert large["kind"] == "ManifestMismatch"
    assert "layers.0.self_attn.q_proj has rank 9, the engine's slots have 8" in large["text"]
    other = trained.train(seed=6, targets=["q_proj", "lm_head"])["error"]
    assert other["kind"] == "ManifestMismatch"
    assert "no place for: base_model.model.lm_head.lora_A.weight" in other["text"]
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = torch.zeros(4, HIDDEN), torch.zeros(Q_ROWS, 4)
    for tensors, part in {
        "A and B of two ranks": ({"A": a, "B": b[:, :3]}, f"{layer} has A [4, {HIDDEN}] and B [{Q_ROWS}, 3]"),
        "no B": ({"A": a}, f"have A without B, or B without A: {layer}"),
        "another dtype": (
            {"A": a.bfloat16(), "B": b.bfloat16()},
            "has A in bfloat16 and B in bfloat16, the engine's slots are float32",
        ),
        "no adapter's name": ({"A": a, "B": b, "C": a}, f"neither A nor B of a LoRA layer: {layer}.lora_C.weight"),
    }.values():
        bad = ModuleAdapter({f"{layer}.lora_{kind}.weight": tensor for kind, tensor in tensors.items()})
        with SyncManager(group="lora.policy", timeout_s=60) as manager, pytest.raises(ManifestMismatch) as refused:
            manager.update(bad, 1000)
        assert part in str(refused.value)
    assert trained.adapted() == good["tokens"]
    assert trained.plain() == reference(trained.base)


@engines
def test_an_adapter_of_another_dtype_travels_in_that_of_the_slots_where_the_source_is_told_to(trained: Trained) -> None:
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_A.weight": torch.ones(4, HIDDEN), f"{layer}.lora_B.weight": torch.ones(Q_ROWS, 4)}
    trained.version += 1
    with SyncManager(group="lora.policy", timeout_s=60) as manager:
        source = ModuleAdapter({name: t.bfloat16() for name, t in tensors.items()}, dtype_rules="engine")
        assert manager.update(source, trained.version).engine_dtypes == {"*": "float32"}


@engines
def test_an_installation_that_fails_on_one_rank_is_undone_on_all(trained: Trained) -> None:
    good = trained.train(seed=7)
    assert trained.adapted() == good["tokens"]
    for when in ("before", "after"):
        trained.faults.write_text(json.dumps([{"rank": trained.ranks - 1, "step": "install", "when": when}]))
        failed = trained.train(seed=8)
        trained.faults.write_text("[]")
        assert failed["error"]["kind"] == "CommitFailed", failed
        assert trained.adapted() == good["tokens"] != failed["tokens"], when
    assert trained.train(seed=8)["tokens"] == trained.adapted() == failed["tokens"]


@engines
def test_base_and_adapter_are_groups_of_their_own(trained: Trained, checkpoint: Checkpoint) -> None:
    """The base goes to another model under the adapter, and back; the adapter stays."""
    kind = "qwen3" if trained.ranks == 1 else "llama"
    other = checkpoint(kind, tied=False, seed=2)
    adapter = trained.train(seed=9)
    assert trained.adapted() == adapter["tokens"]
    trained.serve(other)
    assert trained.plain() == reference(other)
    assert trained.adapted() not in (adapter["tokens"], reference(other))
    trained.serve(trained.base)
    assert trained.plain() == reference(trained.base)
    assert trained.adapted() == adapter["tokens"]


@pytest.mark.parametrize("trained", [("qwen3", 1)], ids=["tp1"], indirect=True)
def test_an_adapter_that_was_dropped_for_others_comes_back_as_the_update_made_it(trained: Trained) -> None:
    """There are two slots, and to vLLM each number is an adapter of its own."""
    for seed in (13, 14):
        said = trained.train(seed)
        assert said["error"] is None, "verified as far as it is in slots"
        assert [trained.adapted(number) for number in (1, 2, 3, 1)] == [said["tokens"]] * 4


@pytest.mark.parametrize("trained", [("qwen3", 1)], ids=["tp1"], indirect=True)
def test_a_base_that_somebody_else_loaded_stays_unknown_and_the_adapter_stays_the_update_s(
    trained: Trained, checkpoint: Checkpoint
) -> None:
    """vLLM drops its adapters with the base; the next request has them made of the update's tensors again."""
    other = checkpoint("qwen3", tied=False, seed=2)
    trained.serve(trained.base)
    adapter = trained.train(seed=15, verify=False)
    for base in (other, trained.base):
        trained.driver.call("load", model=str(base), by="engine")
        assert trained.plain() == reference(base)
        assert (trained.adapted() == adapter["tokens"]) == (base == trained.base)
        assert trained.stamps() == {"unknown"}
    with SyncManager(group="lora.policy", timeout_s=60) as manager:
        assert set(manager.versions().values()) == {trained.version}
    adapter = trained.train(seed=16, verify=False)
    assert trained.adapted() == adapter["tokens"]
    assert trained.stamps() == {"unknown"}, "an adapter's version says nothing of the base"
    trained.serve(trained.base)
    assert trained.stamps() == {str(trained.version)}


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("trained", [("qwen3", 1)], ids=["tp1"], indirect=True)
def test_requests_in_flight_follow_the_policy(trained: Trained, in_flight: str) -> None:
    old = trained.train(seed=10)["tokens"]
    alone = [r["tokens"] for r in trained.driver.wait(trained.driver.submit(PROMPTS[:2], 150, ADAPTER))]
    assert trained.adapted() == old
    running = trained.driver.submit(PROMPTS[:2], 150, ADAPTER)
    trained.driver.wait_for_tokens(running, 1)
    new = trained.train(seed=11, in_flight=in_flight)["tokens"]
    ended = trained.driver.wait(running)
    for request, tokens in zip(ended, alone, strict=True):
        by_the_old = {"drain": 150, "abort": len(request["tokens"])}.get(in_flight, 1)
        assert request["tokens"][:by_the_old] == tokens[:by_the_old]
        assert request["finish_reason"] == "length" or in_flight == "abort"
    assert trained.adapted() == new != old, "no block of the old adapter is used"


@engines
def test_merged_while_streaming_an_engine_serves_what_peft_says(trained: Trained) -> None:
    merged = trained.train(seed=12, way="merged", group="policy")
    assert merged["error"] is None
    assert trained.plain() == merged["tokens"] != reference(trained.base)
    trained.serve(trained.base)
    assert trained.plain() == reference(trained.base)


def test_adapters_of_pipeline_stages_are_those_of_one_rank(
    runtime: Path, checkpoint: Checkpoint, lora_trainer: LoRATrainer, tmp_path: Path
) -> None:
    base, faults = checkpoint("llama", tied=False, seed=1), tmp_path / "faults"
    faults.write_text("[]")
    with Driver(runtime, WEIGHTWIRE_PLUGINS=PLUGIN, WEIGHTWIRE_TEST_FAULTS=str(faults)) as driver:
        driver.open(base, pipeline_parallel_size=2, **SLOTS)
        stages = Trained(driver, lora_trainer, 2, base, faults)
        test_adapters_in_their_slots_say_what_peft_says_and_the_base_is_not_touched(stages)
        large = stages.train(seed=6, r=9)["error"]
        assert large["kind"] == "ManifestMismatch" and "has rank 9, the engine's slots have 8" in large["text"]
        other = stages.train(seed=6, targets=["q_proj", "lm_head"])["error"]
        assert other["kind"] == "ManifestMismatch"
        assert "no place for: base_model.model.lm_head.lora_A.weight" in other["text"]
        test_an_installation_that_fails_on_one_rank_is_undone_on_all(stages)
        test_base_and_adapter_are_groups_of_their_own(stages, checkpoint)
        test_merged_while_streaming_an_engine_serves_what_peft_says(stages)
    assert driver.leftovers() == [] and driver.family() == []
