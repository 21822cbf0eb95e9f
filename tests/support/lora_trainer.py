"""A trainer of LoRA under FSDP2, run by torchrun: `lora_trainer.py CHECKPOINT OUT JSON`.

JSON: `{"group", "way": "adapter" | "merged", "version", "seed", "r", "targets"}`. Rank 0 leaves in OUT what an unsharded
twin says after the same step, as `tokens.json`; the update's error, if it has one, as `error.json`.
"""

from __future__ import annotations

import json
import sys
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
from trainer_adapters import LoRAAdapter, MergedLoRAAdapter, SyncManager


def make(checkpoint: str, plan: dict[str, Any]) -> Any:
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
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


def main(checkpoint: str, out: Path, plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gold = make(checkpoint, plan)
    step(gold)
    model = make(checkpoint, plan)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    step(model)
    source = MergedLoRAAdapter(model) if plan["way"] == "merged" else LoRAAdapter(model)
    with SyncManager(group=plan["group"], timeout_s=180, in_flight=plan.get("in_flight", "keep")) as manager:
        try:
            report = manager.update(source, plan["version"])
            if plan.get("verify", True):
                verified = manager.verify(source)
                assert verified.ok, verified
            bytes_sent = report.bytes
        except WeightwireError as error:
            bytes_sent = 0
            (out / "error.json").write_text(json.dumps({"kind": type(error).__name__, "text": str(error)}))
    if dist.get_rank() == 0:
        tokens = [continued(gold, prompt, plan["count"]) for prompt in plan["prompts"]]
        (out / "tokens.json").write_text(json.dumps({"tokens": tokens, "bytes": bytes_sent}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
