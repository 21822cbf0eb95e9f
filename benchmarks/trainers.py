"""Trainers' adapters: from `update` to sealed, beside gathering and a plain memory copy. `make bench-trainers` calls this.

A 506 M-parameter Qwen3 in bf16 (1.01 GB) on two gloo ranks, each on a core of its own, and one receiving worker on the
same host. Writes benchmarks/results/trainers.json, rows {adapter, ranks, way, bytes, seconds, ...}, medians; `peak_bytes` is
what the rank that takes most holds beside its model, the segment in shared memory and the copy that the gathering ways make:

- "slices": the update's scan, agree, stage and seal: every byte is there and checked; `stage_seconds` is the writing;
- "full_tensor per parameter" (FSDP1: `summon_full_params` per unit; Megatron:
  Megatron-Bridge's export): every rank has gathered every tensor, and rank 0 has
  copied it to where an engine could read it;
- "gathered": the same by `trainer_adapters.sources.gather`;
- "memory copy": the same bytes, warm, with both cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.models import Setup

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
SETTLE_S = 2.0
"""Between what one way frees and the next measurement: a virtual machine gives pages back to its host in the background."""
STEP_S = 0.3
WARM_UPS = 5
"""Rounds that don't count: updates write two segments in turn, whose pages come to be when first written."""
GATHERING_RUNS = 3
"""Enough for figures that are ten times the others."""
MEGATRON = ROOT / ".venvs" / "megatron" / "bin" / "python"
CORES = sorted(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=11, help="of slices and memory copies")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=28, help="28 gives 506 M parameters")
    parser.add_argument("--adapters", nargs="*", help="some of them; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        run_rank(arguments)
        return
    from benchmarks.model import make_model
    from benchmarks.models import SETUPS

    make_model(arguments.layers)  # for Megatron-Bridge, which wants a checkpoint
    rows = [row for name in arguments.adapters or SETUPS for row in measure(name, arguments)]
    show(rows)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "trainers.json"
    measured = {(row["adapter"], row["ranks"]) for row in rows}
    before = json.loads(file.read_text()) if file.exists() else []
    kept = [row for row in before if (row["adapter"], row["ranks"]) not in measured]
    order = list(SETUPS)
    ordered = sorted(kept + rows, key=lambda row: (order.index(row["adapter"]), row["ranks"]))
    file.write_text(json.dumps(ordered, indent=1) + "\n")
    print(f"written to {arguments.out / 'trainers.json'}")


def measure(adapter: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one adapter: a receiver and a trainer of their own."""
    print(f"{adapter}: {arguments.ranks} ranks ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="ww-bench-") as scratch:
        environment = os.environ | {
            "WEIGHTWIRE_RUNTIME_DIR": scratch,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        options = ["--layers", str(arguments.layers), "--runs", str(arguments.runs), "--out", scratch]
        trainer = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
        with receiver(scratch, arguments.layers, environment):
            python = str(MEGATRON) if adapter.startswith("Megatron") else sys.executable
            command = [python, *trainer, "-m", "benchmarks.trainers", "--rank-of", adapter, *options]
            subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=900)
        rows: list[dict[str, Any]] = json.loads((Path(scratch) / "rows.json").read_text())
    return rows


@contextmanager
def receiver(scratch: str, layers: int, environment: dict[str, str]) -> Iterator[None]:
    """The receiving replica, until it has published its card and to the end of the block."""
    command = [sys.executable, "-m", "benchmarks.receiver", scratch, str(layers)]
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    try:
        deadline_s = time.monotonic() + 120
        while not _published(scratch):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit("the receiver did not start")
            time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def _published(scratch: str) -> bool:
    from inference_plugin.net import addresses

    os.environ["WEIGHTWIRE_RUNTIME_DIR"] = scratch
    return bool(addresses.discover())


# --- one trainer rank -------------------------------------------------------------------------------------------------


def run_rank(arguments: argparse.Namespace) -> None:
    """All ways, those that are compared closely by turns; rank 0 leaves the rows.

    Gathering comes last: the memory that it frees goes back to the host for seconds, which slows down what follows.
    """
    import torch.distributed as dist

    from benchmarks.models import SETUPS

    os.sched_setaffinity(0, {CORES[int(os.environ["RANK"]) % len(CORES)]})  # a core of its own, as launchers give one
    dist.init_process_group("gloo")
    setup = SETUPS[arguments.rank_of](arguments.layers)
    trainer = Trainer(setup)
    by_turns: list[tuple[int, dict[str, Callable[[], dict[str, float]]]]] = [
        (arguments.runs, {"slices": trainer.slices, "memory copy": trainer.copy}),
        (GATHERING_RUNS, {setup.native: trainer.gather_natively, "gathered": trainer.gather}),
    ]
    taken: dict[str, list[dict[str, float]]] = {way: [] for _, ways in by_turns for way in ways}
    for runs, ways in by_turns:
        for run in range(runs + WARM_UPS):
            for way, measured in ways.items():
                time.sleep(SETTLE_S)
                trainer.step()
                sample = measured()
                if run >= WARM_UPS:
                    taken[way].append(sample)
    peaks = {way: trainer.peak(measured) for _, ways in by_turns for way, measured in ways.items()}
    trainer.manager.close()
    if dist.get_rank() == 0:
        head = {"adapter": arguments.rank_of, "ranks": dist.get_world_size(), "bytes": setup.source.manifest().nbytes}
        rows = [head | {"way": way, **_medians(taken[way]), "peak_bytes": peaks[way]} for way in taken]
        (arguments.out / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}


class Trainer:
    """Each way is called on every rank; the seconds are rank 0's, who waits for the others."""

    def __init__(self, setup: Setup) -> None:
        import torch
        import torch.distributed as dist

        from trainer_adapters import SyncManager

        self.torch, self.dist, self.setup = torch, dist, setup
        self.manager = SyncManager(install="copy", timeout_s=300)
        self.version = 0
        self.target = torch.ones(setup.source.manifest().nbytes if dist.get_rank() == 0 else 0, dtype=torch.uint8)
        self.origin = torch.ones_like(self.target)

    def step(self) -> None:
        """What comes before an update: every rank computes, then changes every weight a little. All end it together."""
        torch = self.torch
        work = torch.ones(256, 256)
        until_s = time.monotonic() + STEP_S
        while time.monotonic() < until_s:
            work = (work @ work).clamp_(max=1.0)
        with torch.no_grad():
            for p in self.setup.parameters:
                local = p.to_local() if hasattr(p, "to_local") else p
                local.add_(0.001)
        self.dist.barrier()

    def slices(self) -> dict[str, float]:
        self.version += 1
        phases = self.manager.update(self.setup.source, self.version).phases
        sealed_s = sum(phases[name] for name in ("scan", "agree", "stage", "seal"))
        return {"seconds": sealed_s, **{f"{name}_seconds": phases[name] for name in ("scan", "agree", "stage", "seal")}}

    def gather(self) -> dict[str, float]:
        from trainer_adapters.sources.gather import gathered

        return self._timed(lambda: (tensor for _, tensor in gathered(self.setup.source)))

    def gather_natively(self) -> dict[str, float]:
        return self._timed(self.setup.gather)

    def copy(self) -> dict[str, float]:
        """Warm, in this process, with both cores. Eight come first: threads take a while to find a core of their own."""
        torch = self.torch
        taken_s = [0.0]
        if self.dist.get_rank() == 0:
            own = os.sched_getaffinity(0)
            os.sched_setaffinity(0, CORES)
            torch.set_num_threads(len(CORES))
            for _ in range(8 + 5):
                started_s = time.perf_counter()
                self.target.copy_(self.origin)
                taken_s.append(time.perf_counter() - started_s)
            torch.set_num_threads(1)
            os.sched_setaffinity(0, own)
        self.dist.barrier()
        return {"seconds": statistics.median(taken_s[-5:])}

    def peak(self, way: Callable[[], object]) -> int:
        from tests.support.memory import peak_bytes

        most = self.torch.tensor(peak_bytes(way))
        self.dist.all_reduce(most, self.dist.ReduceOp.MAX)
        return int(most)

    def _timed(self, tensors: Callable[[], Iterator[Any]]) -> dict[str, float]:
        self.dist.barrier()
        started_s = time.perf_counter()
        at = 0
        with self.torch.no_grad():
            for tensor in tensors():
                if self.dist.get_rank() == 0:
                    flat = tensor.contiguous().reshape(-1).view(self.torch.uint8)
                    self.target[at : at + flat.numel()].copy_(flat)
                    at += flat.numel()
        self.dist.barrier()
        taken_s = time.perf_counter() - started_s
        assert at == self.target.numel(), (at, self.target.numel())
        return {"seconds": taken_s}


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        limit = next(r["seconds"] for r in rows if r["adapter"] == row["adapter"] and r["way"] == "memory copy")
        print(
            f"{row['adapter']:12} {row['way']:28} {row['seconds']:.3f} s {row['bytes'] / row['seconds'] / 1e9:6.2f} GB/s "
            f"{row['seconds'] / limit:5.1f}x copy"
            f"  {row['peak_bytes'] / 2**20:6.1f} MiB"
            + (f"  stage {row['stage_seconds']:.3f} s" if "stage_seconds" in row else "")
        )


if __name__ == "__main__":
    main()
