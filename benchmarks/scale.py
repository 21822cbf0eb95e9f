"""Many replicas: what fan-out over `zmq` does for an update's time and the trainer's egress. `make bench-scale` calls this.

Writes benchmarks/results/scale.json and scale.png. Two kinds of rows:

"measured": 1 to 8 replicas without an engine (coordinator, worker and installer, each replica two processes), a model of a few
kB, all on this machine: the control plane and nothing else. Per replica and update: CPU time of the trainer's process, which
is what another replica costs it, and of the replica's own processes; the wall clock, in which all of them share this
machine's cores; messages and egress as the report has them.

"simulated": 1 to 256 replicas, each on a host of its own, in a fabric that has no limit but these:

- each host has one full-duplex link (`--link-gbit`), on which what it sends goes out one after the other; a message takes
  `--latency-us` one way;
- a worker needs `--bucket-ms` to compare and place a bucket, in the order of arrival, then answers and passes it on;
- to each of its children a sender has one bucket in flight: the next goes when that is answered;
- rank 0 needs `--replica-ms` for the other messages to one replica, one after the other, each a round trip that overlaps
  with the others'.

Who sends to whom is `inference_plugin.transports.spread`, the functions that the transport uses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_plugin.transports.spread import branches, degree_of
from inference_plugin.wire.config import Config

if TYPE_CHECKING:
    from tests.support.rig import Rig

RESULTS = Path(__file__).parent / "results"
WAYS = ("direct", "chain", "tree")
SIMULATED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MEASURED = (1, 2, 4, 8)
BUCKET_BYTES = Config().bucket_bytes
CONTROL_MESSAGES = 3
"""Per replica of one worker, once its group is open: Begin, Seal, Commit."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=16.0, help="of the simulated model: 16 is 8 B parameters")
    parser.add_argument("--link-gbit", type=float, default=25.0)
    parser.add_argument("--latency-us", type=float, default=50.0)
    parser.add_argument("--bucket-ms", type=float, default=3.0, help="8 MiB at 2.8 GB/s")
    parser.add_argument("--replica-ms", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = [simulate(arguments, way, replicas) for way in WAYS for replicas in SIMULATED]
    rows += measure(arguments.runs)
    show(rows)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "scale.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot(rows, arguments.out / "scale.png")
    print(f"written to {arguments.out / 'scale.json'} and scale.png")


# --- simulated --------------------------------------------------------------------------------------------------------


def simulate(model: argparse.Namespace, way: Any, replicas: int) -> Row:
    """One update of `replicas` replicas of one worker each."""
    nbytes = int(model.gigabytes * 1e9)
    buckets = -(-nbytes // BUCKET_BYTES)
    degree = degree_of(way, replicas)
    wire_s = BUCKET_BYTES / (model.link_gbit * 1e9 / 8)
    latency_s, bucket_s = model.latency_us / 1e6, model.bucket_ms / 1e3
    ends_s, deepest = 0.0, 0
    senders: list[tuple[int, Sequence[float], Sequence[int]]] = [(0, [0.0] * buckets, range(replicas))]
    while senders:
        depth, has_s, reaches = senders.pop()
        children = branches(reaches, degree)
        taken = list(passed_on(has_s, len(children), wire_s, latency_s, bucket_s))
        for (_, below), taken_s in zip(children, taken, strict=True):
            ends_s, deepest = max(ends_s, taken_s[-1]), max(deepest, depth + 1)
            if below:
                senders.append((depth + 1, taken_s, below))
    relaying = sum(bool(below) for _, below in branches(range(replicas), degree))
    return {
        "kind": "simulated",
        "fan_out": way,
        "replicas": replicas,
        "seconds": ends_s + replicas * model.replica_ms / 1e3 + 2 * CONTROL_MESSAGES * latency_s,
        "move_seconds": ends_s,
        "bytes": nbytes,
        "egress_bytes": nbytes * len(branches(range(replicas), degree)),
        "control_messages": CONTROL_MESSAGES * replicas + relaying,
        "depth": deepest,
        "model": {name: getattr(model, name) for name in ("link_gbit", "latency_us", "bucket_ms", "replica_ms")},
    }


def passed_on(
    has_s: Sequence[float], children: int, wire_s: float, latency_s: float, bucket_s: float
) -> Iterator[list[float]]:
    """When each child has taken each bucket, from when its sender had it."""
    taken: list[list[float]] = [[] for _ in range(children)]
    link_free_s = 0.0
    for had_s in has_s:
        for own in taken:
            answered_s = own[-1] + latency_s if own else 0.0
            link_free_s = max(had_s, answered_s, link_free_s) + wire_s
            own.append(max(link_free_s + latency_s, own[-1] if own else 0.0) + bucket_s)
    yield from taken


# --- measured ---------------------------------------------------------------------------------------------------------


def measure(runs: int) -> list[Row]:
    """All ways in turn, so that what else this machine does falls on all of them."""
    from tests.support.plain_engine import ShardSource, checkpoint
    from tests.support.rig import Rig
    from trainer_adapters import SyncManager

    sources = [ShardSource(checkpoint(seed)) for seed in (0, 1)]
    rows: list[Row] = []
    version = 0
    rigs: list[Rig] = []
    with tempfile.TemporaryDirectory(prefix="ww", dir="/tmp") as directory:
        os.environ["WEIGHTWIRE_RUNTIME_DIR"] = directory
        try:
            for replicas in MEASURED:
                while len(rigs) < replicas:
                    rigs.append(Rig(Path(directory)))
                samples: dict[str, list[Row]] = {way: [] for way in WAYS}
                managers = {way: SyncManager(transport="zmq", fan_out=way, install="copy") for way in WAYS}  # type: ignore[arg-type]
                for run in range(runs + 3):
                    for way, manager in managers.items():
                        version += 1
                        before = clocks(rigs)
                        report = manager.update(sources[version % 2], version)
                        spent = [after - start for after, start in zip(clocks(rigs), before, strict=True)]
                        if run >= 3:
                            sample = dict(zip(("wall_s", "trainer_cpu_s", "replicas_cpu_s"), spent, strict=True))
                            counted = {name: getattr(report, name) for name in ("messages", "egress_bytes", "bytes")}
                            samples[way].append(sample | counted)
                for manager in managers.values():
                    manager.close()
                rows += [row(way, replicas, own) for way, own in samples.items()]
        finally:
            for rig in rigs:
                rig.end()
    return rows


def clocks(rigs: Sequence[Rig]) -> tuple[float, float, float]:
    """Wall clock, CPU time of this process, CPU time of all replicas' processes, in seconds."""
    pids = [pid for rig in rigs for pid in (rig.pid, *(worker.pid for worker in rig.card.workers))]
    return time.perf_counter(), time.process_time(), sum(map(cpu_s, pids))


def cpu_s(pid: int) -> float:
    """Of all threads that a process has now; to the nanosecond, where /proc/PID/stat counts hundredths of a second."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def row(way: str, replicas: int, samples: list[Row]) -> Row:
    median = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    return {
        "kind": "measured",
        "fan_out": way,
        "replicas": replicas,
        **median,
        "wall_ms_per_replica": 1e3 * median["wall_s"] / replicas,
        "trainer_ms_per_replica": 1e3 * median["trainer_cpu_s"] / replicas,
        "replica_ms_per_replica": 1e3 * median["replicas_cpu_s"] / replicas,
    }


# --- shown ------------------------------------------------------------------------------------------------------------


def show(rows: list[Row]) -> None:
    for each in rows:
        head = f"{each['kind']:9} {each['fan_out']:6} {each['replicas']:4} replicas:"
        egress = f"egress {each['egress_bytes'] / each['bytes']:.0f}x"
        if each["kind"] == "simulated":
            print(f"{head} {each['seconds']:8.2f} s, {egress}, {each['control_messages']} control messages")
        else:
            print(
                f"{head} {each['trainer_ms_per_replica']:.2f} ms of the trainer's CPU per replica, "
                f"{each['replica_ms_per_replica']:.2f} of its own, wall {each['wall_ms_per_replica']:.2f} ms, {egress}, "
                f"{each['messages']:.0f} messages"
            )
    for way in WAYS:
        own = [each for each in rows if (each["kind"], each["fan_out"]) == ("measured", way)]
        added_s = (own[-1]["trainer_cpu_s"] - own[0]["trainer_cpu_s"]) / (own[-1]["replicas"] - own[0]["replicas"])
        print(f"{way}: another replica costs the trainer {1e3 * added_s:.2f} ms")


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    simulated = [each for each in rows if each["kind"] == "simulated"]
    panels = (
        ("simulated", "seconds", "seconds of an update", 1.0),
        ("simulated", "egress_bytes", "bytes that leave the trainer / model", float(simulated[0]["bytes"])),
        ("simulated", "control_messages", "control messages of an update", 1.0),
        ("measured", "trainer_ms_per_replica", "trainer's CPU, ms per replica and update", 1.0),
    )
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 8))
    for axis, (kind, value, label, unit) in zip(axes.flat, panels, strict=True):
        for way in WAYS:
            own = [each for each in rows if (each["kind"], each["fan_out"]) == (kind, way)]
            axis.plot([e["replicas"] for e in own], [e[value] / unit for e in own], marker="o", label=way)
        axis.set_xscale("log", base=2)
        axis.set_xlabel(f"replicas ({kind})")
        axis.set_ylabel(label)
        if kind == "simulated":
            axis.set_yscale("log")
            axis.set_ylim(bottom=1)
        else:
            axis.axhline(2.0, color="grey", linestyle=":")
            axis.set_ylim(bottom=0)
        axis.legend()
    model = simulated[0]["model"]
    figure.suptitle(
        f"{simulated[0]['bytes'] / 1e9:.0f} GB, {model['link_gbit']:g} Gbit/s links, {model['latency_us']:g} us, "
        f"{model['bucket_ms']:g} ms per bucket"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
