"""Every trainer's example, into a real vLLM: what it then says is what its exported checkpoint says.

The examples run as a user runs them, under torchrun; `transformers` on the exported checkpoint is the reference.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_plugin.wire.errors import EngineUnsupported
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS
from tests.support.engines import ROOT, Driver
from tests.support.greedy import greedy_batch
from trainer_adapters import ModuleAdapter, SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EXAMPLES = ROOT / "examples" / "trainers"
TRAINERS: dict[str, tuple[str, int]] = {
    "fsdp1-2-ranks": ("fsdp1.py", 2),
    "fsdp2-4-ranks": ("fsdp2.py", 4),
    "hsdp-2-x-2": ("hsdp.py", 4),
    "fsdp2-2-x-tp-2": ("fsdp2_tp.py", 4),
    "lora-2-ranks": ("lora.py", 2),
}


@pytest.fixture(scope="module")
def engines(runtime: Path, checkpoint: Checkpoint) -> Iterator[list[Driver]]:
    """A vLLM of one rank and one of two, of one job: each update reaches both."""
    model = checkpoint("llama", tied=False, seed=1)
    with Driver(runtime) as one, Driver(runtime, job=one.job) as two:
        one.open(model, max_model_len=1024)
        two.open(model, max_model_len=1024, tensor_parallel_size=2)
        yield [one, two]
    assert one.leftovers() == [] and one.family() == [] and two.family() == []


def train(python: str | Path, script: Path, ranks: int, *arguments: Any) -> str:
    """Runs an example to its end; what it printed."""
    launcher = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ran = subprocess.run(
        [*map(str, launcher), str(script), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    return ran.stdout


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_engines_say_what_the_trained_checkpoint_says(
    engines: list[Driver], checkpoint: Checkpoint, tmp_path: Path, trainer: str
) -> None:
    script, ranks = TRAINERS[trainer]
    model, exported = checkpoint("llama", tied=False, seed=1), tmp_path / "exported"
    before = engines[0].tokens(PROMPTS, COUNT)
    said = train(sys.executable, EXAMPLES / script, ranks, model, "--steps", 2, "--export", exported)
    assert said.count("committed") == 2 * len(engines)
    expected = greedy_batch(exported, PROMPTS, COUNT)
    assert expected != before
    for engine in engines:
        assert engine.tokens(PROMPTS, COUNT) == expected


def test_an_adapter_for_an_engine_without_lora_slots_is_refused(engines: list[Driver]) -> None:
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    source = ModuleAdapter(
        {f"{layer}.lora_A.weight": torch.zeros(4, 64), f"{layer}.lora_B.weight": torch.zeros(128, 4)}
    )
    before = engines[0].tokens(PROMPTS, COUNT)
    with (
        SyncManager(group="lora.policy", timeout_s=60) as manager,
        pytest.raises(EngineUnsupported, match=r"no LoRA slots .*start the engine with LoRA enabled"),
    ):
        manager.update(source, 1)
    assert [engine.tokens(PROMPTS, COUNT) for engine in engines] == [before] * len(engines)
