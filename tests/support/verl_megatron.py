"""verl's worker with its Megatron engine, on a CPU: Megatron-Core with Megatron-Bridge, and the stand-ins of `megatron_cpu.py`.

`VERL_USE_EXTERNAL_MODULES` names this module: each process that imports verl imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register

from tests.support import megatron_cpu
from tests.support.verl_worker import TrainerWorker

MEGATRON = [
    "model_engine=megatron",
    "actor_rollout_ref.actor.megatron.dtype=bfloat16",
    "actor_rollout_ref.actor.optim.total_training_steps=10",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "trainer.device=cpu",
]


class MegatronWorker(TrainerWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        megatron_cpu.run_on_cpu()  # in the thread that runs all methods of this actor
        megatron_cpu.fake_transformer_engine()
        megatron_cpu.import_bridge()
        megatron_cpu.without_fused_kernels()
        super().init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @torch.no_grad()
    def change(self, seed: int) -> None:
        """In place of a step of the optimizer. What ranks have in common stays so."""
        for chunk in self.actor.engine.module:
            for number, parameter in enumerate(chunk.parameters()):
                own = self.rank if getattr(parameter, "tensor_model_parallel", False) else 0
                source = torch.Generator().manual_seed(1000 * seed + 10 * number + own)
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=source))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, directory: str) -> None:
        from transformers import AutoModelForCausalLM

        weights: dict[str, Any] = {name: value.clone() for name, value in self.actor.engine.get_per_tensor_param()[0]}
        if self.rank == 0:
            model = AutoModelForCausalLM.from_pretrained(self.config.model.path, dtype=torch.float32)
            model.load_state_dict(weights)
            model.save_pretrained(directory)
