"""The trainer's half of vLLM's own weight transfer, for programs that are written against it.

    from trainer_adapters.integrations.vllm import WeightwireInitInfo
    engine = WeightTransferTrainerFactory.trainer_init(WeightwireInitInfo(rank=rank), client=client, source=ModuleSource(model))
    engine.send_weights()  # after each optimizer step, on every trainer rank

The server was started with `--weight-transfer-config '{"backend": "weightwire"}'`. What `send_weights` does:

1. one update of a `SyncManager`, on all trainer ranks: the bytes go Weightwire's way, are checked, and are committed between two
   steps on all ranks of every replica of the job, or on none. Generation goes on meanwhile: no `pause` is needed;
2. `client.start_weight_update()`, `client.update_weights({"group": ..., "version": ...})` and
   `client.finish_weight_update(version)`: every rank of the engines that the client speaks to says whether it serves that
   version, and vLLM publishes it. They fail where it does not.

Needs a vLLM beside the trainer, as every backend of vLLM's does. Trainers without one use `weightwire.SyncManager` itself, which
takes vLLM's `WeightSource` objects too. Older than 0.27 vLLM has no trainer half; there `WeightwireTrainer` is made directly.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from inference_plugin.wire.errors import ArgumentError, CommitFailed, EngineUnsupported, PeerLost, TransportUnavailable
from inference_plugin.wire.messages import PROTOCOL_VERSION
from inference_plugin.wire.reports import UpdateReport
from trainer_adapters.integrations.options import await_ranks, await_replicas, checked_options, replicas_behind
from trainer_adapters.manager import SyncManager
from trainer_adapters.sources.chosen import Sendable

try:
    from vllm.distributed.weight_transfer import base, factory
except ImportError as missing:
    raise TransportUnavailable(
        f"vLLM can't be imported beside the trainer: {missing}",
        hint="use weightwire.SyncManager, which needs no vLLM in the trainer",
    ) from missing

__all__ = ["WeightwireInitInfo", "WeightwireTrainer"]

BACKEND = "weightwire"
CALLED = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
RANK = "give this process's rank in torch.distributed; 0 if it trains alone"

_TrainerInitInfo: Any = getattr(base, "TrainerInitInfo", object)
_TrainerEngine: Any = getattr(base, "TrainerWeightTransferEngine", object)


@dataclass
class WeightwireInitInfo(_TrainerInitInfo):  # type: ignore[misc]
    """What `trainer_init` gets. `rank`: of this trainer process; rank 0 speaks with vLLM. `group`: the weight-update group.
    `dtype`: in which all tensors travel; None: the source's own. `options`: keywords for `SyncManager`."""

    backend: ClassVar[str] = BACKEND

    group: str = "policy"
    dtype: torch.dtype | str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rank: int = field(kw_only=True)


class WeightwireTrainer(_TrainerEngine):  # type: ignore[misc]
    """One trainer rank's half. `client`: vLLM's (HTTP, Ray, or any object with the same four methods), used on rank 0 only.
    `source`: vLLM's `WeightSource` or whatever else `SyncManager.update` takes; the same kind on every rank."""

    init_info_cls = WeightwireInitInfo

    def __init__(self, init_info: WeightwireInitInfo, client: Any, source: Sendable | None) -> None:
        rank = init_info.rank
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise ArgumentError(f"rank={rank!r} is a {type(rank).__name__}", hint=RANK)
        self.is_sender = rank == 0
        self.rank = rank
        options = checked_options(init_info.options, init_info.dtype, "WeightwireInitInfo")
        if "group" in options:
            raise ArgumentError(
                "WeightwireInitInfo: options name a group", hint="give it as WeightwireInitInfo(group=...)"
            )
        if self.is_sender and (lacking := [name for name in CALLED if not callable(getattr(client, name, None))]):
            raise ArgumentError(
                f"client is a {type(client).__name__} without {', '.join(lacking)}",
                hint="rank 0 needs a client of the engine, such as vLLM's HTTPVLLMWeightSyncClient(url)",
            )
        self.client = client
        self.source = source
        self.dtype = init_info.dtype
        self.manager = SyncManager(init_info.group, **options)
        if self.is_sender is not (self.manager.rank == 0):  # nobody would ask vLLM to confirm, or more than one would
            self.manager.close()
            raise ArgumentError(f"rank={rank}, but torch.distributed says {self.manager.rank}", hint=RANK)

    @classmethod
    def trainer_init(
        cls, init_info: WeightwireInitInfo, *, client: Any, source: Sendable | None = None
    ) -> WeightwireTrainer:
        """Collective over the trainer's ranks. Rank 0 asks the engine whether the backend works there, and raises what the client
        raises where it does not. It waits until all replicas of the client's server have registered; raises `SyncTimeout`."""
        trainer = cls(init_info, client, source)
        if trainer.is_sender:
            try:
                client.init_weight_transfer_engine({"group": init_info.group, "protocol": PROTOCOL_VERSION})
                _await_engines(trainer.manager, client)
            except BaseException:
                trainer.shutdown()
                raise
        return trainer

    def send_weights(self, source: Sendable | None = None, version: int | None = None) -> UpdateReport:
        """One update, on every trainer rank; returns its report. `source`: instead of the one from `trainer_init`; `version`: by
        default the next one.

        Raises on all ranks what `SyncManager.update` raises, and then no rank of an engine serves a part of it. Once the
        version is committed, rank 0 raises `CommitFailed` if vLLM does not confirm it: that engine is not among the replicas
        that the manager found, or it can't be reached. The other replicas keep the version.
        """
        sent = self.source if source is None else source
        if sent is None:
            raise ArgumentError("send_weights has nothing to send", hint="give trainer_init or send_weights a source")
        report = self.manager.update(sent, version, dtype=self.dtype)
        if self.is_sender:
            self._confirm(report)
        return report

    def shutdown(self) -> None:
        """Closes this rank's manager; the engines serve on. May be called twice."""
        self.manager.close()

    def _confirm(self, report: UpdateReport) -> None:
        """vLLM's own handshake, in one go: a trainer that dies leaves no update open in the engine."""
        client = self.client
        try:
            # 0.24: otherwise the worker takes its live model apart
            client.start_weight_update(**_taken(client.start_weight_update, is_checkpoint_format=False))
            client.update_weights({"group": report.group, "version": report.version})
            client.finish_weight_update(**_taken(client.finish_weight_update, weight_version=str(report.version)))
        except Exception as error:
            raise CommitFailed(
                f"version {report.version} is committed on {len(report.replicas) - len(report.failed)} replicas, "
                f"but vLLM did not confirm it: {error}",
                hint="is the engine that this client speaks to a replica of the same WEIGHTWIRE_JOB? See `weightwire status`",
                side="trainer",
                group=report.group,
                version=report.version,
            ) from error


def _await_engines(manager: SyncManager, client: Any) -> None:
    """Waits until the engines that the client speaks to have registered. Of vLLM's two clients that of a server has its URL, that
    of Ray its actors, each of at least one rank; of any other one nothing is known."""
    if isinstance(url := getattr(client, "base_url", None), str):
        with contextlib.suppress(EngineUnsupported, PeerLost):  # a proxy that passes on vLLM's own calls alone
            await_replicas(manager, replicas_behind(url))
            return
    await_ranks(manager, len(getattr(client, "handles", ())) or 1, manager.settings.config.silence_s)


def _taken(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """The arguments that this version's client takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


if hasattr(factory, "WeightTransferTrainerFactory"):
    with contextlib.suppress(ValueError):  # registered already
        factory.WeightTransferTrainerFactory.register_engine(BACKEND, WeightwireTrainer)
