"""The trainer's side: sources that describe this rank's part of a model, the manager that sends it, and the batches that bring
back what the engines generated.

Importing this package is cheap: it needs no engine, no GPU and no Ray, and torch only when a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference_plugin.wire.config import Config
    from trainer_adapters.batch.batch import DistributedBatch
    from trainer_adapters.batch.merging import merge
    from trainer_adapters.batch.nested import alocalize, localize, remotize
    from trainer_adapters.batch.ranks import RankBatch
    from trainer_adapters.batch.records import ClearReport, VersionSpan
    from trainer_adapters.batch.rollouts.generated import Generated
    from trainer_adapters.batch.rollouts.machine_io import Rollout
    from trainer_adapters.batch.rollouts.pool import RolloutPool
    from trainer_adapters.batch.rollouts.worker import RolloutWorker
    from trainer_adapters.batch.status import BatchStatus
    from trainer_adapters.batch.store import Store
    from trainer_adapters.fleet.machine_io import ReplicaStatus
    from trainer_adapters.manager import SyncManager
    from trainer_adapters.settings import BestEffort, Quorum
    from trainer_adapters.sources.base import LocalSlice, WeightSource
    from trainer_adapters.sources.dtensor import DTensorAdapter
    from trainer_adapters.sources.export import ExportAdapter
    from trainer_adapters.sources.fsdp import FSDPAdapter
    from trainer_adapters.sources.lora.adapter import LoRAAdapter
    from trainer_adapters.sources.lora.merged import MergedLoRAAdapter
    from trainer_adapters.sources.megatron.lora_adapter import MegatronLoRAAdapter
    from trainer_adapters.sources.megatron.source import MegatronAdapter
    from trainer_adapters.sources.module import ModuleAdapter
    from trainer_adapters.sources.quantized import QuantizedAdapter
    from trainer_adapters.sources.selection import DtypeRules
    from trainer_adapters.sources.zero import DeepSpeedAdapter
    from trainer_adapters.update.handle import PendingUpdate

__all__ = [
    "BatchStatus", "BestEffort", "ClearReport", "Config", "DTensorAdapter", "DeepSpeedAdapter", "DistributedBatch", "DtypeRules",
    "ExportAdapter", "FSDPAdapter", "Generated", "LoRAAdapter", "LocalSlice", "MegatronAdapter", "MegatronLoRAAdapter",
    "MergedLoRAAdapter", "ModuleAdapter", "PendingUpdate", "QuantizedAdapter", "Quorum", "ReplicaStatus", "Rollout",
    "RolloutPool", "RolloutWorker", "RankBatch", "Store", "SyncManager", "VersionSpan", "WeightSource", "alocalize", "localize",
    "merge", "remotize",
]  # fmt: skip

_HOMES = {
    "BatchStatus": "batch.status", "BestEffort": "settings", "ClearReport": "batch.records", "Config": "manager",
    "DTensorAdapter": "sources.dtensor", "DeepSpeedAdapter": "sources.zero", "DistributedBatch": "batch.batch",
    "DtypeRules": "sources.selection",
    "ExportAdapter": "sources.export", "FSDPAdapter": "sources.fsdp", "Generated": "batch.rollouts.generated",
    "LoRAAdapter": "sources.lora.adapter", "LocalSlice": "sources.base", "MegatronAdapter": "sources.megatron.source",
    "MegatronLoRAAdapter": "sources.megatron.lora_adapter", "MergedLoRAAdapter": "sources.lora.merged",
    "ModuleAdapter": "sources.module", "PendingUpdate": "update.handle",
    "QuantizedAdapter": "sources.quantized", "Quorum": "settings",
    "ReplicaStatus": "fleet.machine_io", "Rollout": "batch.rollouts.machine_io", "RolloutPool": "batch.rollouts.pool",
    "RolloutWorker": "batch.rollouts.worker", "RankBatch": "batch.ranks", "Store": "batch.store",
    "SyncManager": "manager", "VersionSpan": "batch.records", "WeightSource": "sources.base",
    "alocalize": "batch.nested", "localize": "batch.nested", "merge": "batch.merging", "remotize": "batch.nested",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
