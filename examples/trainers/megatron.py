"""Megatron-Core, loaded by Megatron-Bridge: each rank sends the parts of the checkpoint that it holds, ungathered.

torchrun --nproc-per-node 4 examples/trainers/megatron.py MODEL --tp 2 --pp 2 [--ep 1] [--steps 2] [--export DIR]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from common import BATCH, LENGTH, begin, leave, tell, write_checkpoint
from megatron.bridge import AutoBridge
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import destroy_model_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from weightwire import MegatronAdapter, SyncManager


def main() -> None:
    arguments = begin(__doc__, tp=1, pp=1, ep=1)
    bridge = AutoBridge.from_hf_pretrained(arguments.model)
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = arguments.tp
    provider.pipeline_model_parallel_size = arguments.pp
    provider.expert_model_parallel_size = arguments.ep
    provider.finalize_model_grads_func = finalize_model_grads
    provider.finalize()
    provider.initialize_model_parallel(seed=1)
    model = provider.provide_distributed_model(DistributedDataParallelConfig())
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=provider.bf16), model)

    source = MegatronAdapter(model, bridge.hf_pretrained.config)
    with SyncManager() as manager:
        for step in range(arguments.steps):
            train_step(model, optimizer, provider.vocab_size, seed=step)
            tell(manager.update(source))
    if arguments.export:
        tensors = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
        write_checkpoint(tensors, arguments.model, arguments.export)


def train_step(model: list[Any], optimizer: Any, vocab_size: int, seed: int) -> None:
    """One step on random tokens: weights change, and that is all this is for."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (BATCH, LENGTH))
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=partial(forward, tokens),
        data_iterator=None,
        model=model,
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    optimizer.step()


def forward(tokens: torch.Tensor, _: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
    tokens = tokens.to(next(chunk.parameters()).device)
    positions = torch.arange(LENGTH, device=tokens.device).expand(BATCH, -1)
    losses = chunk(tokens, positions, None, labels=tokens.roll(-1, 1))
    return losses, lambda output: (output.float().mean(), {})


if __name__ == "__main__":
    main()
    destroy_model_parallel()
    leave()
