"""verl's trainer worker with what a test wants beside it: weights that change, a checkpoint, a rank that fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine_workers import ActorRolloutRefWorker


class TrainerWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        initialize_global_process_group_ray(backend="gloo")  # verl asks for "cpu:gloo,DEVICE:BACKEND", here cpu twice

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @torch.no_grad()
    def change(self, seed: int) -> None:
        """In place of a step of the optimizer."""
        source = torch.Generator().manual_seed(seed)
        for parameter in self.actor.engine.module.parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=source)
            if isinstance(parameter, DTensor):
                noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements)
            parameter.add_(noise)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, directory: str) -> None:
        """A checkpoint of the weights, for an engine that starts with them."""
        from transformers import AutoModelForCausalLM

        whole = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in self.actor.engine.module.state_dict().items()
        }
        if self.rank == 0:
            model = AutoModelForCausalLM.from_pretrained(self.config.model.path, dtype=torch.float32)
            model.load_state_dict(whole)
            model.save_pretrained(directory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, rank: int) -> None:
        """From now on that rank's training engine fails after its last tensor; rank -1: none does."""
        engine: Any = self.actor.engine
        vars(engine).pop("get_per_tensor_param", None)
        if rank != self.rank:
            return
        whole = engine.get_per_tensor_param

        def failing() -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
            def some() -> Iterator[tuple[str, torch.Tensor]]:
                yield from whole()[0]
                raise RuntimeError(f"rank {rank} fails for the test")

            return some(), None

        engine.get_per_tensor_param = failing


class LoopWorker(TrainerWorker, DetachActorWorker):  # type: ignore[misc]
    """The worker of verl's trainers whose replicas have devices of their own."""
