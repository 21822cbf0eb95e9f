"""vLLM's own weight transfer with our backend: `--weight-transfer-config '{"backend": "weightwire"}'`.

vLLM's front end sends `start_weight_update`, `update_weights` and `finish_weight_update` to the engine core, which would have
every worker run them. Here the engine core answers, and no worker sees them: after an exception in a worker vLLM's multi-process
executor takes the answers of the other ranks for those to its next call. The bytes, the checks and the commit go Weightwire's
way, before these calls (the trainer's half is `trainer_adapters.integrations.vllm`); here all ranks say what they hold, and the
calls fail where that is not the announced version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import ArgumentError, CommitFailed, EngineUnsupported, ProtocolError
from inference_plugin.wire.messages import PROTOCOL_VERSION, WorkerCard

__all__ = ["BACKEND", "InitInfo", "NativeCalls", "UpdateInfo", "WeightwireTransferEngine"]

BACKEND = "weightwire"


@dataclass
class InitInfo:
    """What `init_weight_transfer_engine` carries: the group that will be updated, and the protocol that the trainer speaks."""

    group: str = "policy"
    protocol: int = PROTOCOL_VERSION


@dataclass
class UpdateInfo:
    """What `update_weights` carries: which version of which group every rank must hold by now. No bytes, no names."""

    version: int
    group: str = "policy"


class WeightwireTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """What vLLM makes on each rank for this backend. It does nothing: `NativeCalls` answers in the engine core."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, *_: Any) -> None: ...
    def start_weight_update(self) -> None: ...
    def receive_weights(self, *_: Any, **__: Any) -> None: ...
    def finish_weight_update(self) -> None: ...
    def shutdown(self) -> None: ...

    @staticmethod
    def trainer_send_weights(*_: Any) -> None:
        """vLLM requires this method up to 0.27."""
        raise EngineUnsupported(
            "this backend has no static sender", hint="use trainer_adapters.integrations.vllm", side="trainer"
        )


class NativeCalls:
    """Answers vLLM's calls in the engine core, on its own thread, one session at a time. `ask_cards` returns the card of every
    rank, encoded, and never raises on a rank."""

    def __init__(self, ask_cards: Callable[[], list[bytes]]) -> None:
        self._ask_cards = ask_cards
        self._started = False
        self._announced: UpdateInfo | None = None

    def answer(self, method: object, args: tuple[Any, ...], arguments: dict[str, Any]) -> list[None] | None:
        """The workers' answers to one of vLLM's calls; None if it is another call. Raises typed errors, and changes nothing."""
        calls: dict[object, Callable[..., None]] = {
            "init_weight_transfer_engine": self._init,
            "start_weight_update": self._start,
            "start_draft_weight_update": self._start_draft,
            "update_weights": self._update,
            "finish_weight_update": self._finish,
            "shutdown_weight_transfer_engine": self._shutdown,
        }
        call = calls.get(method) if isinstance(method, str) else None
        if call is None:
            return None
        call(*args, **arguments)
        return [None]

    def _init(self, init_info: dict[str, Any]) -> None:
        info = _parsed(InitInfo, init_info)
        if info.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the trainer speaks protocol {info.protocol}, this engine {PROTOCOL_VERSION}",
                hint="install the same release of weightwire on both sides",
                side="coordinator",
            )

    def _start(self, is_checkpoint_format: bool = True) -> None:
        """Nothing to prepare: generation goes on, and the live model is not taken apart. vLLM 0.24 passes the argument."""
        self._started, self._announced = True, None

    def _start_draft(self) -> None:
        raise EngineUnsupported(
            "this backend updates the served model only",
            hint="a draft model is a group of its own: update it by a SyncManager of another group",
            side="coordinator",
        )

    def _update(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        if not self._started:
            raise CommitFailed("update_weights came before start_weight_update", side="coordinator")
        for one in update_info if isinstance(update_info, list) else [update_info]:
            update = _parsed(UpdateInfo, one)
            self._check(update)
            self._announced = update

    def _finish(self) -> None:
        update = self._announced
        self._started, self._announced = False, None
        if update is None:
            raise CommitFailed(
                "finish_weight_update came before update_weights: there is no version to finish", side="coordinator"
            )
        self._check(update)

    def _shutdown(self) -> None:
        self._started, self._announced = False, None

    def _check(self, update: UpdateInfo) -> None:
        for rank, told in enumerate(self._ask_cards()):
            if not told:
                raise EngineUnsupported(
                    f"Weightwire does not run on rank {rank} of this engine, so its weight-transfer backend can't work",
                    hint="the engine's log says why it is off; `weightwire doctor` too",
                    side="coordinator",
                )
            card = decode_as(told, WorkerCard)
            group = next((one for one in card.groups if one.group == update.group), None)
            if group is not None and group.version == update.version and group.state != "torn":
                continue
            serves = "does not know it" if group is None else f"serves version {group.version} ({group.state})"
            raise CommitFailed(
                f"version {update.version} of group {update.group!r} was announced, and rank {card.rank} {serves}",
                hint="the update did not reach this engine: compare WEIGHTWIRE_JOB on both sides, see `weightwire status`",
                side="coordinator",
                replica=card.replica,
                rank=card.rank,
                group=update.group,
                version=update.version,
            )


def register_backend() -> None:
    """Makes the backend known to this process's vLLM; a backend of that name that is there already stays."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, WeightwireTransferEngine)


def _parsed(kind: type[Any], given: object) -> Any:
    try:
        return kind(**given)  # type: ignore[arg-type]
    except TypeError as error:
        raise ArgumentError(
            f"{given!r} is no {kind.__name__} of the weightwire backend: {error}",
            hint="let trainer_adapters.integrations.vllm make these calls",
            side="coordinator",
        ) from error
