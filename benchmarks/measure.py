"""Runs every way in turn, and decoding beside a standby."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.engines.base import Engine, Sample, Weights
from benchmarks.plots import PLAIN_COPY
from benchmarks.processes import Remote

SETTLE_S = 3.0
"""Between what one way frees and the next measurement: a virtual machine gives pages back to its host in the background."""

OURS = [
    ("weightwire zone", "standby"),
    ("weightwire shm", "copy"),
    ("weightwire shm", "standby"),
    ("weightwire zmq", "copy"),
    ("weightwire zmq", "standby"),
    ("weightwire stream", "streaming"),
]
ZONE = "weightwire zone"
Row = dict[str, Any]
Window = tuple[float, float, float]
"""An update's start, and the begin and end of what its worker prepares; on the clock of the steps."""


def has_zones(case: Row) -> bool:
    """Whether trainer ranks can write the engine's second set themselves, which a packed layout prevents."""
    return bool(case["layout"] == "plain")


def measure(engine: Engine, trainer: Remote, case: Row, runs: int, only: str, say: Callable[[str], None]) -> list[Row]:
    """Runs all ways in turn, `runs` times after one warm-up; returns medians. The first update of each way is verified byte for
    byte: a wrong one of ours ends the benchmark, one of the engine's own is noted in its row (`exact`)."""
    ways = [*(pair for pair in OURS if pair[0] != ZONE or has_zones(case)), *((way, "engine") for way in engine.ways)]
    if not (chosen := [pair for pair in ways if only in pair[0]]):
        raise SystemExit(
            f"--ways {only!r} is part of none of these: {', '.join(dict.fromkeys(way for way, _ in ways))}"
        )
    weights = Weights(trainer.ask("metas")["result"])
    trainer.ask("weightwire", transport="shm", install="copy")  # opens the group, which `verify` needs
    taken: dict[tuple[str, str], list[Sample]] = {}
    inexact: set[str] = set()
    for run in range(runs + 1):
        for way, install in [*chosen, (PLAIN_COPY, "none")]:
            if way == PLAIN_COPY:
                sample = plain_copy(trainer)
            elif install == "engine":
                time.sleep(SETTLE_S)
                sample = engine.update(way, trainer, weights)
            else:
                sample = ours(trainer, way.split()[1], install)
            if run:
                taken.setdefault((way, install), []).append(sample)
            elif way != PLAIN_COPY and not trainer.ask("verify")["result"]:
                if install != "engine":
                    raise SystemExit(f"{way} ({install}): the engine does not compute with what the trainer sent")
                say(f"  {way}: after it the engine does not compute with what the trainer sent")
                inexact.add(way)
        say(f"  tp={case['tp']} {case['layout']}: run {run} of {runs}{' (warm-up)' if not run else ''}")
    return [
        row(case | {"way": way, "install": install, "bytes": weights.nbytes, "exact": way not in inexact}, samples)
        for (way, install), samples in taken.items()
    ]


def ours(trainer: Remote, transport: str, install: str) -> Sample:
    # A manager per way: its first update agrees on the plan, the second warms the second segment.
    for _ in range(2):
        trainer.ask("weightwire", transport=transport, install=install)
    time.sleep(SETTLE_S)
    got = trainer.ask("weightwire", after_step=True, transport=transport, install=install)["result"]
    return Sample(
        got["seconds"],
        got["stopped_s"],
        got["messages"],
        got["copies_per_byte"],
        got["extra_bytes"] + got["held_bytes"],
        {key: got[key] for key in ("phases", "verify_s", "prepare_s", "install_s")},
    )


def plain_copy(trainer: Remote) -> Sample:
    time.sleep(SETTLE_S)
    copies_s = trainer.ask("copy", threads=2)["result"]
    seconds = statistics.median(copies_s)
    return Sample(seconds, seconds, 0, 1, 0, {"best_seconds": min(copies_s)})


def copy_seconds(nbytes: int) -> float:
    """Seconds of a copy of `nbytes` by torch on all cores, the median of 7."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8).fill_(1) for _ in range(2))
    taken = []
    for _ in range(7):
        began_s = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def row(head: Row, samples: list[Sample]) -> Row:
    """One line of the results: medians."""
    names = ("seconds", "stopped_s", "messages", "copies_per_byte", "extra_bytes")
    made = head | {name: statistics.median(getattr(sample, name) for sample in samples) for name in names}
    for name, value in samples[0].details.items():
        values = [sample.details[name] for sample in samples]
        if isinstance(value, dict):
            made[name] = {key: statistics.median(each[key] for each in values) for key in value}
        else:
            made[name] = min(values) if name == "best_seconds" else statistics.median(values)
    return made


def measure_decoding(engine: Engine, trainer: Remote, case: Row) -> Row:
    """Compares decoding steps alone with steps during most of which a standby is prepared on the same cores."""
    transport = "zone" if has_zones(case) else "shm"
    for _ in range(2):
        trainer.ask("weightwire", transport=transport, install="standby")
    windows: list[Window] = []
    taken_s = []
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(engine.decode, tokens=300, requests=4)
        time.sleep(2.0)
        while not decoding.done() and len(windows) < 8:
            answer = trainer.ask("weightwire", transport=transport, install="standby")
            windows.append(window_of(answer["start_s"], answer["result"]["phases"]))
            taken_s.append(answer["result"]["seconds"])
            time.sleep(0.7)
        ends = decoding.result()

    return case | {
        "transport": transport,
        **compare_steps(ends, windows),
        "update_seconds": statistics.median(taken_s),
        "seal_seconds": statistics.median(c - b for _, b, c in windows),
    }


def window_of(start_s: float, phases: Mapping[str, float]) -> Window:
    """The window of an update, by the phases of its report."""
    staged_s = start_s + phases["scan"] + phases["agree"] + phases["stage"]
    return start_s, staged_s, staged_s + phases["seal"]


def compare_steps(ends: list[float], windows: list[Window]) -> Row:
    """Medians of the decoding steps that ended at `ends`: alone, and of those that a standby's preparation takes the most of."""

    def shared_s(step: tuple[float, float], start: float, end: float) -> float:
        return max(0.0, min(step[1], end) - max(step[0], start))

    steps = list(itertools.pairwise(ends))
    beside = [e - s for s, e in steps if 2 * sum(shared_s((s, e), b, c) for _, b, c in windows) > e - s]
    alone = [e - s for s, e in steps if not any(shared_s((s, e), a, c + 0.1) for a, _, c in windows)]
    return {
        "step_alone_s": statistics.median(alone) if alone else None,
        "step_beside_standby_s": statistics.median(beside) if beside else None,
        "steps": [len(alone), len(beside)],
        "slowdown": statistics.median(beside) / statistics.median(alone) if alone and beside else None,
    }
