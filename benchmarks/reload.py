"""Quantised models and a mixture of experts in vLLM: an update beside the engine's own reload of the same weights from disk.

`make bench` measures this last, `make bench ARGS=--models` measures nothing else. Both write benchmarks/results/reload.json.

Models of about 500 M parameters, served in the layout that vLLM makes of them on this machine. Every way goes to other
weights and back, in turn. In the first round trip of each way the engine must answer as engines that start with these weights do;
a row says where it doesn't (`exact`). A reload needs a checkpoint on disk, so writing it is part of that way.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.measure import Row, Window, compare_steps, copy_seconds, window_of
from benchmarks.model import make_model
from benchmarks.processes import ROOT, Remote
from trainer_adapters import SyncManager

RELOAD = "save safetensors + engine reload"
WAYS = ("copy", "standby", RELOAD)
WARM_UP = 2
"""Round trips until all memory is touched, and used in turn."""
TOKENS = 6
"""Length of each answer that is compared; short, because a CPU that emulates FP8 is slow."""


def make_int8(directory: Path) -> Path:
    """The benchmarks' Qwen3 in W8A8."""
    from tests.support.checkpoints import in_w8a8

    shutil.copytree(make_model(28), directory)
    return in_w8a8(directory)


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


@dataclass(frozen=True)
class Model:
    """`make`: writes or finds its checkpoint, given a directory to be made. `tokens`: length of each of four requests that are
    decoded beside updates; 0: they aren't, because a CPU takes seconds for each step."""

    make: Callable[[Path], Path]
    tokens: int
    options: tuple[str, ...] = ()


MODELS = {
    "Qwen3, fp8_per_channel": Model(lambda _: make_model(28), 0, ("--quantization", "fp8_per_channel")),
    "Qwen3, W8A8-int8": Model(make_int8, 300),
    "Qwen3-MoE": Model(lambda _: make_experts(), 600),
}


def measure_reloads(runs: int, only: str, console: Console) -> list[Row]:
    """`only`: part of the names of the models to measure."""
    rows: list[Row] = []
    for name, model in MODELS.items():
        if only in name:
            console.print(f"starting vLLM with {name} ...")
            with tempfile.TemporaryDirectory(prefix="ww-bench-", ignore_cleanup_errors=True) as directory:
                rows += [{"model": name} | row for row in measure_model(model, runs, Path(directory))]
    return rows


def measure_model(model: Model, runs: int, scratch: Path) -> list[Row]:
    made, first, other = model.make(scratch / "made"), scratch / "first", scratch / "other"
    weights = load_file(made / "model.safetensors")
    # What tells the shape of a packed weight stays as it is.
    others = {key: tensor if key.endswith("_shape") else tensor.roll(1, -1) for key, tensor in weights.items()}
    for checkpoint, tensors in ((first, weights), (other, others)):
        shutil.copytree(made, checkpoint, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    with engine(other, model.options, scratch) as served:
        answers = served.ask("generate", tokens=TOKENS)["result"]
    with engine(first, model.options, scratch) as served:
        copy_s = copy_seconds(nbytes)
        firsts = served.ask("generate", tokens=TOKENS)["result"]
        case = Case(served, (other, others, answers), (first, weights, firsts))
        rows = [{"bytes": nbytes, "copy_s": copy_s} | case.measure(way, runs) for way in WAYS]
        if model.tokens:
            rows[WAYS.index("standby")] |= case.measure_decoding(model.tokens)
    return rows


@contextmanager
def engine(model: Path, options: Sequence[str], scratch: Path) -> Iterator[Remote]:
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

    def measure_decoding(self, tokens: int) -> Row:
        """Decoding steps alone, and those beside a standby in preparation."""
        sets = itertools.cycle(self._sets)
        windows: list[Window] = []
        with SyncManager(transport="shm", install="standby", timeout_s=300) as manager, ThreadPoolExecutor(1) as pool:
            for _ in range(WARM_UP):
                self._update(manager, next(sets)[1])
            decoding = pool.submit(self._served.ask, "decode", tokens=tokens, requests=4)
            time.sleep(2.0)
            while not decoding.done() and len(windows) < 8:
                start_s = time.monotonic()
                windows.append(window_of(start_s, self._update(manager, next(sets)[1])["phases"]))
                time.sleep(0.7)
            return compare_steps(decoding.result()["result"], windows)

    def _taken(self, way: str, runs: int) -> Iterator[Row]:
        with SyncManager(transport="shm", install="copy" if way == RELOAD else way, timeout_s=300) as manager:
            for run in range(WARM_UP + runs):
                for checkpoint, weights, answers in self._sets:
                    row = self._reload(checkpoint, weights) if way == RELOAD else self._update(manager, weights)
                    yield row | {"exact": bool(run) or self._served.ask("generate", tokens=TOKENS)["result"] == answers}

    def _update(self, manager: SyncManager, weights: dict[str, torch.Tensor]) -> Row:
        self._version += 1
        report = manager.update(weights, self._version)
        (replica,) = report.replicas
        return {
            "seconds": report.seconds,
            "stopped_s": replica.stopped_s,
            "held_bytes": report.held_bytes + replica.extra_bytes,
            "phases": report.phases,
        }

    def _reload(self, checkpoint: Path, weights: dict[str, torch.Tensor]) -> Row:
        began_s = time.perf_counter()
        save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
        write_s = time.perf_counter() - began_s
        stopped_s = self._served.ask("bench_reload", path=str(checkpoint))["seconds"]
        return {"seconds": write_s + stopped_s, "stopped_s": stopped_s, "held_bytes": 0}


def show_reloads(console: Console, rows: list[Row]) -> None:
    table = Table(title="a quantised model and a mixture of experts in vLLM, TP1")
    for column in ("model", "way", "update s", "x copy", "stopped s", "held MB", "exact", "step beside"):
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
            f"{row['slowdown']:.2f}" if row.get("slowdown") else "",
        )
    console.print(table)


def write_reloads(out: Path, rows: list[Row]) -> None:
    """Writes rows in place of the former ones of their models."""
    out.mkdir(parents=True, exist_ok=True)
    path, measured = out / "reload.json", {row["model"] for row in rows}
    before: list[Row] = json.loads(path.read_text()) if path.exists() else []
    kept = [row for row in before if row["model"] in MODELS and row["model"] not in measured]
    path.write_text(
        json.dumps(sorted([*kept, *rows], key=lambda row: list(MODELS).index(row["model"])), indent=1) + "\n"
    )
