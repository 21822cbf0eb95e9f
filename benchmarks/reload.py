"""A quantised model and a mixture of experts in vLLM: an update beside the engine's own reload of the same weights from disk.

`make bench` measures this last, `make bench ARGS=--models` measures nothing else. Both write benchmarks/results/reload.json.

Both models hold about 1 GB in bf16 and are served in the layout that vLLM makes of them on this machine. Every way goes to other
weights and back, in turn. In the first round trip of each way the engine must answer as engines that start with these weights do;
a row says where it doesn't (`exact`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.measure import copy_seconds
from benchmarks.model import make_model
from benchmarks.processes import ROOT, Remote
from trainer_adapters import SyncManager

RELOAD = "engine's reload from disk"
WAYS = ("copy", "standby", RELOAD)
WARM_UP = 2
"""Round trips until all memory is touched, and used in turn."""
TOKENS = 6
"""Length of each answer that is compared; short, because a CPU that emulates FP8 is slow."""

Row = dict[str, Any]


def make_experts() -> Path:
    """A random Qwen3-MoE, made once: 16 experts in each of 12 layers, 490 M parameters."""
    path = ROOT / ".models" / "bench-qwen3-moe"
    if not (path / "model.safetensors").exists():
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        from tests.support.models import tiny_tokenizer

        config = Qwen3MoeConfig(
            hidden_size=1024,
            intermediate_size=3072,
            moe_intermediate_size=768,
            num_hidden_layers=12,
            num_experts=16,
            num_experts_per_tok=2,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=64,
            vocab_size=512,
            tie_word_embeddings=False,
            max_position_embeddings=2048,
        )
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
        tiny_tokenizer(512).save_pretrained(path)
    return path


CASES: dict[str, tuple[Callable[[], Path], list[str]]] = {
    "Qwen3, fp8_per_channel": (lambda: make_model(28), ["--quantization", "fp8_per_channel"]),
    "Qwen3-MoE": (make_experts, []),
}
"""Each model: what makes its checkpoint, and how the engine is started."""


def measure_reloads(runs: int, console: Console) -> list[Row]:
    rows: list[Row] = []
    for name, (make, options) in CASES.items():
        console.print(f"starting vLLM with {name} ...")
        with tempfile.TemporaryDirectory(prefix="ww-bench-", ignore_cleanup_errors=True) as directory:
            model, other = make(), Path(directory) / "other"
            weights = load_file(model / "model.safetensors")
            others = {key: tensor.roll(1, -1) for key, tensor in weights.items()}
            other.mkdir()
            save_file(others, other / "model.safetensors", {"format": "pt"})
            head = {"model": name, "bytes": sum(tensor.nbytes for tensor in weights.values())}
            for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
                shutil.copy(model / file, other)
            with engine(other, options, Path(directory)) as served:
                answers = served.ask("generate", tokens=TOKENS)["result"]
            with engine(model, options, Path(directory)) as served:
                copy_s = copy_seconds(head["bytes"])
                case = Case(
                    served, (other, others, answers), (model, weights, served.ask("generate", tokens=TOKENS)["result"])
                )
                rows += [head | {"copy_s": copy_s} | case.measure(way, runs) for way in WAYS]
    return rows


@contextmanager
def engine(model: Path, options: list[str], scratch: Path) -> Iterator[Remote]:
    """A vLLM on all cores, which managers of this process find in a runtime directory of its own."""
    environment = {"WEIGHTWIRE_RUNTIME_DIR": str(scratch), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    os.environ |= environment
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "benchmarks.engines.vllm_process", "--model", str(model), "--tp", "1", *options]
    served = Remote(command, f"ipc://{scratch}/engine", scratch / "engine.log", environment)
    try:
        yield served
    finally:
        served.stop()


class Case:
    """A running engine, and the sets of weights that it serves in turn: checkpoint, tensors, what an engine answers that starts
    with them."""

    def __init__(self, served: Remote, *sets: tuple[Path, dict[str, torch.Tensor], Any]) -> None:
        self._served = served
        self._sets = sets
        self._version = 0

    def measure(self, way: str, runs: int) -> Row:
        """Medians of single updates."""
        taken = list(self._taken(way, runs))
        return {
            "way": way,
            "exact": all(each.pop("exact") for each in taken),
            "seconds": median(each["seconds"] for each in taken[2 * WARM_UP :]),
            "stopped_s": median(each["stopped_s"] for each in taken[2 * WARM_UP :]),
            "held_bytes": taken[-1]["held_bytes"],
        }

    def _taken(self, way: str, runs: int) -> Iterator[Row]:
        with SyncManager(transport="shm", install="copy" if way == RELOAD else way, timeout_s=300) as manager:
            for run in range(WARM_UP + runs):
                for checkpoint, weights, answers in self._sets:
                    self._version += 1
                    row = self._reload(checkpoint) if way == RELOAD else self._update(manager, weights)
                    yield row | {"exact": bool(run) or self._served.ask("generate", tokens=TOKENS)["result"] == answers}

    def _update(self, manager: SyncManager, weights: dict[str, torch.Tensor]) -> Row:
        report = manager.update(weights, self._version)
        (replica,) = report.replicas
        return {
            "seconds": report.seconds,
            "stopped_s": replica.stopped_s,
            "held_bytes": report.held_bytes + replica.extra_bytes,
        }

    def _reload(self, checkpoint: Path) -> Row:
        seconds = self._served.ask("bench_reload", path=str(checkpoint))["seconds"]
        return {"seconds": seconds, "stopped_s": seconds, "held_bytes": 0}


def show_reloads(console: Console, rows: list[Row]) -> None:
    table = Table(title="a quantised model and a mixture of experts in vLLM, TP1")
    for column in ("model", "way", "update s", "x copy", "stopped s", "held MB", "exact"):
        table.add_column(column, justify="left" if column in ("model", "way") else "right")
    for row in rows:
        table.add_row(
            row["model"],
            row["way"],
            f"{row['seconds']:.3f}",
            f"{row['seconds'] / row['copy_s']:.1f}",
            f"{row['stopped_s']:.4f}",
            f"{row['held_bytes'] / 1e6:.0f}",
            "yes" if row["exact"] else "NO",
        )
    console.print(table)


def write_reloads(out: Path, rows: list[Row]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "reload.json").write_text(json.dumps(rows, indent=1) + "\n")
