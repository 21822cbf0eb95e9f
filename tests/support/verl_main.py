"""Runs in verl's environment: `verl.trainer.main_ppo` with one of the trainers of `verl_trainers.py`:
`verl_main.py MODE MODEL SERVER DIRECTORY STEPS`. SERVER is the address of a stock vLLM server, or "sglang" or "vllm": verl's
own servers for it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.verl_job import BACKEND, OWN_SERVERS, RANKS, ROLLOUT, TRAINER
from tests.support.verl_loop import LOOP, STANDALONE, write_prompts
from tests.support.verl_trainers import SERVER

COMMON = [
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "ray_kwargs.ray_init.num_cpus=32",
    f"+ray_kwargs.ray_init.num_gpus={RANKS + 1}",
    "+ray_kwargs.ray_init.include_dashboard=False",
    '+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES="tests.support.verl_cpu,tests.support.verl_trainers"',
]
COLOCATED = [
    f"{ROLLOUT}.tensor_model_parallel_size={RANKS}",  # one replica on the devices of all ranks
    f"{ROLLOUT}.free_cache_engine=True",
]
MODES = {
    "sync": COLOCATED,
    "colocate_async": COLOCATED,
    "separate_async": [
        *STANDALONE,
        "trainer.v1.separate_async.parameter_sync_step=2",  # two of the small batches make a step
    ],
}
MODES["alone"] = [*MODES["separate_async"], f"{ROLLOUT}.free_cache_engine=True"]  # verl's manager asks for its release
MODES["replicas"] = [*COLOCATED, f"{ROLLOUT}.tensor_model_parallel_size=1"]  # one replica on each rank's device
MODES["old"] = [
    *COLOCATED,
    "trainer.use_v1=False",
    f"{ROLLOUT}.checkpoint_manager_class=tests.support.verl_trainers.SavingManager",
]


def main() -> None:
    mode, model, server, directory, steps = sys.argv[1:]
    data = write_prompts(Path(directory), int(steps))
    paths = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", f"data.val_files={data}"]
    os.environ |= {
        SERVER: f"{server} {model} {directory}",
        "RAY_ADDRESS": "local",  # whatever cluster runs on this host
    }
    trainer = "trainer.v1.trainer_mode={}_saved".format("colocate_async" if mode == "replicas" else mode)
    written = f"hydra.run.dir={directory}/hydra"
    engine = OWN_SERVERS.get(server, [])
    options = [*paths, written, trainer, *TRAINER, *BACKEND, *LOOP, *COMMON, *engine, *MODES[mode]]
    program = "tests.support.verl_old" if mode == "old" else "verl.trainer.main_ppo"
    os.execv(sys.executable, [sys.executable, "-m", program, *options])


if __name__ == "__main__":
    main()
