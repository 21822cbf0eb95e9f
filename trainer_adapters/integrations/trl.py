"""TRL's trainers (extra `trl`) with our updates in place of TRL's own: `through_weightwire`, one line.

    from trainer_adapters.integrations.trl import through_weightwire

    trainer = through_weightwire(GRPOTrainer)(model, reward, args=GRPOConfig(use_vllm=True, vllm_mode="server"), ...)

1. The constructor: TRL's client of a server joins no NCCL group, and vLLM need not be installed beside the trainer. The server
   must have our plug-in. In colocated mode TRL starts its engine in this process, as ever, and the engine finds our plug-in.
2. `sync_weights`, which TRL calls on every rank before it generates: one update of all replicas of the job, by one `SyncManager`.
   What TRL then asks must be among the replicas that took the version.
3. The end of `train()`: one more update, so that the engine serves what `save_model()` writes; then the manager is closed.

For each trainer with TRL's `VLLMGeneration`: GRPO, RLOO, Distillation, experimental ones. Written against TRL 1.16.0; what it
touches there is checked when a trainer's class is given.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import operator
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from inference_plugin.net import addresses
from inference_plugin.wire.errors import ArgumentError, CommitFailed, EngineUnsupported, ManifestMismatch, PeerLost
from inference_plugin.wire.reports import UpdateReport
from trainer_adapters.integrations.options import await_replicas, checked_options, replicas_behind
from trainer_adapters.manager import SyncManager

__all__ = ["through_weightwire"]

logger = logging.getLogger(__name__)

CLIENT, GENERATION = "trl.generation.vllm_client", "trl.generation.vllm_generation"
TOUCHED = {
    CLIENT: ("is_vllm_available", "VLLMClient.init_communicator", "VLLMClient.get_server_info"),
    GENERATION: ("is_vllm_available", "VLLMClient", "VLLMGeneration._init_vllm", "VLLMGeneration.sync_weights"),
}
"""What is replaced in TRL, by module."""

Trainer = TypeVar("Trainer", bound=type[Any])


def through_weightwire(trainer: Trainer, *, dtype: torch.dtype | str | None = None, **settings: Any) -> Trainer:
    """The class `trainer` of TRL (or a subclass of your own), whose weights go to vLLM through Weightwire.

    `dtype`: in which all tensors travel, which is that of the engine's parameters; default: a colocated engine's dtype, for a
    server the trainer's own. `settings`: as `SyncManager` takes them. Nothing else changes: the same arguments, the same methods.

    Raises `ArgumentError` for anything but a class, for a setting that `SyncManager` does not have and for an invalid dtype;
    `EngineUnsupported` where TRL is missing or another one. The constructor raises `ArgumentError` for a trainer without vLLM
    and as `refuse` says, and `EngineUnsupported` for a server without our plug-in.
    `train()`, and whatever else generates, raises what `SyncManager.update` raises, the same on every rank, and `CommitFailed`
    on a rank whose engine took no part. If the update at the end fails, the model is trained all the same, and `save_model()`
    writes it.
    """
    if not isinstance(trainer, type):
        raise ArgumentError(
            f"through_weightwire() was given {type(trainer).__name__}, not a class",
            hint="a trainer's constructor already joins TRL's own group: through_weightwire(GRPOTrainer)(model, ...)",
        )
    checked_options(settings, dtype, "through_weightwire()")  # now, not in the first step
    check_places()

    @functools.wraps(trainer, updated=())
    class Synced(trainer):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with our_client() as started:
                super().__init__(*args, **kwargs)
            if not started:
                raise ArgumentError(
                    f"this {trainer.__name__} generates without vLLM, so there is nothing to sync",
                    hint='give its config use_vllm=True, and vllm_mode="server" or "colocate"',
                )
            self._weightwire = started[0].sync_weights = WeightSync(self, started[0], dtype, settings)

        def train(self, *args: Any, **kwargs: Any) -> Any:
            try:
                trained = super().train(*args, **kwargs)
                self._weightwire()
                return trained
            finally:
                self._weightwire.close()

    return Synced  # type: ignore[return-value]


class WeightSync:
    """In the place of `VLLMGeneration.sync_weights`. Every rank calls it; its first call makes the manager, and so does the
    first one after `close`."""

    def __init__(self, trainer: Any, generation: Any, dtype: Any, settings: dict[str, Any]) -> None:
        self._trainer, self._generation, self._settings = trainer, generation, settings
        if dtype is None and generation.mode == "colocate":
            dtype = generation.llm.llm_engine.model_config.dtype
        self._dtype = dtype
        self.manager: SyncManager | None = None
        self._replicas: set[str] = set()
        """Of the server, as it said last."""

    def __call__(self) -> None:
        if self.manager is None:
            self.manager = SyncManager(**self._settings)
            self._end = weakref.finalize(self, self.manager.close)  # for syncs after the training
            if self._generation.mode == "server" and self.manager.rank == 0:
                self._replicas = replicas_behind(self._generation.vllm_client.base_url)
                await_replicas(self.manager, self._replicas)
        if self._generation.mode == "colocate" and self._generation.enable_sleep_mode:
            self._wake()
        try:
            # As FSDP wraps it, without the wrappers of DDP and DeepSpeed.
            report = self.manager.update(self._trainer.model, dtype=self._dtype)
        except ManifestMismatch as error:
            if self._dtype is None:
                error.add_note('If only dtypes differ, name the engine\'s: through_weightwire(..., dtype="bfloat16")')
            raise
        self._check(report)

    def _wake(self) -> None:
        """Has the engine take the memory of its weights back, as `VLLMGeneration.sync_weights` does. TRL itself wakes the rest,
        before it generates. What torch keeps for itself may be what the engine needs."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._generation.llm.wake_up(tags=["weights"])
        self._generation._llm_weights_sleeping = False

    def close(self) -> None:
        """Closes the manager, if there is one."""
        if self.manager is not None:
            self._end()
        self.manager = None

    def _check(self, report: UpdateReport) -> None:
        """Raises `CommitFailed` unless what this rank generates with took the version: it may be of another job. Rank 0
        asks a server, every rank its own engine."""
        if self._generation.mode == "colocate":
            own = {card.replica for card in addresses.discover() if card.pid == os.getpid()}
            check_took(report, "the engine of this process", own, lambda: own)
        elif self._generation.accelerator.is_main_process:
            url = self._generation.vllm_client.base_url
            ask = functools.partial(replicas_behind, url)
            self._replicas = check_took(report, f"the server at {url}", self._replicas, ask)


def check_took(report: UpdateReport, what: str, known: set[str], ask: Callable[[], set[str]]) -> set[str]:
    """Raises `CommitFailed` unless the replicas of the engine `what`, which is asked for them, took the update; returns them. If
    it gives no answer, those count that are `known`: the version is committed, and no answer does not change that."""
    took = {one.replica for one in report.replicas if one.status != "failed"}
    try:
        asked = ask()
    except (EngineUnsupported, PeerLost) as silent:
        if not known or not known <= took:
            raise
        logger.warning("weightwire: %s has version %d, and can't be asked about it: %s", what, report.version, silent)
        asked = known
    missing = asked - took
    if missing or not asked:
        error = CommitFailed(
            f"others took it, but {what} ({', '.join(sorted(missing)) or 'no replica'}) did not: TRL would use older weights",
            hint="trainer and engine need the same WEIGHTWIRE_JOB, and on several hosts WEIGHTWIRE_REGISTRY; "
            "`weightwire status` shows the replicas of a job",
        )
        raise error.at(side="trainer", group=report.group, phase="commit", version=report.version)
    return asked


@contextlib.contextmanager
def our_client() -> Iterator[list[Any]]:
    """Inside, each `VLLMGeneration` of TRL that starts is listed, and its client of a server is ours."""
    client, generation = importlib.import_module(CLIENT), importlib.import_module(GENERATION)
    start = generation.VLLMGeneration._init_vllm
    started: list[Any] = []

    def init_vllm(self: Any) -> None:
        refuse(self)
        with contextlib.ExitStack() as restored:
            if self.mode == "server":  # it needs a server, no vLLM of its own
                for module in (client, generation):
                    replace(restored, module, "is_vllm_available", lambda: True)
                replace(restored, generation, "VLLMClient", client_class(client.VLLMClient))
            start(self)
        started.append(self)

    with contextlib.ExitStack() as restored:
        replace(restored, generation.VLLMGeneration, "_init_vllm", init_vllm)
        yield started


def replace(restored: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Gives `owner` another attribute, until `restored` is closed."""
    restored.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def client_class(base: Any) -> Any:
    """TRL's client of a server, without its own channel for weights."""

    class Client(base):  # type: ignore[misc]
        def init_communicator(self, device: object = 0) -> None:
            """Joins nothing. Raises `EngineUnsupported` if the server runs without our plug-in."""
            replicas_behind(self.base_url)

        def get_server_info(self) -> Any:
            """GRPO looks here for the kind of log-probabilities that the server reports; only developer mode tells it."""
            try:
                return super().get_server_info()
            except RuntimeError:  # TRL's, for a server without developer mode
                logger.warning("importance sampling is biased unless the server has --logprobs-mode processed_logprobs")
                return {"model_config": {"logprobs_mode": "processed_logprobs"}}

        def update_named_params(self, *_: object, **__: object) -> None:
            hint = "call trainer.vllm_generation.sync_weights(), on every rank"
            raise EngineUnsupported("this client has no channel for weights: they go through Weightwire", hint=hint)

    return Client


def refuse(generation: Any) -> None:
    """Raises `ArgumentError`, before anything starts, for what would end in wrong weights: colocated engines that are sharded,
    ranks of torch.distributed that accelerate doesn't know of."""
    colocated, ours = generation.mode == "colocate", generation.accelerator.num_processes
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ours != ranks:  # several trainings, each of a model of its own: the engine would get parts of each
        what = f"torch.distributed has {ranks} ranks and accelerate {ours}: each would train a model of its own"
        hint = "on CPUs give the trainer's config use_cpu=True"
    elif colocated and generation.tensor_parallel_size > 1:
        what = "a colocated engine of several ranks is several engines, and each would commit for itself"
        hint = 'use vllm_tensor_parallel_size=1, or vllm_mode="server"'
    else:
        return
    raise ArgumentError(what, hint=hint)


def check_places() -> None:
    """Raises `EngineUnsupported` where TRL is missing, or lacks something of `TOUCHED`."""
    try:
        for module, names in TOUCHED.items():
            operator.attrgetter(*names)(importlib.import_module(module))
    except (ImportError, AttributeError) as missing:
        raise EngineUnsupported(
            f"TRL is missing here, or another one than 1.16.0, to which this is written: {missing}",
            hint="pip install '.[trl]' in a checkout of weightwire",
        ) from missing
