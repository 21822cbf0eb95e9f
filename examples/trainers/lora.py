"""LoRA of PEFT under FSDP2, merged while streaming: every running engine of the job serves the merged model.

torchrun --nproc-per-node 2 examples/trainers/lora.py MODEL [--steps 2] [--export DIR]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import begin, leave, tell, train_step
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from weightwire import MergedLoRAAdapter, SyncManager


def adapted(checkpoint: Path) -> Any:
    torch.manual_seed(0)  # every rank begins with the same adapter
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config)


def main() -> None:
    arguments = begin(__doc__)
    model = adapted(arguments.model)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2)

    source = MergedLoRAAdapter(model)
    with SyncManager() as manager:
        for step in range(arguments.steps):
            train_step(model, optimizer, seed=step)
            tell(manager.update(source))
    export_merged(model, arguments.model, arguments.export)


def export_merged(model: torch.nn.Module, checkpoint: Path, directory: Path | None) -> None:
    """What PEFT itself makes of the trained model, to compare with."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if directory is not None and dist.get_rank() == 0:
        whole = adapted(checkpoint)
        whole.load_state_dict(state)
        whole.merge_and_unload().save_pretrained(directory)


if __name__ == "__main__":
    main()
    leave()
