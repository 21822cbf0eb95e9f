"""vLLM: in the layout that it packs on a CPU, and in the plain one of a GPU. Its users receive over gloo, or reload."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import gather
from benchmarks.engines.base import Engine, Sample, Weights
from benchmarks.processes import Remote

PER_TENSOR = "per-tensor full_tensor + gloo broadcast + load_weights"
BUCKETED = "bucketed gloo broadcast + load_weights"
RELOAD = "save safetensors + engine reload"


class Vllm(Engine):
    name = "vllm"
    title = "vLLM"
    layouts = ("plain", "packed")
    ways = (PER_TENSOR, BUCKETED, RELOAD)

    def __init__(self, model: Path, tp: int, layout: str, scratch: Path, environment: dict[str, str]) -> None:
        own = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": "1" if tp == 2 else "2",
            "BENCH_LAYOUT": layout,
        }
        command = [sys.executable, "-m", "benchmarks.engines.vllm_process", "--model", str(model), "--tp", str(tp)]
        self._process = Remote(command, f"ipc://{scratch}/engine", scratch / "engine.log", environment | own)
        self._tp = tp
        self._store = scratch / "store"
        self._checkpoint = scratch / "checkpoint"
        self._checkpoint.mkdir()

    def connect(self, trainer: Remote) -> None:
        self.decode(tokens=2, requests=1)
        store = {"store_path": str(self._store), "size": self._tp + 1}
        with ThreadPoolExecutor(1) as pool:
            connected = pool.submit(self._process.ask, "bench_connect", **store)
            trainer.ask("connect", **store)
            connected.result()

    def decode(self, tokens: int, requests: int) -> list[float]:
        ends: list[float] = self._process.ask("decode", tokens=tokens, requests=requests)["result"]
        return ends

    def update(self, way: str, trainer: Remote, weights: Weights) -> Sample:
        return self._reload(trainer, weights) if way == RELOAD else self._receive(way, trainer, weights)

    def stop(self) -> None:
        self._process.stop()

    def _receive(self, way: str, trainer: Remote, weights: Weights) -> Sample:
        kind = way.split()[0]
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(self._process.ask, "bench_receive", way=kind, metas=weights.metas)
            started_s = trainer.ask("native", after_step=True, way="send", kind=kind)["start_s"]
            seconds = received.result()["end_s"] - started_s
        if kind == "per-tensor":
            return Sample(seconds, seconds, 1 + 2 * len(weights.metas), 6, 2 * weights.largest)
        buckets = -(-weights.nbytes // gather.BUCKET_BYTES)
        extra_bytes = 2 * max(weights.largest, gather.BUCKET_BYTES) + weights.largest
        return Sample(seconds, seconds, 1 + len(weights.metas) + buckets, 7, extra_bytes)

    def _reload(self, trainer: Remote, weights: Weights) -> Sample:
        path = str(self._checkpoint)
        started_s = trainer.ask("native", after_step=True, way="save", path=path)["start_s"]
        answer = self._process.ask("bench_reload", path=path)
        seconds = answer["end_s"] - started_s
        return Sample(seconds, answer["seconds"], 1 + len(weights.metas), 7, 2 * weights.nbytes)


class Sender:
    """The trainer's side of vLLM's own ways: each method is called on every rank."""

    def __init__(self, model: Any, store_path: str, size: int) -> None:
        self._model = model
        self._group = gather.group(dist.FileStore(store_path, size), 0, size) if dist.get_rank() == 0 else None

    def send(self, kind: str) -> None:
        """`full_tensor()` on all ranks, then rank 0 broadcasts: each tensor, or buckets."""
        if kind == "per-tensor":
            for _, tensor in gather.gathered(self._model):
                if self._group is not None:
                    gather.broadcast(self._group, tensor)
            return
        for bucket in gather.gathered_buckets(self._model):
            if self._group is not None:
                gather.broadcast(self._group, gather.flat(bucket))

    def save(self, path: str) -> None:
        gather.save(self._model, path)
