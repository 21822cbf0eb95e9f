"""What verl's loops of GRPO have in common in the tests: their configuration, and prompts."""

from __future__ import annotations

from pathlib import Path

import pandas

from tests.support.verl_job import RANKS, ROLLOUT
from tests.support.verl_server import ANSWER_TOKENS

PROMPTS = 4
"""Prompts of a step."""
LOOP = [
    "actor_rollout_ref.actor.optim.lr=1e-2",
    f"{ROLLOUT}.n=2",
    f"{ROLLOUT}.agent.num_workers=1",
    f"+{ROLLOUT}.checkpoint_engine.engine_kwargs.weightwire.timeout_s=120",
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
STANDALONE = [
    "actor_rollout_ref.hybrid_engine=False",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=1",
    f"{ROLLOUT}.free_cache_engine=False",
]
"""One replica, on a device of its own."""


def write_prompts(directory: Path, steps: int) -> Path:
    """A data set for so many steps."""
    rows = [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": f"{number} and {number + 1} make"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for number in range(PROMPTS * steps)
    ]
    pandas.DataFrame(rows).to_parquet(data := directory / "prompts.parquet")
    return data
