"""Runs in verl's environment: `verl.trainer.main_ppo` with one of the trainers of `verl_trainers.py`:
`verl_main.py MODE MODEL SERVER DIRECTORY STEPS`. SERVER is the address of a stock vLLM server, or "sglang": verl's own servers
for it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.verl_job import BACKEND, RANKS, ROLLOUT, SGLANG, TRAINER
from tests.support.verl_loop import LOOP, STANDALONE, write_prompts
from tests.support.verl_trainers import SERVER

COMMON = [
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "ray_kwargs.ray_init.num_cpus=16",
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


def main() -> None:
    mode, model, server, directory, steps = sys.argv[1:]
    data = write_prompts(Path(directory), int(steps))
    paths = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", f"data.val_files={data}"]
    os.environ |= {
        SERVER: f"{server} {model} {directory}",
        "RAY_ADDRESS": "local",  # whatever cluster runs on this host
    }
    trainer = f"trainer.v1.trainer_mode={mode}_saved"
    written = f"hydra.run.dir={directory}/hydra"
    engine = SGLANG if server == "sglang" else []
    options = [*paths, written, trainer, *TRAINER, *BACKEND, *LOOP, *COMMON, *engine, *MODES[mode]]
    os.execv(sys.executable, [sys.executable, "-m", "verl.trainer.main_ppo", *options])


if __name__ == "__main__":
    main()
