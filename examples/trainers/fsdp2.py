"""FSDP2 (`fully_shard`): after each optimizer step the weights go into every running engine of the job.

torchrun --nproc-per-node 4 examples/trainers/fsdp2.py MODEL [--steps 2] [--export DIR]
"""

from __future__ import annotations

import torch
from common import begin, export, leave, tell, train_step
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from weightwire import FSDPAdapter, SyncManager


def main() -> None:
    arguments = begin(__doc__)
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    source = FSDPAdapter(model)
    with SyncManager() as manager:
        for step in range(arguments.steps):
            train_step(model, optimizer, seed=step)
            tell(manager.update(source))
    export(model, arguments.model, arguments.export)


if __name__ == "__main__":
    main()
    leave()
