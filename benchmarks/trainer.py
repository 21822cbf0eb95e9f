"""The trainer of a benchmark: FSDP2 on the ranks of torchrun, taking JSON commands on rank 0's ZMQ socket."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import zmq
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks import gather
from benchmarks.engines.registry import SENDERS
from trainer_adapters import FSDPAdapter, SyncManager

CORES = sorted(os.sched_getaffinity(0))
STEP_S = 0.3
"""How long a training step is made to last."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--address", required=True)
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {CORES[rank % len(CORES)]})  # a core of its own, as launchers give one
    dist.init_process_group("gloo")
    model = load(arguments.model)
    trainer = Trainer(model, SENDERS[arguments.engine])
    socket: Any = None
    if rank == 0:
        socket = zmq.Context.instance().socket(zmq.REP)
        socket.bind(arguments.address)
    while True:
        command = share(socket.recv() if rank == 0 else b"")
        if command.get("after_step"):
            trainer.step()
        started_s = time.monotonic()
        result = getattr(trainer, command["do"])(**command.get("args", {})) if command["do"] != "stop" else None
        if rank == 0:
            reply = {"result": result, "start_s": started_s, "seconds": time.monotonic() - started_s}
            socket.send(json.dumps(reply).encode())
        if command["do"] == "stop":
            return


class Trainer:
    """Each method is one command, called on every rank."""

    def __init__(self, model: Any, sender: Any) -> None:
        self.model = model
        self.sender = sender
        self.source = FSDPAdapter(model)
        self.version = 0
        self.managers: dict[tuple[str, str], SyncManager] = {}

    def metas(self) -> list[tuple[str, str, list[int]]]:
        return gather.metas_of(self.model)

    def connect(self, **arguments: Any) -> None:
        """For the engine's own ways."""
        self.sender = self.sender(self.model, **arguments)

    def native(self, way: str, **arguments: Any) -> Any:
        """One of the engine's own ways."""
        return getattr(self.sender, way)(**arguments)

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
            "version": report.version,
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
            "held_bytes": report.held_bytes,
            "egress_bytes": report.egress_bytes,
        }

    def verify(self) -> bool:
        """Whether the engine holds what this trainer holds, however it got there."""
        return next(iter(self.managers.values())).verify(self.source).ok

    def step(self) -> None:
        """What comes before an update: every rank computes, then changes every weight a little. All end it together."""
        work = torch.ones(256, 256)
        until_s = time.monotonic() + STEP_S
        while time.monotonic() < until_s:
            work = (work @ work).clamp_(max=1.0)
        with torch.no_grad():
            for p in self.model.parameters():
                local = p.to_local() if isinstance(p, DTensor) else p
                local.add_(0.001)
        dist.barrier()

    def change(self, share: float) -> None:
        """Changes about that share of the elements, drawn at random, by the smallest step of bfloat16."""
        for p in self.model.parameters():
            local = p.detach().to_local() if isinstance(p, DTensor) else p.detach()
            bits = local.view(torch.int16).view(-1)
            bits[torch.randint(bits.numel(), (round(bits.numel() * share),))] ^= 1
        dist.barrier()

    def copy(self, threads: int) -> list[float]:
        """Plain memory copies of the model's bytes, warm, in this process: the limit. Seconds of five, one by one.

        Eight come first: threads that wake up take a while to find a core of their own.
        """
        nbytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        taken_s: list[float] = []
        if dist.get_rank() == 0:
            before = torch.get_num_threads()
            own = os.sched_getaffinity(0)
            os.sched_setaffinity(0, CORES)
            torch.set_num_threads(threads)
            source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
            for _ in range(8 + 5):
                started_s = time.perf_counter()
                target.copy_(source)
                taken_s.append(time.perf_counter() - started_s)
            torch.set_num_threads(before)
            os.sched_setaffinity(0, own)
        dist.barrier()
        return taken_s[8:]


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
    dist.destroy_process_group()
