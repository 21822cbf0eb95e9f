"""FSDP2 over tensor parallelism (a mesh of two dimensions): each rank sends the pieces that it holds, ungathered.

torchrun --nproc-per-node 4 examples/trainers/fsdp2_tp.py MODEL [--steps 2] [--export DIR]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from common import begin, export, leave, tell, train_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from weightwire import DTensorAdapter, SyncManager

TP = 2
PLAN: dict[str, Any] = {
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def main() -> None:
    arguments = begin(__doc__)
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size() // TP, TP), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], PLAN)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    source = DTensorAdapter(model)
    with SyncManager() as manager:
        for step in range(arguments.steps):
            train_step(model, optimizer, seed=step)
            tell(manager.update(source))
    export(model, arguments.model, arguments.export)


if __name__ == "__main__":
    main()
    leave()
