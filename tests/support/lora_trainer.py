"""A trainer of LoRA under FSDP2 on two ranks that does what a test asks, one plan after the other.

`LoRATrainer` starts it under torchrun's agent and is its other end: a line of JSON each way per update. Every plan makes a model
anew, from `checkpoint`, an adapter of `seed`, and one step; what an unsharded twin says after the same step is in the answer.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from inference_plugin.wire.errors import WeightwireError
from tests.support.greedy import continued
from tests.support.leaving import leave_process_groups
from tests.trainers.launching import LOG, start_ranks
from trainer_adapters import LoRAAdapter, MergedLoRAAdapter, SyncManager

__all__ = ["LoRATrainer"]

ANSWER_TIMEOUT_S = 300.0


class LoRATrainer:
    """Two ranks, from `with` to the end of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / "trainer"))

    def __enter__(self) -> LoRATrainer:
        self._listener.listen(1)
        self._listener.settimeout(ANSWER_TIMEOUT_S)
        self._process = start_ranks(Path(__file__), 2, self._directory, self._listener.getsockname())
        connection, _ = self._listener.accept()
        connection.settimeout(ANSWER_TIMEOUT_S)
        self._channel = connection.makefile("rw")
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()  # which ends the ranks; torch's agent waits 30 s for ranks that it ends itself
        self._listener.close()
        try:
            self._process.wait(60)
        finally:
            self._process.terminate()

    def run(self, **plan: Any) -> dict[str, Any]:
        """One update, into the job that this process's environment names: `{"tokens", "bytes", "error"}`."""
        job = {name: os.environ[name] for name in ("WEIGHTWIRE_RUNTIME_DIR", "WEIGHTWIRE_JOB")}
        self._channel.write(json.dumps(plan | {"environment": job}) + "\n")
        self._channel.flush()
        line = self._channel.readline()
        if not line:
            self._process.wait(60)  # torch's agent writes down at the end why a rank failed
        assert line, (self._directory / LOG).read_text()[-8000:]
        answer: dict[str, Any] = json.loads(line)
        return answer


def make(plan: dict[str, Any]) -> Any:
    base = AutoModelForCausalLM.from_pretrained(plan["checkpoint"], dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(plan["seed"])
    config = LoraConfig(r=plan["r"], lora_alpha=10, use_rslora=True, target_modules=plan["targets"])
    model: Any = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def step(model: nn.Module) -> None:
    """A real optimizer step, with gradients that no sharding can change."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for parameter in trained:
        parameter.grad = parameter.detach() * 0.5 + 1
    optimizer.step()


def update(plan: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(plan["environment"])
    model = make(plan)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    step(model)
    source = MergedLoRAAdapter(model) if plan["way"] == "merged" else LoRAAdapter(model)
    with SyncManager(group=plan["group"], timeout_s=180, in_flight=plan["in_flight"]) as manager:
        try:
            report = manager.update(source, plan["version"])
            if plan["verify"]:
                verified = manager.verify(source)
                assert verified.ok, verified
        except WeightwireError as error:
            return {"bytes": 0, "error": {"kind": type(error).__name__, "text": str(error)}}
    return {"bytes": report.bytes, "error": None}


def main(address: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(hours=1))  # a test may take its time between two plans
    first = dist.get_rank() == 0
    if first:
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(address)
        channel = peer.makefile("rw")
    while True:
        plans: list[Any] = [channel.readline() if first else None]
        dist.broadcast_object_list(plans)
        if not plans[0]:
            break
        plan = json.loads(plans[0])
        answer = update(plan)
        if first:
            gold = make(plan)
            step(gold)
            answer["tokens"] = [continued(gold, prompt, plan["count"]) for prompt in plan["prompts"]]
            channel.write(json.dumps(answer) + "\n")
            channel.flush()


if __name__ == "__main__":
    main(sys.argv[1])
    leave_process_groups()
