"""Every trainer's example, into a real vLLM: what it then says is what its exported checkpoint says.

The examples run under torchrun, without their interpreters' start; `transformers` on the exported checkpoint is the reference,
and the engines' parameters are compared with it byte for byte. Megatron-Bridge exports Megatron's checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from inference_plugin.wire.errors import EngineUnsupported
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, source
from tests.support.engines import ROOT, Driver
from tests.support.greedy import greedy_batch
from tests.support.managers import SyncManager
from tests.trainers.launching import run_ranks
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EXAMPLES = ROOT / "examples" / "trainers"
MEGATRON = ROOT / ".venvs" / "megatron" / "bin" / "python"
ON_CPU = ROOT / "tests" / "support" / "megatron_cpu.py"


@dataclass(frozen=True)
class Trainer:
    """An example, on how many ranks, of which model."""

    script: str
    ranks: int
    model: str = "llama"
    arguments: tuple[str, ...] = ()

    def run(self, out: Path, *arguments: str) -> str:
        """What it prints. The Megatron one is written for GPUs, which are stood in for."""
        script = EXAMPLES / self.script
        if self.script == "megatron.py":
            return run_ranks(ON_CPU, self.ranks, out, str(script), *arguments, *self.arguments, python=str(MEGATRON))
        python = str(MEGATRON) if self.script == "zero3.py" else sys.executable  # where DeepSpeed is
        return run_ranks(script, self.ranks, out, *arguments, *self.arguments, python=python)


TRAINERS = {
    "fsdp1-2-ranks": Trainer("fsdp1.py", 2),
    "fsdp2-4-ranks": Trainer("fsdp2.py", 4),
    "hsdp-2-x-2": Trainer("hsdp.py", 4),
    "fsdp2-2-x-tp-2": Trainer("fsdp2_tp.py", 4),
    "zero3-2-ranks": Trainer("zero3.py", 2),
    "lora-2-ranks": Trainer("lora.py", 2),
    "megatron-tp-2-x-pp-2": Trainer("megatron.py", 4, "qwen3", ("--tp", "2", "--pp", "2")),
    "megatron-ep-2": Trainer("megatron.py", 2, "qwen3_moe", ("--ep", "2")),
}
Open = Callable[[str], tuple[Path, list[Driver]]]


@pytest.fixture(scope="module")
def opened(runtime: Path, checkpoint: Checkpoint) -> Iterator[Open]:
    """Of one kind of model at a time: its checkpoint, and a vLLM of one rank and one of two, of one job: each update
    reaches both."""
    running: dict[str, tuple[Path, list[Driver]]] = {}

    def close() -> None:
        for _, engines in running.values():
            for engine in reversed(engines):
                engine.__exit__(None, None, None)
            assert [engine.leftovers() + engine.family() for engine in engines] == [[], []]
        running.clear()

    def get(kind: str) -> tuple[Path, list[Driver]]:
        if kind not in running:
            close()
            model = checkpoint(kind, tied=False, seed=1)
            one = Driver(runtime).__enter__()
            running[kind] = model, [one]
            running[kind][1].append(Driver(runtime, job=one.job).__enter__())
            for ranks, engine in enumerate(running[kind][1], start=1):
                engine.open(model, max_model_len=1024, tensor_parallel_size=ranks)
        return running[kind]

    yield get
    close()


def test_an_adapter_for_an_engine_without_lora_slots_is_refused(opened: Open) -> None:
    _, engines = opened("llama")
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = ModuleAdapter(
        {f"{layer}.lora_A.weight": torch.zeros(4, 64), f"{layer}.lora_B.weight": torch.zeros(128, 4)}
    )
    before = engines[0].tokens(PROMPTS, COUNT)
    with (
        SyncManager(group="lora.policy", timeout_s=60) as manager,
        pytest.raises(EngineUnsupported, match=r"no LoRA slots .*start the engine with LoRA enabled"),
    ):
        manager.update(adapter, 1)
    assert [engine.tokens(PROMPTS, COUNT) for engine in engines] == [before] * len(engines)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_engines_say_what_the_trained_checkpoint_says(opened: Open, tmp_path: Path, name: str) -> None:
    trainer, exported = TRAINERS[name], tmp_path / "exported"
    model, engines = opened(trainer.model)
    with SyncManager() as manager:
        manager.update(source(model))  # another trainer's weights may be there, which learned the same
    before = engines[0].tokens(PROMPTS, COUNT)
    printed = trainer.run(tmp_path, str(model), "--steps", "2", "--export", str(exported))
    assert printed.count("committed") == 2 * len(engines)
    expected = greedy_batch(exported, PROMPTS, COUNT)
    assert expected != before
    for engine in engines:
        assert engine.tokens(PROMPTS, COUNT) == expected
    with SyncManager() as manager:
        replicas = manager.verify(source(exported)).replicas
    assert len(replicas) == len(engines)
    assert all(replica.ok for replica in replicas), replicas
