"""Runs in verl's environment: verl's own loop of GRPO, one step off (`OneStepOffRayTrainer`), with the checkpoint manager that
its config names: `verl_ppo.py MODEL SERVER DIRECTORY STEPS`.

The lines of `main` are those of verl's `OneStepTaskRunner`. A stock vLLM server, which the test has started, makes the rollouts:
a replica is verl's class, and its Ray actor asks that server. The trained model is written to DIRECTORY/saved. The last line of
the output is `{"steps": [the steps that the replica's actor was told]}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pandas
import ray
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer
from verl.experimental.separation.utils import create_resource_pool_manager
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.utils import Role, create_rl_dataset, create_rl_sampler
from verl.utils import hf_tokenizer
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

from tests.support.verl_job import BACKEND, RANKS, ROLLOUT, SETTINGS, TRAINER
from tests.support.verl_worker import LoopWorker

PROMPTS, ANSWER_TOKENS, ASK_S = 4, 12, 120
LOOP = [
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    f"{ROLLOUT}.n=2",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=1",
    f"{ROLLOUT}.free_cache_engine=False",
    f"{ROLLOUT}.agent.num_workers=1",
    f"+{ROLLOUT}.checkpoint_engine.engine_kwargs.weightwire.timeout_s=120",
    "+rollout.nnodes=1",
    "+rollout.n_gpus_per_node=1",
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.bypass_mode=True",
    "critic.enable=False",
    "data.max_prompt_length=64",
    f"data.max_response_length={ANSWER_TOKENS}",
    f"data.train_batch_size={PROMPTS}",
    "data.dataloader_num_workers=0",
    "reward.num_workers=1",
    f"reward.custom_reward_function.path={Path(__file__).with_name('verl_reward.py')}",
    f"trainer.n_gpus_per_node={RANKS}",
    "trainer.logger=[console]",
    "trainer.val_before_train=False",
    "trainer.resume_mode=disable",
    "trainer.total_epochs=1",
]


@ray.remote
class Server:
    """Where verl's agent loop asks for tokens."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.steps: list[int] = []

    def set_global_steps(self, global_steps: int) -> None:
        self.steps.append(global_steps)

    def get_steps(self) -> list[int]:
        return self.steps

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        body = {"model": self.model, "prompt": list(prompt_ids), "max_tokens": ANSWER_TOKENS, "logprobs": 0}
        body |= {"return_token_ids": True, "temperature": sampling_params["temperature"]}
        choice = (await asyncio.to_thread(self.ask, body))["choices"][0]
        return TokenOutput(
            token_ids=choice["token_ids"],
            log_probs=choice["logprobs"]["token_logprobs"],
            stop_reason="completed",
            extra_fields={"global_steps": self.steps[-1]},
        )

    def ask(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            return json.load(answer)


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
    data = Path(directory) / "prompts.parquet"
    rows = [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": f"{number} and {number + 1} make"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for number in range(PROMPTS * int(steps))
    ]
    pandas.DataFrame(rows).to_parquet(data)
    paths = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", f"data.val_files={data}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*paths, *TRAINER, *BACKEND, *LOOP])
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
    print(json.dumps({"steps": ray.get(replica.servers[0].get_steps.remote())}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
