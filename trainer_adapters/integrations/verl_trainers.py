"""verl's V1 trainers, which its `main_ppo` runs, with `WeightwireManager` in the place of the managers that they make themselves.

`VERL_USE_EXTERNAL_MODULES=trainer_adapters.integrations.verl_trainers` registers them in each process that imports verl, and
`trainer.v1.trainer_mode` chooses one: `sync_weightwire`, `colocate_async_weightwire` or `separate_async_weightwire`. Written
against verl 0.9.1.
"""

from __future__ import annotations

from typing import Any

from inference_plugin.wire.errors import ConfigError
from trainer_adapters.integrations.verl import WeightwireManager

try:
    from verl.trainer.ppo.v1.trainer_base import register_trainer
    from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.utils.config import omega_conf_to_dataclass
except ImportError as missing:
    raise ConfigError(f"this verl has no V1 trainers: {missing}", hint="verl 0.9.1 has them") from missing

__all__ = ["WeightwireColocateAsync", "WeightwireSeparateAsync", "WeightwireSync"]


class ThroughWeightwire:
    """Replaces a trainer's manager before its first update. Raises `ConfigError` before any engine starts if the backend of
    verl's configuration is another one: the trainer's ranks would have another end of the transfer."""

    config: Any
    mode: str
    """verl's own name of the trainer, by which it decides how to sample and which settings to read."""
    replaced = "checkpoint_manager"

    def __init__(self, config: Any) -> None:
        config.trainer.v1.trainer_mode = self.mode
        super().__init__(config)  # type: ignore[call-arg]

    def _setup(self) -> None:
        config = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        WeightwireManager(config, None, [])  # raises for another backend
        super()._setup()  # type: ignore[misc]
        made = getattr(self, self.replaced)  # its own config says "naive", whatever the user's says
        setattr(self, self.replaced, WeightwireManager(config, made.actor_wg, made.replicas))


@register_trainer("sync_weightwire")
class WeightwireSync(ThroughWeightwire, PPOTrainerSync):  # type: ignore[misc]
    """verl's default: trainer and replicas take turns on the same devices."""

    mode = "sync"


@register_trainer("colocate_async_weightwire")
class WeightwireColocateAsync(ThroughWeightwire, PPOTrainerColocateAsync):  # type: ignore[misc]
    """As `sync_weightwire`; verl aborts what is unfinished when a batch is complete, and goes on with it later."""

    mode = "colocate_async"


@register_trainer("separate_async_weightwire")
class WeightwireSeparateAsync(ThroughWeightwire, PPOTrainerSeparateAsync):  # type: ignore[misc]
    """Replicas on devices of their own. Raises `ConfigError` if verl is to start some on the trainer's devices as well."""

    mode = "separate_async"
    replaced = "standalone_checkpoint_manager"

    def __init__(self, config: Any) -> None:
        if config.actor_rollout_ref.get("hybrid_engine", True):
            raise ConfigError(
                "separate_async_weightwire with replicas on the trainer's devices as well: an update would find those asleep",
                hint="actor_rollout_ref.hybrid_engine=False",
            )
        super().__init__(config)
