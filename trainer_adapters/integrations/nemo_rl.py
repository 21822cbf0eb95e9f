"""NeMo-RL: a checkpoint engine, chosen by `policy.generation.refit_transport`, whose transfer is a Weightwire update.

1. NeMo-RL makes one `WeightwireEngine` in each policy worker and one in each vLLM worker;
2. the policy workers' ones make a `SyncManager` together, and send what NeMo-RL's generator yields straight into the engines;
3. the vLLM workers' ones yield nothing to load.

NeMo-RL's class `CheckpointEngine` is not imported: its factory calls methods by name. Written against NeMo-RL of 2026-08-22
(7ea279a).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch

from inference_plugin.wire.errors import ConfigError, ProtocolError
from trainer_adapters.integrations.options import await_ranks, checked_options
from trainer_adapters.integrations.read_once import GeneratorUpdates
from trainer_adapters.manager import SyncManager

__all__ = ["WeightwireEngine"]


class WeightwireEngine:
    """One worker's end of a refit. `dtype`: in which all tensors travel; default: as NeMo-RL yields them. `options`:
    `SyncManager`'s arguments. NeMo-RL's `bucket_size` is not used. Raises `ConfigError` for arguments that `SyncManager` does
    not take, and for an invalid dtype.
    """

    shard_expert_weights = False

    def __init__(
        self, bucket_size: int, release_after_refit: bool = False, *, dtype: str | None = None, **options: Any
    ) -> None:
        self._options = checked_options(options, dtype, f"policy.generation.refit_cfg of {__name__}", ConfigError)
        self._dtype = dtype
        self._manager: SyncManager | None = None

    def get_target_weight_layout(self) -> None:
        """None: each inference worker takes its own part of the whole tensors."""

    def prepare(self) -> dict[str, Any]:
        return {}

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Makes the `SyncManager`; collective over the policy workers' torch.distributed. Rank 0 waits until the engines of all
        rollout workers have registered, and raises `SyncTimeout` if they don't."""
        if self._manager is None:
            self._manager = SyncManager(**self._options)
            self._updates = GeneratorUpdates(self._manager, self._dtype)
        await_ranks(self._manager, rollout_world_size)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Nothing: the replicas register themselves."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Collective over the policy workers: every replica serves `weights`, as the next version, when this returns.

        In the first refit rank 0 keeps the whole model in host memory, because the generator can be read once; later ones pass
        on one tensor at a time. Raises what `SyncManager.update` raises, on all ranks.
        """
        if self._manager is None:
            raise ProtocolError("send_weights before init_policy_process_group", side="trainer")
        report = self._updates.update(weights)
        if self._options.keys().isdisjoint(("on_failure", "stragglers")):
            report.raise_failed()  # a lost replica too

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        """Yields nothing: the engine around this worker has the weights by the update."""
        nothing: list[list[tuple[str, torch.Tensor]]] = []
        for batch in nothing:
            yield batch

    def finalize(self) -> None:
        """Closes the `SyncManager`; NeMo-RL calls it at the end, and with `release_after_refit` after each refit."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()
