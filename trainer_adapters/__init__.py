"""What runs in the trainer: sources that say what this rank holds of a model, and the manager that sends it.

Importing this package is cheap: it needs no engine, no GPU and no Ray, and torch only when a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference_plugin.wire.config import Config
    from trainer_adapters.dtensor import DTensorAdapter
    from trainer_adapters.export import ExportAdapter
    from trainer_adapters.fsdp import FSDPAdapter
    from trainer_adapters.lora import MergedLoRAAdapter
    from trainer_adapters.lora_adapter import LoRAAdapter
    from trainer_adapters.manager import SyncManager
    from trainer_adapters.megatron import MegatronAdapter
    from trainer_adapters.megatron_lora_adapter import MegatronLoRAAdapter
    from trainer_adapters.module import ModuleAdapter
    from trainer_adapters.pending import PendingUpdate
    from trainer_adapters.roster import ReplicaStatus
    from trainer_adapters.source import DtypeRules, LocalSlice, WeightSource
    from trainer_adapters.stragglers import BestEffort, Quorum

__all__ = [
    "BestEffort",
    "Config",
    "DTensorAdapter",
    "DtypeRules",
    "ExportAdapter",
    "FSDPAdapter",
    "LoRAAdapter",
    "LocalSlice",
    "MegatronAdapter",
    "MegatronLoRAAdapter",
    "MergedLoRAAdapter",
    "ModuleAdapter",
    "PendingUpdate",
    "Quorum",
    "ReplicaStatus",
    "SyncManager",
    "WeightSource",
]

_HOMES = {
    "BestEffort": "stragglers",
    "Config": "manager",
    "DTensorAdapter": "dtensor",
    "DtypeRules": "source",
    "ExportAdapter": "export",
    "FSDPAdapter": "fsdp",
    "LoRAAdapter": "lora_adapter",
    "LocalSlice": "source",
    "MegatronAdapter": "megatron",
    "MegatronLoRAAdapter": "megatron_lora_adapter",
    "MergedLoRAAdapter": "lora",
    "ModuleAdapter": "module",
    "PendingUpdate": "pending",
    "Quorum": "stragglers",
    "ReplicaStatus": "roster",
    "SyncManager": "manager",
    "WeightSource": "source",
}


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
