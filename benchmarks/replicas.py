"""Several replicas of one host: one segment for all of them against one zone for each; seconds and ratios to a memory copy."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.measure import copy_seconds
from benchmarks.model import make_model
from benchmarks.processes import ROOT
from inference_plugin.net import addresses
from trainer_adapters import SyncManager

WAYS = ("zone", "shm")
WARM_UP = 4
"""Updates until all memory is touched, and used in turn."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--layers", type=int, default=28, help="28 gives 506 M parameters")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    model = make_model(arguments.layers)
    weights = load_file(model / "model.safetensors")
    rows: list[Row] = []
    console = Console()
    for count in arguments.replicas:
        console.print(f"starting {count} engines ...")
        with engines(model, count):
            copy_s = copy_seconds(sum(tensor.nbytes for tensor in weights.values()))
            made = [measure(way, weights, arguments.runs, first) for first, way in enumerate(WAYS * 2)]
        for way in WAYS:
            pair = [row for row in made if row["way"] == way]
            rows.append({"replicas": count, "copy_s": copy_s, **min(pair, key=lambda row: float(row["seconds"]))})
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "replicas.json").write_text(json.dumps(rows, indent=1) + "\n")
    show(console, rows)


@contextmanager
def engines(model: Path, count: int) -> Iterator[None]:
    """Idle engines, which this process finds in a runtime directory of their own."""
    with tempfile.TemporaryDirectory(prefix="ww-bench-", ignore_cleanup_errors=True) as directory:
        os.environ["WEIGHTWIRE_RUNTIME_DIR"] = directory
        command = [sys.executable, "-m", "inference_plugin.engines.transformers", str(model)]
        quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started = [subprocess.Popen(command, **quiet) for _ in range(count)]  # type: ignore[call-overload]
        try:
            while len(addresses.discover()) < count:
                assert all(engine.poll() is None for engine in started), "an engine ended"
                time.sleep(0.1)
            yield
        finally:
            for engine in started:
                engine.stdin.close()
                engine.wait(60)


def measure(way: str, weights: dict[str, torch.Tensor], runs: int, first: int) -> Row:
    """Medians of `runs` updates, after the first ones. `released_s`: until the trainer may go on."""
    seconds, released, stopped = [], [], []
    with SyncManager(transport=way, install="standby", timeout_s=120) as manager:
        for version in range(1 + 1000 * first, 1 + 1000 * first + WARM_UP + runs):
            for tensor in weights.values():
                tensor.view(torch.int16)[..., 0] ^= 1
            began_s = time.perf_counter()
            pending = manager.update_async(weights, version)
            pending.wait_released()
            released.append(time.perf_counter() - began_s)
            report = pending.result()
            seconds.append(time.perf_counter() - began_s)
            stopped.append(max(replica.stopped_s for replica in report.replicas))
            assert {replica.transport for replica in report.replicas} == {way}
    return {
        "way": way,
        "seconds": median(seconds[WARM_UP:]),
        "released_s": median(released[WARM_UP:]),
        "stopped_s": median(stopped[WARM_UP:]),
        "held_bytes": report.held_bytes + sum(replica.extra_bytes for replica in report.replicas),
        "bytes": report.bytes,
    }


def show(console: Console, rows: list[Row]) -> None:
    table = Table(title=f"{rows[0]['bytes'] / 1e9:.2f} GB into each replica, standby")
    for column in ("replicas", "way", "update s", "x copy", "trainer waits s", "x copy", "stopped ms", "held MB"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["replicas"]),
            row["way"],
            f"{row['seconds']:.3f}",
            f"{row['seconds'] / row['copy_s']:.1f}",
            f"{row['released_s']:.3f}",
            f"{row['released_s'] / row['copy_s']:.1f}",
            f"{row['stopped_s'] * 1e3:.1f}",
            f"{row['held_bytes'] / 1e6:.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
