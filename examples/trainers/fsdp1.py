"""FSDP1 (`FullyShardedDataParallel`), nested units: after each optimizer step the weights go into every running engine.

torchrun --nproc-per-node 2 examples/trainers/fsdp1.py MODEL [--steps 2] [--export DIR]
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from common import begin, device, export, leave, tell, train_step
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM

from weightwire import FSDPAdapter, SyncManager


def main() -> None:
    arguments = begin(__doc__)
    plain = AutoModelForCausalLM.from_pretrained(arguments.model)
    wrap = functools.partial(FullyShardedDataParallel, use_orig_params=True, device_id=device())
    model: Any = wrap(plain, auto_wrap_policy=ModuleWrapPolicy({type(plain.model.layers[0])}))
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
