"""The way back: rows from two owners to two consumers, ours beside three other ways, in one run. `make bench-batch` calls this.

4096 samples with 4 keys (int64 ids, two float32 and a bool for each token), each 64 to 16 k tokens long, drawn uniformly from
a seed: about 570 MB. Two owners hold half each; consumer 0 takes the first half of the tasks and consumer 1 the second, so both
fetch from both owners. Owners, consumers and the controller are processes of one host.

Rows are put when their task ends, in every way: `rows_per_put` is 1 (a sample a task), 8, 16 or 64 (groups), or a quarter of all.
An owner of "weightwire" announces what it put within a millisecond in one message, as `RolloutWorker` does if tasks end so fast.
`put_seconds` is from the controller's "go" until it knows that everything is put. Then it hands each consumer its half;
`fetch_seconds` is from there until both have *consumed*: every row is a tensor at its consumer, and every byte of it was read
once by the same digest (xxh3-64). "weightwire" reads for the check of a fetch, the others as the rows come. After the time is
taken, the consumers' digests, for "weightwire" of a second reading of the fetched rows, are compared with the owners'.

"weightwire, built in place" is ours for a worker that writes its rows into `Store.empty` as it makes them, so that the put copies
nothing. How the rows come there is not in the time, as it is not in that of any other way.

Ways: see `benchmarks/batches` (`sockets` and `ray_ways`). `controller_bytes` goes both ways: "weightwire" and msgpack count
their frames, for Ray the kernel counts the controller's TCP connections, for TransferQueue those of its own controller.
"memory copy" is the bound: all bytes copied once, to memory that exists, and read once, by two threads (`bound`).
"4.4x of 13.7x": ours is 4.4 times faster than that way, the bound 13.7 times.
`copies_per_byte` is of the rows, counted in the code of each way: in user space, and two for each passage through a socket.

Writes benchmarks/results/batch.json (medians; kinds "rows", "bound", and "completion", see `benchmarks/batches/latency.py`), in
which a run replaces the rows of the ways that it measured, and batch.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.batches.bound import measure_bound
from benchmarks.batches.data import CONSUMERS, KEYS, OWNERS, Case, Times, expected
from benchmarks.batches.latency import measure_latency
from benchmarks.batches.ray_ways import queue_way, ray_way
from benchmarks.batches.sockets import socket_way
from benchmarks.processes import ROOT, end_by_signals

OURS, BUILT = "weightwire", "weightwire, built in place"
SETTLE_S = 0.5
"""Between what one run frees and the next."""
CASE_S = 15
"""A way that takes longer for a case runs it less often."""
GROUPS = 8, 16, 64

Row = dict[str, Any]
WAYS: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    OURS: lambda scratch: socket_way(OURS, scratch),
    BUILT: lambda scratch: socket_way(BUILT, scratch),
    "msgpack over zmq": lambda scratch: socket_way("msgpack over zmq", scratch),
    "msgpack over zmq, views": lambda scratch: socket_way("msgpack over zmq, views", scratch),
    "Ray object store": ray_way,
    "TransferQueue": queue_way,
}
COPIES = {
    OURS: 1,  # into the owner's shared memory
    BUILT: 0,
    "msgpack over zmq": 10,  # to bytes, packed, a socket, unpacked; packed, a socket, unpacked
    "msgpack over zmq, views": 6,  # packed, a socket; packed, a socket
    "Ray object store": 1,  # into the object store
    "TransferQueue": 5,  # a socket, kept as it came, a socket, joined to a nested tensor by the consumer's client
}
TO_REACH = {"msgpack over zmq": 10, "Ray object store": 5, "TransferQueue": 5}
"""How many times faster ours is to be."""

console = Console(width=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096, help="a multiple of 256; fewer for a quick look")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rows-per-put", type=int, nargs="*", help="1, 8, 16, 64 and a quarter of all by default")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument(
        "--tasks", type=int, default=200, help="of which the completion latency is taken; 0 leaves it out"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if arguments.samples % 256 or arguments.samples < 256:
        parser.error("--samples: give a multiple of 256")
    end_by_signals()
    sizes = arguments.rows_per_put or [1, *GROUPS, arguments.samples // 4]
    cases = [Case(arguments.samples, size) for size in sizes]
    rows: list[Row] = []
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ww", dir="/tmp") as directory:
        scratch = Path(directory)
        if arguments.tasks:
            rows += measure_latency(scratch, arguments.tasks, polled=max(1, arguments.tasks // 5))
        rows.append(measure_bound(cases[0]))
        for way in arguments.ways:
            rows += measure(way, cases, arguments.runs, scratch)
            merge(arguments.out / "batch.json", rows)
    rows = merge(arguments.out / "batch.json", rows)
    show(rows)
    plot(rows, arguments.out / "batch.png")


def merge(path: Path, rows: list[Row]) -> list[Row]:
    """Writes rows in place of the former ones of their ways; returns all."""
    before = json.loads(path.read_text()) if path.exists() else []
    new = {each["way"] for each in rows}
    merged = [each for each in before if each["way"] not in new] + rows
    path.write_text(json.dumps(merged, indent=1) + "\n")
    return merged


def measure(way: str, cases: list[Case], runs: int, scratch: Path) -> list[Row]:
    """A row for each case. A way that can't run gives its rows with the reason, and none of their figures."""
    rows: list[Row] = []
    try:
        with WAYS[way](scratch) as running:
            for case in cases:
                console.print(f"{way}, {case.per_put} rows per put")
                digests = running.prepare(case)
                taken: list[Times] = []
                enough_s = time.monotonic() + CASE_S
                while len(taken) < runs and (not taken or time.monotonic() < enough_s):
                    time.sleep(SETTLE_S)
                    taken.append(running.run(case))
                    for consumer, got in enumerate(running.digests()):
                        if got != expected(case, digests, consumer):
                            raise SystemExit(f"{way}: consumer {consumer} did not get its rows")
                    running.clear()
                rows.append(row(way, case, taken))
    except Exception as error:
        if way == OURS:
            raise
        console.print(traceback.format_exc())
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        rows += [_head(way, case) | {"failed": reason} for case in cases[len(rows) :]]
    return rows


def row(way: str, case: Case, taken: list[Times]) -> Row:
    """Medians of the runs."""
    controller_bytes = statistics.median(times.controller_bytes for times in taken)
    return _head(way, case) | {
        "runs": len(taken),
        "put_seconds": statistics.median(times.put_s - times.start_s for times in taken),
        "fetch_seconds": statistics.median(times.consumed_s - times.put_s for times in taken),
        "seconds": statistics.median(times.consumed_s - times.start_s for times in taken),
        "controller_bytes": int(controller_bytes),
        "controller_share": controller_bytes / case.nbytes,
        "copies_per_byte": COPIES[way],
    }


def _head(way: str, case: Case) -> Row:
    return {
        "kind": "rows",
        "way": way,
        "rows_per_put": case.per_put,
        "samples": case.samples,
        "keys": len(KEYS),
        "bytes": case.nbytes,
        "owners": OWNERS,
        "consumers": CONSUMERS,
        "cores": len(os.sched_getaffinity(0)),
    }


# --- shown ------------------------------------------------------------------------------------------------------------


def show(rows: list[Row]) -> None:
    least_s = next((each["put_seconds"] + each["fetch_seconds"] for each in rows if each["kind"] == "bound"), None)
    for of_size in _by_size(rows):
        head = of_size[0]
        ours = next((each for each in of_size if each["way"] == OURS), None)
        table = Table(
            title=f"{head['rows_per_put']} rows per put, {head['samples']} samples, {head['bytes'] / 1e6:.0f} MB"
        )
        for column in ("way", "put s", "fetch s", "total s", "ours is faster", "controller", "share", "copies/byte"):
            table.add_column(column, justify="left" if column == "way" else "right")
        for each in of_size:
            if "failed" in each:
                table.add_row(each["way"], each["failed"])
                continue
            faster = f"{each['seconds'] / ours['seconds']:.1f}x" if ours and each["way"] not in (OURS, BUILT) else ""
            if faster and least_s:
                faster += f" of {each['seconds'] / least_s:.1f}x"
            table.add_row(
                each["way"],
                *(f"{each[name]:.3f}" for name in ("put_seconds", "fetch_seconds", "seconds")),
                faster + (f" (to reach: {TO_REACH[each['way']]}x)" if each["way"] in TO_REACH else ""),
                f"{each['controller_bytes'] / 1e6:.2f} MB",
                f"{each['controller_share']:.3%}",
                str(each["copies_per_byte"]),
            )
        console.print(table)
    for each in rows:
        if each["kind"] == "bound":
            seconds = each["put_seconds"], each["fetch_seconds"]
            console.print(
                f"memory: {each['bytes'] / 1e6:.0f} MB copied in {seconds[0]:.3f} s, read in {seconds[1]:.3f} s"
            )
        if each["kind"] == "completion":
            times = ", ".join(f"{name} {each[f'{name}_s'] * 1e3:.2f} ms" for name in ("median", "p95", "max"))
            console.print(f"completion by {each['way']}: {times} ({each['tasks']} tasks)")


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = _by_size(rows)
    if not sizes:
        return
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(3.6 * len(sizes), 3.5), squeeze=False, sharey=True)
    for axis, of_size in zip(axes[0], sizes, strict=True):
        ran = [each for each in of_size if "failed" not in each]
        names = [each["way"] for each in ran]
        puts = [each["put_seconds"] for each in ran]
        axis.barh(names, puts, color="#9ecae1", label="put")
        axis.barh(names, [each["fetch_seconds"] for each in ran], left=puts, color="#3182bd", label="fetch and read")
        for place, each in enumerate(ran):
            axis.text(each["put_seconds"] + each["fetch_seconds"], place, f" {each['seconds']:.2f} s", va="center")
        axis.margins(x=0.25)
        axis.set_title(f"{of_size[0]['rows_per_put']} rows per put")
        axis.set_xlabel("seconds")
    axes[0][0].invert_yaxis()  # of all: they share it
    axes[0][-1].legend(loc="lower right")
    head = sizes[0][0]
    figure.suptitle(
        f"{head['samples']} samples x {head['keys']} keys, {head['bytes'] / 1e6:.0f} MB, {head['cores']} cores"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _by_size(rows: list[Row]) -> list[list[Row]]:
    sizes = sorted({each["rows_per_put"] for each in rows if each["kind"] == "rows"})
    return [[each for each in rows if each.get("rows_per_put") == size] for size in sizes]


if __name__ == "__main__":
    main()
