"""One update, our ways beside those that users have otherwise, in turn, in one run. `make bench` calls this.

A 506 M-parameter Qwen3 in bf16 (1.01 GB), FSDP2 on two gloo ranks, a real vLLM with TP1 and TP2 on the same host, in
the layout that vLLM packs on a CPU and in the plain one of a GPU. Writes benchmarks/results/update.json (medians),
update.png, and decoding.json (what a standby in preparation costs the decoding beside it).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from rich.console import Console
from rich.table import Table

SETTLE_S = 3.0
"""Between what one way frees and the next measurement: a virtual machine gives pages back to its host in the background."""

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
console = Console()

WAYS = [
    ("weightwire shm", "copy"),
    ("weightwire shm", "standby"),
    ("weightwire zmq", "copy"),
    ("weightwire zmq", "standby"),
    ("per-tensor full_tensor + gloo broadcast + load_weights", "engine"),
    ("bucketed gloo broadcast + load_weights", "engine"),
    ("save safetensors + engine reload", "engine"),
]


class Remote:
    """A process that answers JSON commands."""

    def __init__(self, command: list[str], address: str, log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | environment,
                start_new_session=True,
            )
        self._socket: Any = zmq.Context.instance().socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def ask(self, do: str, timeout_s: float = 600, after_step: bool = False, **arguments: Any) -> dict[str, Any]:
        """The answer to a command: `result`, and when it ran. `after_step`: the trainer's ranks compute until it begins."""
        command = {"do": do, "args": arguments.get("args", arguments), "after_step": after_step}
        self._socket.send(json.dumps(command | arguments).encode())
        deadline_s = time.monotonic() + timeout_s
        while not self._socket.poll(1000):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"{do} failed; the end of its log:\n{self.log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(self._socket.recv())
        return answer

    def stop(self) -> None:
        self._socket.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--layout", nargs="*", default=["plain", "packed"])
    parser.add_argument("--layers", type=int, default=28, help="28 gives 506 M parameters")
    parser.add_argument("--ways", default="", help="only ways whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--decoding", action="store_true", help="only what a standby costs the decoding beside it")
    arguments = parser.parse_args()
    model = make_model(arguments.layers)
    rows: list[dict[str, Any]] = []
    decoding: list[dict[str, Any]] = []
    for tp in arguments.tp:
        for layout in arguments.layout:
            with processes(model, tp, layout) as (engine, trainer, scratch):
                if not arguments.decoding:
                    rows += measure(engine, trainer, scratch, tp, layout, arguments.runs, arguments.ways)
                    add_digest_cost(rows, trainer.ask("digest_cost")["result"], tp, layout)
                decoding.append(measure_decoding(engine, trainer, tp, layout))
    show(rows, decoding)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "decoding.json").write_text(json.dumps(decoding, indent=1) + "\n")
    if rows:
        (arguments.out / "update.json").write_text(json.dumps(rows, indent=1) + "\n")
        plot(rows, arguments.out / "update.png")
    console.print(f"written to {arguments.out}")


def make_model(layers: int) -> Path:
    path = ROOT / ".models" / f"bench-qwen3-{layers}-layers"
    if not (path / "model.safetensors").exists():
        console.print(f"making a random Qwen3 of {layers} layers ...")
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=64,
            vocab_size=150000,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
        )
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
        from tests.support.models import tiny_tokenizer

        tiny_tokenizer(512).save_pretrained(path)
    return path


@contextmanager
def processes(model: Path, tp: int, layout: str) -> Iterator[tuple[Remote, Remote, Path]]:
    """An engine and a trainer that find each other in a runtime directory of their own."""
    with tempfile.TemporaryDirectory(prefix="ww-bench-") as scratch:
        console.print(f"starting vLLM tp={tp}, {layout} layout, and a trainer on 2 ranks ...")
        environment = {
            "WEIGHTWIRE_RUNTIME_DIR": scratch,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": "1" if tp == 2 else "2",
            "BENCH_LAYOUT": layout,
            "PYTHONPATH": str(ROOT),
        }
        python = sys.executable
        addresses = [f"ipc://{scratch}/{name}" for name in ("engine", "trainer")]
        engine = Remote(
            [
                python,
                "-m",
                "benchmarks.engine",
                "--model",
                str(model),
                "--tp",
                str(tp),
                "--address",
                addresses[0],
            ],
            addresses[0],
            Path(scratch) / "engine.log",
            environment,
        )
        trainer = Remote(
            [
                python,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                "2",
                "--standalone",
                "-m",
                "benchmarks.trainer",
                "--model",
                str(model),
                "--address",
                addresses[1],
            ],
            addresses[1],
            Path(scratch) / "trainer.log",
            environment | {"OMP_NUM_THREADS": "1"},
        )
        try:
            engine.ask("decode", tokens=2, requests=1)
            store = str(Path(scratch) / "store")
            with ThreadPoolExecutor(1) as pool:
                connected = pool.submit(engine.ask, "bench_connect", args=[store, tp + 1])
                trainer.ask("connect", store_path=store, size=tp + 1)
                connected.result()
            yield engine, trainer, Path(scratch)
        finally:
            trainer.stop()
            engine.stop()


def measure(
    engine: Remote, trainer: Remote, scratch: Path, tp: int, layout: str, runs: int, only: str
) -> list[dict[str, Any]]:
    """All ways in turn, `runs` times, after one warm-up; medians."""
    metas = trainer.ask("metas")["result"]
    nbytes = sum(2 * product(shape) for _, _, shape in metas)
    reload_dir = scratch / "checkpoint"
    reload_dir.mkdir()
    taken: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in range(runs + 1):
        for way, install in [*WAYS, ("plain memory copy", "none")]:
            if only not in way and way != "plain memory copy":
                continue
            if way.startswith("weightwire"):
                # A manager per way: its first update agrees on the plan, the second warms the second segment.
                for _ in range(2):
                    trainer.ask("weightwire", transport=way.split()[1], install=install)
                time.sleep(SETTLE_S)
                got = trainer.ask("weightwire", after_step=True, transport=way.split()[1], install=install)["result"]
                sample = {k: got[k] for k in ("seconds", "stopped_s", "messages", "copies_per_byte")}
                sample["extra_bytes"] = got["extra_bytes"] + (got["segments"] * nbytes if "shm" in way else 0)
                sample["detail"] = got
            elif way == "plain memory copy":
                time.sleep(SETTLE_S)
                copies_s = trainer.ask("copy", threads=2)["result"]
                seconds = statistics.median(copies_s)
                sample = {
                    "best_seconds": min(copies_s),
                    "seconds": seconds,
                    "stopped_s": seconds,
                    "messages": 0,
                    "copies_per_byte": 1,
                    "extra_bytes": 0,
                }
            elif way.startswith("save"):
                time.sleep(SETTLE_S)
                started_s = trainer.ask("save", after_step=True, path=str(reload_dir))["start_s"]
                answer = engine.ask("bench_reload", args=[str(reload_dir)])
                sample = {
                    "seconds": answer["end_s"] - started_s,
                    "stopped_s": answer["seconds"],
                    "messages": 1 + len(metas),
                    "copies_per_byte": 7,
                    "extra_bytes": 2 * nbytes,
                }
            else:
                kind = way.split()[0]
                time.sleep(SETTLE_S)
                with ThreadPoolExecutor(1) as pool:
                    received = pool.submit(engine.ask, "bench_receive", args=[kind, metas])
                    started_s = trainer.ask("send", after_step=True, way=kind)["start_s"]
                    answer = received.result()
                largest = max(2 * product(shape) for _, _, shape in metas)
                per_bucket = 64 << 20
                sample = {
                    "seconds": answer["end_s"] - started_s,
                    "stopped_s": answer["end_s"] - started_s,
                    "messages": 1 + (2 * len(metas) if kind == "per-tensor" else len(metas) + -(-nbytes // per_bucket)),
                    "copies_per_byte": 6 if kind == "per-tensor" else 7,
                    "extra_bytes": 2 * largest if kind == "per-tensor" else 2 * max(largest, per_bucket) + largest,
                }
            if run:
                taken.setdefault((way, install), []).append(sample)
        console.print(f"  tp={tp} {layout}: run {run} of {runs}{' (warm-up)' if not run else ''}")
    rows = []
    for (way, install), samples in taken.items():
        row: dict[str, Any] = {
            "way": way,
            "install": install,
            "engine": "vllm",
            "tp": tp,
            "layout": layout,
            "bytes": nbytes,
        }
        for key in ("seconds", "stopped_s", "messages", "copies_per_byte", "extra_bytes"):
            row[key] = statistics.median(s[key] for s in samples)
        if "best_seconds" in samples[0]:
            row["best_seconds"] = min(s["best_seconds"] for s in samples)
        if "detail" in samples[0]:
            phases = samples[0]["detail"]["phases"]
            row["phases"] = {k: statistics.median(s["detail"]["phases"][k] for s in samples) for k in phases}
            for key in ("verify_s", "prepare_s", "install_s"):
                row[key] = statistics.median(s["detail"][key] for s in samples)
        rows.append(row)
    return rows


def add_digest_cost(rows: list[dict[str, Any]], write_s: float, tp: int, layout: str) -> None:
    """Digests in an update over shm: what they add to the writing, and the workers' checking, which is nothing else."""
    for row in rows:
        if (row["way"], row["tp"], row["layout"]) == ("weightwire shm", tp, layout):
            row["digest_s"] = write_s + row["verify_s"]
            row["digest_share"] = row["digest_s"] / row["seconds"]


def measure_decoding(engine: Remote, trainer: Remote, tp: int, layout: str) -> dict[str, Any]:
    """Length of a decoding step alone, and of steps of which most passes while a standby is prepared beside them."""
    for _ in range(2):
        trainer.ask("weightwire", transport="shm", install="standby")
    windows: list[tuple[float, float, float]] = []  # update's start, standby's begin and end
    taken_s = []
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(engine.ask, "decode", tokens=300, requests=4)
        time.sleep(2.0)
        while not decoding.done() and len(windows) < 8:
            answer = trainer.ask("weightwire", transport="shm", install="standby")
            phases = answer["result"]["phases"]
            staged_s = answer["start_s"] + phases["scan"] + phases["agree"] + phases["stage"]
            windows.append((answer["start_s"], staged_s, staged_s + phases["seal"]))
            taken_s.append(answer["result"]["seconds"])
            time.sleep(0.7)
        ends = decoding.result()["result"]

    def shared_s(step: tuple[float, float], start: float, end: float) -> float:
        return max(0.0, min(step[1], end) - max(step[0], start))

    steps = list(itertools.pairwise(ends))
    beside = [e - s for s, e in steps if 2 * sum(shared_s((s, e), b, c) for _, b, c in windows) > e - s]
    alone = [e - s for s, e in steps if not any(shared_s((s, e), a, c + 0.1) for a, _, c in windows)]
    return {
        "engine": "vllm",
        "tp": tp,
        "layout": layout,
        "step_alone_s": statistics.median(alone) if alone else None,
        "step_beside_standby_s": statistics.median(beside) if beside else None,
        "steps": [len(alone), len(beside)],
        "slowdown": statistics.median(beside) / statistics.median(alone) if alone and beside else None,
        "update_seconds": statistics.median(taken_s),
        "seal_seconds": statistics.median(c - b for _, b, c in windows),
    }


def show(rows: list[dict[str, Any]], decoding: list[dict[str, Any]]) -> None:
    for tp, layout in sorted({(row["tp"], row["layout"]) for row in rows}):
        own = [row for row in rows if (row["tp"], row["layout"]) == (tp, layout)]
        limit = next(row["seconds"] for row in own if row["way"] == "plain memory copy")
        table = Table(title=f"vLLM tp={tp}, {layout} layout, {own[0]['bytes'] / 1e9:.2f} GB")
        for column in (
            "way",
            "install",
            "seconds",
            "x copy",
            "stopped s",
            "x copy",
            "messages",
            "copies/byte",
            "extra MB",
        ):
            table.add_column(column, justify="left" if column in ("way", "install") else "right")
        for row in own:
            table.add_row(
                row["way"],
                row["install"],
                f"{row['seconds']:.3f}",
                f"{row['seconds'] / limit:.1f}",
                f"{row['stopped_s']:.4f}",
                f"{row['stopped_s'] / limit:.2f}",
                f"{row['messages']:.0f}",
                f"{row['copies_per_byte']:.0f}",
                f"{row['extra_bytes'] / 1e6:.0f}",
            )
        console.print(table)
    for row in decoding:
        console.print(f"decoding beside a standby: {row}")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = sorted({(row["tp"], row["layout"]) for row in rows})
    figure, axes = pyplot.subplots(1, len(cases), figsize=(5.5 * len(cases), 5), squeeze=False, sharey=True)
    for axis, (tp, layout) in zip(axes[0], cases, strict=True):
        own = [row for row in rows if (row["tp"], row["layout"]) == (tp, layout)]
        names = [f"{row['way'].split(' + ')[0]}\n({row['install']})" for row in own]
        axis.barh(names, [row["seconds"] for row in own], color="#9ecae1", label="whole update")
        axis.barh(names, [row["stopped_s"] for row in own], color="#de2d26", height=0.4, label="generation stopped")
        axis.set_xscale("log")
        axis.set_title(f"tp={tp}, {layout} layout")
        axis.set_xlabel("seconds")
        axis.invert_yaxis()
    axes[0][0].legend(loc="lower right")
    figure.suptitle(f"vLLM, {rows[0]['bytes'] / 1e9:.2f} GB, 2 cores, medians")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


if __name__ == "__main__":
    main()
