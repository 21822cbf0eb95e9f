"""Weightwire moves a trainer's weights into running vLLM and SGLang engines, and rollouts back. This package only re-exports.

Trainer side: `SyncManager` and the sources (`FSDPAdapter`, `DTensorAdapter`, `MegatronAdapter`, ...), and the way back
(`RolloutPool`, `RolloutWorker`, `Store`, `DistributedBatch`, `RankBatch`), from `trainer_adapters`.
Both sides: the error tree and the reports, from `inference_plugin.wire`. Engine side: `inference_plugin.engines`; engines find
it by its entry points. `python -m weightwire` is the `weightwire` command.

Importing it is cheap: no engine, no GPU, and torch only when a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from inference_plugin import __version__

if TYPE_CHECKING:
    from inference_plugin.wire.errors import (
        ArgumentError,
        AuthError,
        BatchError,
        CommitFailed,
        ConfigError,
        DigestMismatch,
        EngineUnsupported,
        FetchFailed,
        ManagerClosed,
        ManifestMismatch,
        NotFetched,
        NotFinite,
        PeerLost,
        PoolClosed,
        ProtocolError,
        ReplicaAsleep,
        RolloutFailed,
        StaleRollout,
        StoreFull,
        SyncTimeout,
        TornReplica,
        TransportUnavailable,
        UnknownKey,
        VersionConflict,
        WeightwireError,
    )
    from inference_plugin.wire.reports import PauseReport, ReplicaReport, UpdateReport, VerifyReport
    from trainer_adapters import (
        BatchStatus,
        BestEffort,
        ClearReport,
        Config,
        DeepSpeedAdapter,
        DistributedBatch,
        DTensorAdapter,
        DtypeRules,
        ExportAdapter,
        FSDPAdapter,
        Generated,
        LocalSlice,
        LoRAAdapter,
        MegatronAdapter,
        MegatronLoRAAdapter,
        MergedLoRAAdapter,
        ModuleAdapter,
        PendingUpdate,
        QuantizedAdapter,
        Quorum,
        RankBatch,
        ReplicaStatus,
        Rollout,
        RolloutPool,
        RolloutWorker,
        Store,
        SyncManager,
        VersionSpan,
        WeightSource,
        alocalize,
        localize,
        merge,
        remotize,
    )

__all__ = [
    "ArgumentError", "AuthError", "BatchError", "BatchStatus", "BestEffort", "ClearReport", "CommitFailed", "Config",
    "ConfigError", "DTensorAdapter", "DeepSpeedAdapter", "DigestMismatch", "DistributedBatch", "DtypeRules", "EngineUnsupported",
    "ExportAdapter", "FSDPAdapter", "FetchFailed", "Generated", "LoRAAdapter", "LocalSlice", "ManagerClosed",
    "ManifestMismatch", "MegatronAdapter", "MegatronLoRAAdapter", "MergedLoRAAdapter", "ModuleAdapter", "NotFetched",
    "NotFinite", "PauseReport", "PeerLost", "PendingUpdate", "PoolClosed", "ProtocolError", "QuantizedAdapter", "Quorum",
    "ReplicaAsleep", "ReplicaReport", "ReplicaStatus", "Rollout", "RolloutFailed", "RolloutPool", "RolloutWorker", "StaleRollout",
    "RankBatch", "Store", "StoreFull", "SyncManager", "SyncTimeout", "TornReplica", "TransportUnavailable",
    "UnknownKey", "UpdateReport", "VerifyReport", "VersionConflict", "VersionSpan", "WeightSource", "WeightwireError",
    "__version__", "alocalize", "localize", "merge", "remotize",
]  # fmt: skip

_HOMES = ("trainer_adapters", "inference_plugin.wire.errors", "inference_plugin.wire.reports")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in map(importlib.import_module, _HOMES):
            if name in home.__all__:
                value = getattr(home, name)
                globals()[name] = value
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
