"""LoRA from an FSDP2 trainer of two ranks into real vLLM engines: merged into the base model, and by itself into vLLM's own
LoRA slots. What is right is what PEFT says, on an unsharded twin with the same step behind it, in float32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, IN_FLIGHT, PROMPTS, reference, source
from tests.support.engines import ROOT, Driver
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PLUGIN = "tests.support.fault_plugin:plugin"
SLOTS = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
ADAPTER = ("policy", 1, "no/such/path")
"""What a request says; the path is never read, since the update came first."""


class Trained:
    """An engine with LoRA slots, the base model that it serves, and a trainer that comes and goes."""

    def __init__(self, driver: Driver, ranks: int, base: Path, out: Path, faults: Path) -> None:
        self.driver, self.ranks, self.base, self.faults = driver, ranks, base, faults
        self.out = out
        self.version = 0

    def train(self, seed: int, **plan: Any) -> dict[str, Any]:
        """One update by two ranks; what the adapted model says, and the update's error if it had one."""
        self.version += 1
        plan = {
            "group": "lora.policy",
            "way": "adapter",
            "version": self.version,
            "seed": seed,
            "r": 4,
            "targets": TARGETS,
            "count": COUNT,
            "prompts": PROMPTS,
        } | plan
        for name in ("tokens.json", "error.json"):
            (self.out / name).unlink(missing_ok=True)
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
                *("-m", "tests.support.lora_trainer", str(self.base), str(self.out), json.dumps(plan)),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-8000:]
        said: dict[str, Any] = json.loads((self.out / "tokens.json").read_text())
        if (self.out / "error.json").exists():
            said["error"] = json.loads((self.out / "error.json").read_text())
        return said

    def adapted(self) -> list[list[int]]:
        done = self.driver.wait(self.driver.submit(PROMPTS, COUNT, ADAPTER))
        assert [r["finish_reason"] for r in done] == ["length"] * len(PROMPTS), done
        return [r["tokens"] for r in done]

    def plain(self) -> list[list[int]]:
        return self.driver.tokens(PROMPTS, COUNT)


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, runtime: Path, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    kind, ranks = request.param
    base = checkpoint(kind, tied=False, seed=1)
    out = tmp_path_factory.mktemp("lora")
    faults = out / "faults"
    faults.write_text("[]")
    with Driver(runtime, WEIGHTWIRE_PLUGINS=PLUGIN, WEIGHTWIRE_TEST_FAULTS=str(faults)) as driver:
        driver.open(base, tensor_parallel_size=ranks, **SLOTS)
        yield Trained(driver, ranks, base, out, faults)
    assert driver.leftovers() == [] and driver.family() == []


engines = pytest.mark.parametrize("trained", [("qwen3", 1), ("llama", 2)], ids=["tp1", "tp2"], indirect=True)


@engines
def test_adapters_in_their_slots_say_what_peft_says_and_the_base_is_not_touched(trained: Trained) -> None:
    first = trained.train(seed=3, verify=False)
    assert "error" not in first, first
    assert trained.adapted() == first["tokens"], "of a request that came after the update"
    assert trained.plain() == reference(trained.base) != first["tokens"]
    second = trained.train(seed=4)  # verified: the adapter is in a slot now
    assert trained.adapted() == second["tokens"] != first["tokens"]
    assert trained.plain() == reference(trained.base)
    assert second["bytes"] < trained.base.joinpath("model.safetensors").stat().st_size / 4


@engines
def test_an_adapter_that_does_not_fit_is_refused_with_names_and_the_old_one_serves(trained: Trained) -> None:
    good = trained.train(seed=5)
    large = trained.train(seed=6, r=9)["error"]
    assert large["kind"] == "ManifestMismatch"
    assert "layers.0.self_attn.q_proj has rank 9, the engine's slots have 8" in large["text"]
    other = trained.train(seed=6, targets=["embed_tokens"])["error"]
    assert other["kind"] == "ManifestMismatch" and "model.embed_tokens.weight" in other["text"]
    assert trained.adapted() == good["tokens"]
    assert trained.plain() == reference(trained.base)


@engines
def test_an_installation_that_fails_on_one_rank_is_undone_on_all(trained: Trained) -> None:
    good = trained.train(seed=7)
    assert trained.adapted() == good["tokens"]
    trained.faults.write_text(json.dumps([{"rank": trained.ranks - 1, "step": "install", "when": "before"}]))
    failed = trained.train(seed=8)
    trained.faults.write_text("[]")
    assert failed["error"]["kind"] == "CommitFailed", failed
    assert trained.adapted() == good["tokens"] != failed["tokens"]
    assert trained.adapted() == trained.train(seed=7)["tokens"]


@engines
def test_base_and_adapter_are_groups_of_their_own(trained: Trained, checkpoint: Checkpoint) -> None:
    """The base goes to another model under the adapter, and back; the adapter stays."""
    kind = "qwen3" if trained.ranks == 1 else "llama"
    other = checkpoint(kind, tied=False, seed=2)
    adapter = trained.train(seed=9)
    assert trained.adapted() == adapter["tokens"]
    with SyncManager(timeout_s=180) as manager:
        manager.update(source(other), 1)
        assert trained.plain() == reference(other)
        assert trained.adapted() not in (adapter["tokens"], reference(other))
        manager.update(source(trained.base), 2)
    assert trained.plain() == reference(trained.base)
    assert trained.adapted() == adapter["tokens"]


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("trained", [("qwen3", 1)], ids=["tp1"], indirect=True)
def test_requests_in_flight_follow_the_policy(trained: Trained, in_flight: str) -> None:
    trained.train(seed=10)
    old = trained.adapted()
    running = trained.driver.submit(PROMPTS[:2], 200, ADAPTER)
    new = trained.train(seed=11, in_flight=in_flight)
    ended = trained.driver.wait(running)
    assert [r["finish_reason"] for r in ended] == [
        "abort" if r["finish_reason"] == "abort" else "length" for r in ended
    ]
    assert [r["tokens"][:1] for r in ended] == [tokens[:1] for tokens in old[:2]]
    assert trained.adapted() == new["tokens"] != old, "no block of the old adapter is used"


@engines
def test_merged_while_streaming_an_engine_serves_what_peft_says(trained: Trained) -> None:
    """Last: the engine's base model is the merged one from here on."""
    merged = trained.train(seed=12, way="merged", group="policy", version=10)
    assert "error" not in merged, merged
    assert trained.plain() == merged["tokens"] != reference(trained.base)
