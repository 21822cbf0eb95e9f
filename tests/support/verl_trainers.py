"""The trainers of `trainer_adapters.integrations.verl_trainers`, which leave what a test looks at; and what the tests put in the
place of verl's inference servers.

`VERL_USE_EXTERNAL_MODULES` names this module: each process that imports verl imports it.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry

from tests.support.trl_runner import PROMPTS
from tests.support.verl_server import ANSWER_TOKENS, Server, tokens_of
from trainer_adapters.integrations.verl import WeightwireManager
from trainer_adapters.integrations.verl_trainers import WeightwireColocateAsync, WeightwireSeparateAsync, WeightwireSync

SERVER = "WEIGHTWIRE_TEST_VERL_SERVER"
"""The variable that names the test's server, its model and the directory for what the run leaves, separated by spaces."""


class Saving:
    """Leaves the trained model (`saved`) and what the replica's server was told (`calls.json`), or what each of verl's own
    servers generates then (`tokens.json`)."""

    by: type = WeightwireManager

    def _init_resource_pool_mgr(self) -> None:
        from tests.support.verl_worker import LoopWorker

        super()._init_resource_pool_mgr()  # type: ignore[misc]
        role = Role.Actor if Role.Actor in self.role_worker_mapping else Role.ActorRollout
        self.role_worker_mapping[role] = ray.remote(LoopWorker)

    def fit(self, *args: Any) -> None:
        super().fit(*args)  # type: ignore[misc]
        manager = getattr(self, self.replaced)
        assert type(manager) is self.by
        save(manager)


def save(manager: CheckpointEngineManager) -> None:
    directory = Path(os.environ[SERVER].split()[2])
    manager.actor_wg.export(str(directory / "saved"))
    if isinstance(manager.replicas[0], Replica):
        (replica,) = manager.replicas
        (directory / "calls.json").write_text(json.dumps(ray.get(replica.servers[0].get_calls.remote())))
    else:
        tokens = [tokens_of(replica, PROMPTS, ANSWER_TOKENS) for replica in manager.replicas]
        (directory / "tokens.json").write_text(json.dumps(tokens))


class SavingManager(WeightwireManager):
    """For verl's older trainer, which takes a manager by its name: it saves after each update."""

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        figures: dict[str, float] = await super().update_weights(global_steps)
        await asyncio.to_thread(save, self)
        return figures


for ours in (WeightwireSync, WeightwireColocateAsync, WeightwireSeparateAsync):
    register_trainer(f"{ours.mode}_saved")(type(f"Saving{ours.__name__}", (Saving, ours), {}))


@register_trainer("alone_saved")
class Alone(Saving, PPOTrainerSeparateAsync):  # type: ignore[misc]
    """verl's own trainer and verl's own manager: Weightwire is its backend and nothing more."""

    by = CheckpointEngineManager
    replaced = "standalone_checkpoint_manager"

    def __init__(self, config: Any) -> None:
        config.trainer.v1.trainer_mode = "separate_async"
        super().__init__(config)


class Replica(RolloutReplica):  # type: ignore[misc]
    """verl's replica of a server that runs already."""

    async def init_standalone(self) -> None:
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        url, model, _ = os.environ[SERVER].split()
        self.world_size = 1  # ranks of the engine that runs
        self._server_address = url
        self._server_handle = Server.remote(url, model)  # type: ignore[attr-defined]
        self.servers = [self._server_handle]


class Rollout(BaseRollout):  # type: ignore[misc]
    """In the place of verl's, which imports vLLM. Nothing but verl's own way of updating would call it."""

    async def resume(self, tags: list[str]) -> None:
        raise AssertionError("verl's own way of updating was used")

    release = update_weights = resume


if os.environ.get(SERVER, "").startswith("http"):
    RolloutReplicaRegistry.register("vllm", lambda: Replica)
    _ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.Rollout"
