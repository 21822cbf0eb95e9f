"""Single updates beside decoding: when each step ended, and the spans of the update's traces, for the pictures of plots.py."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.engines.base import Engine, Weights
from benchmarks.measure import has_zones
from benchmarks.processes import Remote

Row = dict[str, Any]

PROCESSES = ("trainer0", "trainer1", "worker0", "coordinator")
"""Roles whose traces are kept; with two workers, the first one stands for both."""
NAMES = {
    "trainer0": "trainer rank 0",
    "trainer1": "trainer rank 1",
    "worker0": "engine worker",
    "coordinator": "engine core",
}
SHORTEST_S = 0.0005
"""Shorter spans are left out of the pictures, but for the stop."""


def measure_timeline(engine: Engine, trainer: Remote, case: Row, traces: Path) -> list[Row]:
    """One update with each policy, while the engine decodes four requests. All times are relative to the trainer's call."""
    nbytes = Weights(trainer.ask("metas")["result"]).nbytes
    runs = []
    for install in ("copy", "standby"):
        transport = "zone" if install == "standby" and has_zones(case) else "shm"
        for _ in range(2):
            trainer.ask("weightwire", transport=transport, install=install)
        with ThreadPoolExecutor(1) as pool:
            decoding = pool.submit(engine.decode, tokens=40, requests=4)
            time.sleep(1.0)
            answer = trainer.ask("weightwire", transport=transport, install=install)
            ends = decoding.result()
        start_s, seconds = answer["start_s"], answer["result"]["seconds"]
        steps = [end - start_s for end in ends if -seconds - 0.5 < end - start_s < 2 * seconds + 0.5]
        row = {"install": install, "bytes": nbytes, "seconds": seconds, "steps": steps}
        runs.append(case | row | {"spans": spans(traces, answer["result"]["version"], start_s)})
    return runs


def spans(traces: Path, version: int, start_s: float) -> list[Row]:
    """The spans of one update's traces: process, name, and seconds since `start_s`."""
    found = []
    for role in PROCESSES:
        for event in json.loads(_file(traces, version, role).read_text())["traceEvents"]:
            seconds = event.get("dur", 0.0) / 1e6
            if event["ph"] == "X" and (seconds >= SHORTEST_S or event["name"] == "stopped"):
                begin_s = event["ts"] / 1e6 - start_s
                found.append({"process": NAMES[role], "name": event["name"], "start_s": begin_s, "seconds": seconds})
    return sorted(found, key=lambda span: (PROCESSES.index(_role(span["process"])), span["start_s"]))


def _role(process: str) -> str:
    return next(role for role, name in NAMES.items() if name == process)


def _file(traces: Path, version: int, role: str) -> Path:
    """The one file of a role; a thread of its process writes it after the update."""
    deadline_s = time.monotonic() + 60
    while not (files := list(traces.glob(f"*.v{version}.*.{role}*.json"))):
        if time.monotonic() > deadline_s:
            raise SystemExit(
                f"{role} left no trace of version {version} in {traces}, which has {sorted(p.name for p in traces.iterdir())}"
            )
        time.sleep(0.1)
    return files[0]
