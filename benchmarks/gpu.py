"""An update within one GPU, against a copy of the same bytes there: `make bench-gpu PYTHON=`; docs/gpu.md says what it shows.

The engine is `TransformersEngine` in a process of its own; the trainer is this process, with FSDP2 on one rank. Both have one
model of random weights.

`WEIGHTWIRE_TEST_DEVICE=cpu` runs everything in the host's memory, at a small size: it shows that the program is in order, and its
figures mean nothing. Writes benchmarks/results/gpu.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing  # teaches ForkingPickler to send tensors by their handles
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.processes import ROOT
from inference_plugin.devices import Runs, device_of
from inference_plugin.engines.transformers import TransformersEngine
from inference_plugin.net import addresses
from inference_plugin.transports.device_pieces import PIECE_BYTES
from inference_plugin.wire.tensors import bytes_view
from trainer_adapters import FSDPAdapter, SyncManager

DEVICE = torch.device(os.environ.get("WEIGHTWIRE_TEST_DEVICE", "cuda:0"))
ON_GPU = DEVICE.type != "cpu"
LAYER_GB = 0.436
"""A layer of the model (hidden 4096, bfloat16)."""
COPIES_OF_MODEL = 4.6
"""The trainer's, the engine's, its two zones, and room for what is computed."""
HEAD_DIM = 128 if ON_GPU else 16
KILLED_GB = 1.0
"""Of the model that killed trainers send: several of them have it at once."""
HANDLES = 10_000 if ON_GPU else 20
HANDLES_S = 8.0
"""How long handles are made, and how long they are mapped, at most: on an H200 10,000 took more than a minute."""

BEGAN_S = time.perf_counter()

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=16.0, help="of the model; less where less fits")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--updates", type=int, default=100, help="in a row, for what memory they leave taken")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--engine", help="serve this checkpoint until standard input ends (for the program itself)")
    parser.add_argument("--captured", action="store_true", help="with --engine: replay decode steps from a CUDA graph")
    parser.add_argument("--trainer", help="train from this checkpoint until killed (for the program itself)")
    arguments = parser.parse_args()
    if arguments.engine:
        serve(arguments.engine, arguments.captured)
    elif arguments.trainer:
        train(arguments.trainer)
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for found in run(arguments):  # what is found so far, should it end early
            (arguments.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found, indent=1))


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    device = device_of(DEVICE)
    name = torch.cuda.get_device_name(DEVICE) if ON_GPU else "none: the host's memory, figures mean nothing"
    found: Row = {"device": name, "date": date.today().isoformat(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as directory, one_rank(Path(directory)):
        runtime = Path(directory) / "run"
        fits_gb = device.free_bytes(DEVICE) / 1e9 / COPIES_OF_MODEL
        tell("the model")
        path = make_checkpoint(Path(directory) / "model", min(arguments.gigabytes, fits_gb))
        model = trained(path)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        found |= {
            "model_bytes": nbytes,
            "tensors": len(list(model.parameters())),
            "device_copy_s": copy_seconds(nbytes),
        }
        found["digest_s"] = digest_seconds(model)
        found["updates"] = []
        adapter = FSDPAdapter(model)
        copied = [("cuda_ipc", "copy"), ("shm", "copy")] if ON_GPU else [("shm", "copy")]
        for captured, ways in ((False, [("cuda_ipc", "standby")]), (True, copied)):
            tell("an engine" + " with captured decode steps" * captured)
            with engine(path, runtime / str(captured), captured=captured):
                for transport, install in ways:
                    tell(f"updates over {transport}, {install}")
                    found["updates"].append(update_row(model, adapter, transport, install, captured, arguments.runs))
                    yield found
                if captured:
                    tell(f"{arguments.updates} updates in a row")
                    found["leak"] = leak(model, adapter, arguments.updates)
        del model, adapter
        yield found
        tell(f"{arguments.kills} trainers that are killed")
        small = make_checkpoint(Path(directory) / "small", KILLED_GB)
        with engine(small, runtime / "kills", captured=True):
            found["kills"] = killed(small, trained(small), arguments.kills)
        yield found
        tell(f"{HANDLES} handles, as far as {HANDLES_S:g} s go")
        found["handles"] = handle_seconds(HANDLES)
        yield found


def tell(what: str) -> None:
    print(f"[{time.perf_counter() - BEGAN_S:5.0f} s] {what}", file=sys.stderr, flush=True)


# --- the model, and the processes ---------------------------------------------------------------------------------------------


def make_checkpoint(path: Path, gigabytes: float) -> Path:
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM  # noqa: F401

    size = 4096 if ON_GPU else 32
    config = Qwen3Config(
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=max(1, round(gigabytes / LAYER_GB)) if ON_GPU else 2,
        num_attention_heads=size // HEAD_DIM,
        num_key_value_heads=size // HEAD_DIM,
        head_dim=HEAD_DIM,
        vocab_size=256,
    )
    with DEVICE:
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def trained(path: str | Path) -> Any:
    """The model, sharded by FSDP2 over one rank."""
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    model = models.from_pretrained(path, dtype=torch.bfloat16).to(DEVICE)
    mesh = init_device_mesh(DEVICE.type, (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextmanager
def one_rank(directory: Path) -> Iterator[None]:
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo", init_method=f"file://{directory}/ranks-{os.getpid()}", rank=0, world_size=1
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def serve(path: str, captured: bool) -> None:
    with TransformersEngine(path, device=DEVICE, captured_length=256 if captured and ON_GPU else None):
        sys.stdin.read()


def train(path: str) -> None:
    """Waits for a line, then sends version after version, and says so."""
    with tempfile.TemporaryDirectory() as directory, one_rank(Path(directory)):
        model = trained(path)
        adapter = FSDPAdapter(model)
        print("ready", flush=True)
        sys.stdin.readline()
        with SyncManager(timeout_s=60) as manager:
            while True:
                step(model)
                manager.update(adapter)
                print("updated", flush=True)


def step(model: Any) -> None:
    """Changes every weight, as an optimizer's step does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


@contextmanager
def engine(path: Path, runtime: Path, *, captured: bool) -> Iterator[None]:
    os.environ["WEIGHTWIRE_RUNTIME_DIR"] = str(runtime)
    command = [sys.executable, "-m", "benchmarks.gpu", "--engine", str(path), *(["--captured"] if captured else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)
    try:
        while not addresses.discover():
            if process.poll() is not None:
                raise SystemExit("the engine ended")
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


# --- what is measured ---------------------------------------------------------------------------------------------------------


def timed(work: Any, runs: int = 5) -> float:
    """Median seconds of a call, with what it queued on the device."""
    device, taken = device_of(DEVICE), []
    for _ in range(runs + 1):
        device.drain(DEVICE)
        began_s = time.perf_counter()
        work()
        device.drain(DEVICE)
        taken.append(time.perf_counter() - began_s)
    return median(taken[1:])


def copy_seconds(nbytes: int) -> float:
    """A copy of so many bytes within the device's memory, measured on at most 2 GiB."""
    part = min(nbytes, 2 << 30)
    source, target = (torch.zeros(part, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return timed(lambda: target.copy_(source)) * nbytes / part


def digest_seconds(model: Any) -> float:
    """All parameters, in pieces as large as an update's."""
    runs = []
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        starts = np.arange(0, local.nbytes, PIECE_BYTES, dtype=np.int64)
        runs.append(Runs(bytes_view(local), starts, np.minimum(local.nbytes - starts, PIECE_BYTES)))

    def work() -> None:
        found = device_of(DEVICE).new_digests()
        found.add_runs(runs)
        found.end()

    return timed(work)


def handle_seconds(count: int) -> Row:
    """Seconds to map, in another process: one allocation; up to `count` allocations by a handle each, and how many they were;
    and as many tensors as torch's multiprocessing sends them."""
    device = device_of(DEVICE)
    ends_s = time.perf_counter() + HANDLES_S
    many = []
    while len(many) < count and time.perf_counter() < ends_s:
        many.append(device.share(1 << 20, lambda free: free()))
    tensors = [torch.zeros(1 << 10, device=DEVICE) for _ in range(len(many))]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    packed = bytes(ForkingPickler.dumps(tensors)) if ON_GPU else b""
    child = context.Process(target=attach_all, args=([memory.handle for memory in many], device.uuid(), packed, queue))
    child.start()
    one_s, mapped, mapped_s, torch_s = queue.get(timeout=300)
    child.kill()  # unmapping takes as long as mapping
    child.join()
    return {"one_s": one_s, "mapped": mapped, "mapped_s": mapped_s, "torch_tensors": len(tensors), "torch_s": torch_s}


def attach_all(handles: Sequence[bytes], uuid: str, packed: bytes, queue: Any) -> None:
    use_shared_host()
    device = device_of(DEVICE)
    device.drain(DEVICE)
    began_s = time.perf_counter()
    device.attach(handles[0], 1 << 20, uuid).close()
    one_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    mapped = []
    for handle in handles:
        mapped.append(device.attach(handle, 1 << 20, uuid))
        if time.perf_counter() - began_s > HANDLES_S:
            break
    mapped_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    tensors = ForkingPickler.loads(packed) if packed else []
    queue.put((one_s, len(mapped), mapped_s, time.perf_counter() - began_s))
    time.sleep(HANDLES_S)
    del tensors


def update_row(model: Any, adapter: FSDPAdapter, transport: str, install: Any, captured: bool, runs: int) -> Row:
    taken, stopped = [], []
    with SyncManager(timeout_s=120, transport=transport, install=install) as manager:
        for _ in range(runs + 3):  # the first ones agree, and make zones or segments
            step(model)
            device_of(DEVICE).drain(DEVICE)
            began_s = time.perf_counter()
            report = manager.update(adapter)
            taken.append(time.perf_counter() - began_s)
            stopped.append(report.replicas[0].stopped_s)
        began_s = time.perf_counter()
        is_right = manager.verify(adapter).ok
        verify_s = time.perf_counter() - began_s
    return {
        "transport": transport,
        "install": report.replicas[0].install,
        "captured": captured,
        "first_s": taken[0],
        "seconds": median(taken[3:]),
        "stopped_s": median(stopped[3:]),
        "phases_s": dict(report.phases),
        "verified": is_right,
        "verify_s": verify_s,
    }


def leak(model: Any, adapter: FSDPAdapter, updates: int) -> Row:
    """Free memory of the device after a tenth of the updates, and after all."""
    device, free = device_of(DEVICE), []
    with SyncManager(timeout_s=120) as manager:
        for i in range(updates):
            step(model)
            manager.update(adapter)
            if i in (updates // 10, updates - 1):
                free.append(device.free_bytes(DEVICE))
        is_right = manager.verify(adapter).ok
    return {"updates": updates, "free_bytes_early": free[0], "free_bytes_late": free[-1], "verified": is_right}


def killed(path: Path, model: Any, count: int) -> list[Row]:
    """`count` times: `kill -9` of a trainer somewhere in its updates, then an update of ours, and whether the engine holds it."""
    command, adapter = [sys.executable, "-m", "benchmarks.gpu", "--trainer", str(path)], FSDPAdapter(model)
    children = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    rows: list[Row] = []
    try:
        for turn, child in enumerate(children):
            assert child.stdin is not None and child.stdout is not None
            assert child.stdout.readline() == "ready\n", "a trainer ended before it was killed"
            child.stdin.write("go\n")
            child.stdin.flush()
            assert child.stdout.readline() == "updated\n", "a trainer ended before it was killed"
            time.sleep(0.037 * turn)
            child.kill()
            child.wait()
            with SyncManager(timeout_s=120) as manager:
                states = [replica.state for replica in manager.replicas()]
                step(model)
                manager.update(adapter)
                rows.append({"states": states, "verified": manager.verify(adapter).ok})
    finally:
        for child in children:
            child.kill()
    return rows


def use_shared_host() -> None:
    """On the CPU: memory that processes share as a GPU's."""
    if not ON_GPU:
        from tests.support import shared_host_plugin

        assert shared_host_plugin.plugin is not None


if __name__ == "__main__":
    if not ON_GPU:
        from tests.support.shared_host import ON_SHARED_HOST

        os.environ |= ON_SHARED_HOST
        use_shared_host()
    main()
