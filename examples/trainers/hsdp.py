"""HSDP: copies of a model that `fully_shard` has sharded. Each shard's copies divide its bytes between them.

torchrun --nproc-per-node 4 examples/trainers/hsdp.py MODEL [--steps 2] [--export DIR]
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import begin, export, leave, tell, train_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from weightwire import FSDPAdapter, SyncManager

COPIES = 2


def main() -> None:
    arguments = begin(__doc__)
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (COPIES, dist.get_world_size() // COPIES), mesh_dim_names=("copy", "shard"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
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
