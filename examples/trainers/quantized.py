"""FSDP2 into engines that were started with a quantised checkpoint of the model: FP8 in blocks, or 8 bits of compressed-tensors.

torchrun --nproc-per-node 2 examples/trainers/quantized.py MODEL QUANTIZED [--steps 2] [--export DIR]
"""

from __future__ import annotations

import torch
from common import begin, export, leave, tell, train_step
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from weightwire import FSDPAdapter, QuantizedAdapter, SyncManager


def main() -> None:
    arguments = begin(__doc__, "quantized")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    source = QuantizedAdapter(FSDPAdapter(model), arguments.quantized)
    with SyncManager() as manager:
        for step in range(arguments.steps):
            train_step(model, optimizer, seed=step)
            tell(manager.update(source))
    export(model, arguments.model, arguments.export)


if __name__ == "__main__":
    main()
    leave()
