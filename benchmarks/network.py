"""Updates over a network: everything, and only what changed, beside a broadcast over gloo. `make bench-network` calls this.

Trainer and engine are on this host and talk over TCP, in a network namespace of their own whose link passes so many bits a second
(`tc`, token bucket). Before each update the trainer changes that share of all elements, drawn at random, by the smallest step.
Writes network.json into benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engines.base import Engine, Weights
from benchmarks.engines.registry import ENGINES
from benchmarks.measure import SETTLE_S, plain_copy
from benchmarks.model import make_model
from benchmarks.processes import ROOT, Remote, end_by_signals
from benchmarks.update import processes

BROADCAST = "bucketed gloo broadcast + load_weights"
INSIDE = "WEIGHTWIRE_BENCH_NETWORK"
"""Set in the process that is in the namespace."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, nargs="*", default=[1.0, 10.0], help="links, in Gbit/s")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.01, 0.1], help="of the elements that change")
    parser.add_argument("--layers", type=int, default=28, help="28 gives 506 M parameters")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if INSIDE not in os.environ:
        if missing := [name for name in ("unshare", "ip", "tc") if shutil.which(name) is None]:
            raise SystemExit(f"bench-network needs {', '.join(missing)} (packages util-linux, iproute2)")
        model = make_model(arguments.layers)  # outside: it may have to be downloaded
        os.environ |= {
            INSIDE: str(model),
            "WEIGHTWIRE_LISTEN": "tcp://127.0.0.1:*",
            "UCX_NET_DEVICES": "lo",
            "UCX_TLS": "tcp",
        }
        sys.stdout.flush()
        os.execvp("unshare", ["unshare", "-rn", sys.executable, "-m", "benchmarks.network", *sys.argv[1:]])
    end_by_signals()
    console = Console()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    console.print("starting vLLM, TP1, plain layout, and a trainer on 2 ranks ...")
    with processes(ENGINES["vllm"], Path(os.environ[INSIDE]), 1, "plain") as (engine, trainer):
        rows = measure(engine, trainer, arguments, console)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "network.json").write_text(json.dumps(rows, indent=1) + "\n")
    show(console, rows)


def measure(engine: Engine, trainer: Remote, arguments: argparse.Namespace, console: Console) -> list[Row]:
    weights = Weights(trainer.ask("metas")["result"])
    copy_s = statistics.median(plain_copy(trainer).seconds for _ in range(arguments.runs))
    rows: list[Row] = []
    for gbit in arguments.gbit:
        shape = f"tc qdisc replace dev lo root tbf rate {gbit}gbit burst {max(1, int(gbit))}mb latency 100ms"
        subprocess.run(shape.split(), check=True)
        for way in ("zmq", "nixl", *(f"delta {share}" for share in arguments.shares), BROADCAST):
            taken = [one(engine, trainer, weights, way, arguments.shares) for _ in range(arguments.runs + 1)][1:]
            medians = {name: statistics.median(each[name] for each in taken) for name in taken[0]}
            rows.append({"gbit": gbit, "way": way, "bytes": weights.nbytes, "copy_s": copy_s, **medians})
            console.print(
                f"  {gbit:g} Gbit/s, {way}: {medians['seconds']:.2f} s, {medians['sent_bytes'] / 1e6:.0f} MB sent"
            )
            if way != BROADCAST and not trainer.ask("verify")["result"]:
                raise SystemExit(f"{way}: the engine does not compute with what the trainer sent")
    return rows


def one(engine: Engine, trainer: Remote, weights: Weights, way: str, shares: list[float]) -> dict[str, float]:
    transport, _, share = way.partition(" ")
    trainer.ask("change", share=float(share) if transport == "delta" else shares[0])
    time.sleep(SETTLE_S)
    if way == BROADCAST:
        sample = engine.update(way, trainer, weights)
        return {"seconds": sample.seconds, "stopped_s": sample.stopped_s, "sent_bytes": weights.nbytes}
    got = trainer.ask("weightwire", transport=transport, install="standby")["result"]
    return {"seconds": got["seconds"], "stopped_s": got["stopped_s"], "sent_bytes": got["egress_bytes"]}


def show(console: Console, rows: list[Row]) -> None:
    table = Table(title=f"{rows[0]['bytes'] / 1e9:.2f} GB into vLLM, TP1, standby")
    for column in ("link", "way", "update s", "stopped ms", "sent MB"):
        table.add_column(column, justify="right")
    for row in rows:
        sent_mb = f"{row['sent_bytes'] / 1e6:.0f}"
        seconds, stopped_ms = f"{row['seconds']:.2f}", f"{row['stopped_s'] * 1e3:.0f}"
        table.add_row(f"{row['gbit']:g} Gbit/s", row["way"], seconds, stopped_ms, sent_mb)
    console.print(table)


if __name__ == "__main__":
    main()
