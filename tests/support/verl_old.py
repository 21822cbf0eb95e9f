"""Runs in verl's environment: `verl.trainer.main_ppo` as it is with `trainer.use_v1=False`, with the worker of the tests."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer import main_ppo, main_ppo_v0

from tests.support.verl_worker import LoopWorker


class Runner(main_ppo_v0.TaskRunner.__ray_metadata__.modified_class):  # type: ignore[misc]
    def add_actor_rollout_worker(self, config: Any) -> Any:
        added = super().add_actor_rollout_worker(config)
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(LoopWorker)
        return added


if __name__ == "__main__":
    main_ppo_v0.TaskRunner = ray.remote(Runner)
    main_ppo.main()
