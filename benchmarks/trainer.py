"""The trainer of a benchmark: FSDP2 on the ranks of torchrun, taking JSON commands on rank 0's ZMQ socket."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.baseline import broadcast, buckets, group
from trainer_adapters import FSDPAdapter, SyncManager


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--address", required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = load(arguments.model)
    trainer = Trainer(model)
    socket: Any = None
    if rank == 0:
        socket = zmq.Context.instance().socket(zmq.REP)
        socket.bind(arguments.address)
    while True:
        command = share(socket.recv() if rank == 0 else b"")
        started_s = time.monotonic()
        result = getattr(trainer, command["do"])(**command.get("args", {})) if command["do"] != "stop" else None
        if rank == 0:
            reply = {"result": result, "start_s": started_s, "seconds": time.monotonic() - started_s}
            socket.send(json.dumps(reply).encode())
        if command["do"] == "stop":
            return


class Trainer:
    """Each method is one command, called on every rank."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.source = FSDPAdapter(model)
        self.version = 0
        self.managers: dict[tuple[str, str], SyncManager] = {}
        self.group: Any = None

    def metas(self) -> list[tuple[str, str, list[int]]]:
        return [(name, str(p.dtype).removeprefix("torch."), list(p.shape)) for name, p in self.model.named_parameters()]

    def weightwire(self, transport: str, install: str) -> dict[str, Any]:
        manager = self.managers.get((transport, install))
        if manager is None:
            for other in self.managers.values():
                other.close()
            self.managers.clear()
            manager = SyncManager(transport=transport, install=install, timeout_s=300)
            self.managers[transport, install] = manager
        self.version += 1
        report = manager.update(self.source, self.version)
        replica = report.replicas[0]
        return {
            "seconds": report.seconds,
            "phases": report.phases,
            "messages": report.messages,
            "copies_per_byte": report.copies_per_byte,
            "stopped_s": replica.stopped_s,
            "verify_s": replica.verify_s,
            "prepare_s": replica.prepare_s,
            "install_s": replica.install_s,
            "extra_bytes": replica.extra_bytes,
            "install": replica.install,
            "mechanism": replica.mechanism,
            "segments": 2 if install == "copy" else 1,
        }

    def verify(self) -> bool:
        return next(iter(self.managers.values())).verify(self.source).ok

    def connect(self, store_path: str, size: int) -> None:
        if dist.get_rank() == 0:
            self.group = group(store_path, 0, size)

    def send(self, way: str) -> None:
        """`full_tensor()` on all ranks, then rank 0 broadcasts: each tensor, or buckets."""
        if way == "per-tensor":
            for _, tensor in self._gathered():
                if self.group is not None:
                    broadcast(self.group, tensor)
            return
        gathered = self._gathered()
        for bucket in buckets(self.metas()):
            tensors = [next(gathered)[1] for _ in bucket]
            if self.group is not None:
                broadcast(self.group, torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors]))

    def save(self, path: str) -> None:
        """Gathers to rank 0 and writes safetensors."""
        from safetensors.torch import save_file

        state = {name: tensor.clone() for name, tensor in self._gathered() if dist.get_rank() == 0}
        if dist.get_rank() == 0:
            save_file(state, str(Path(path) / "model.safetensors"), metadata={"format": "pt"})

    def touch(self) -> None:
        """Changes every weight a little, as a training step does."""
        with torch.no_grad():
            for p in self.model.parameters():
                local = p.to_local() if isinstance(p, DTensor) else p
                local.add_(0.001)

    def copy(self, threads: int) -> float:
        """A plain memory copy of the model's bytes, warm, in this process: the limit. Seconds, the best of five."""
        nbytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        taken_s = [0.0]
        if dist.get_rank() == 0:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
            taken_s = []
            for _ in range(5):
                started_s = time.perf_counter()
                target.copy_(source)
                taken_s.append(time.perf_counter() - started_s)
            torch.set_num_threads(before)
        dist.barrier()
        return min(taken_s)

    def _gathered(self) -> Any:
        for name, p in self.model.named_parameters():
            with torch.no_grad():
                yield name, (p.full_tensor() if isinstance(p, DTensor) else p.detach()).contiguous()


def load(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def share(message: bytes) -> Any:
    """Rank 0's command, on every rank."""
    length = torch.tensor([len(message)])
    dist.broadcast(length, 0)
    data = torch.frombuffer(bytearray(message.ljust(int(length), b" ")), dtype=torch.uint8)
    dist.broadcast(data, 0)
    return json.loads(data.numpy().tobytes())


if __name__ == "__main__":
    main()
