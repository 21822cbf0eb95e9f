"""Runs in verl's environment: verl's own loop of GRPO, one step off (`OneStepOffRayTrainer`), with the checkpoint manager that
its config names: `verl_ppo.py MODEL SERVER DIRECTORY STEPS`.

The lines of `main` are those of verl's `OneStepTaskRunner`. A stock vLLM server, which the test has started, makes the rollouts:
a replica is verl's class, and its Ray actor asks that server. The trained model is written to DIRECTORY/saved. The last line of
the output is `{"calls": [what the replica's actor was told]}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import ray
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer
from verl.experimental.separation.utils import create_resource_pool_manager
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.utils import Role, create_rl_dataset, create_rl_sampler
from verl.utils import hf_tokenizer
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry

from tests.support.verl_job import BACKEND, RANKS, SETTINGS, TRAINER
from tests.support.verl_loop import LOOP, STANDALONE, write_prompts
from tests.support.verl_server import Server
from tests.support.verl_worker import LoopWorker

ONE_STEP_OFF = ["+rollout.nnodes=1", "+rollout.n_gpus_per_node=1"]


class Replica(RolloutReplica):  # type: ignore[misc]
    """verl's replica of a server that runs already."""

    async def init_standalone(self) -> None:
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        self._server_address = sys.argv[2]
        self._server_handle = Server.remote(self._server_address, sys.argv[1])  # type: ignore[attr-defined]
        self.servers = [self._server_handle]


def main() -> None:
    model, _, directory, steps = sys.argv[1:]
    RolloutReplicaRegistry.register("vllm", lambda: Replica)
    data = write_prompts(Path(directory), int(steps))
    paths = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", f"data.val_files={data}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*paths, *TRAINER, *BACKEND, *LOOP, *STANDALONE, *ONE_STEP_OFF])
    OmegaConf.resolve(config)
    variables = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    # verl counts what Ray calls GPUs; its workers ask for none of them, by the platform of verl_cpu.py.
    ray.init(
        "local",
        num_cpus=16,
        num_gpus=RANKS,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    tokenizer = hf_tokenizer(model)
    mapping = {Role.Actor: ray.remote(LoopWorker)}
    dataset = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
    trainer = OneStepOffRayTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=mapping,
        resource_pool_manager=create_resource_pool_manager(config, mapping.keys()),
        ray_worker_group_cls=RayWorkerGroup,
        train_dataset=dataset,
        val_dataset=dataset,
        collate_fn=collate_fn,
        train_sampler=create_rl_sampler(config.data, dataset),
        device_name="cpu",
    )
    trainer.init_workers()
    asyncio.run(trainer.fit())
    # This loop syncs before each step, and not after the last one.
    trainer.checkpoint_manager.update_weights(int(steps) + 1)
    trainer.actor_wg.export(f"{directory}/saved")
    (replica,) = trainer.llm_server_manager.get_replicas()
    print(json.dumps({"calls": ray.get(replica.servers[0].get_calls.remote())}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
