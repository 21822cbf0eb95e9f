"""How a replica begins: workers and coordinator, started by its engine core, or by all of its cores together."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from inference_plugin.engines.control import EngineControl
from inference_plugin.engines.coordinator import ReplicaCoordinator, open_coordinator
from inference_plugin.engines.monkeypatch import contained, installed_version
from inference_plugin.engines.operations import started_cards
from inference_plugin.engines.rank_runtime import rank_timeout_s
from inference_plugin.engines.rank_sockets import START_TIMEOUT_S, RankSockets
from inference_plugin.engines.vllm.core import CoreControl
from inference_plugin.engines.vllm.core_turns import FollowingCore, LeadingCore, connect
from inference_plugin.engines.vllm.patch_points import VLLM
from inference_plugin.engines.vllm.shared_core import SharedCore
from inference_plugin.net import addresses
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import EngineUnsupported, ErrorInfo, PeerLost, WeightwireError
from inference_plugin.wire.messages import WorkerCard

__all__ = ["ExecutorLost", "start", "stop"]

logger = logging.getLogger("vllm.weightwire")


class ExecutorLost(PeerLost):
    """A call to the workers raised. A multi-process executor may now take late answers to it for answers to its next call, and
    the engine would compute nonsense: it must not start, with us or without."""


def start(core: Any, lacks: tuple[str, ...]) -> CoreControl:
    """The control of this core, with the coordinator where this core has it. If it fails, nothing of ours is left on any rank."""
    from vllm.v1.engine.core import DPEngineCoreProc

    config = core.vllm_config
    if isinstance(core, DPEngineCoreProc):
        return _start_together(core, lacks)
    if config.model_config.is_moe and config.parallel_config.data_parallel_size > 1:
        raise EngineUnsupported(
            "data-parallel ranks that share experts run without vLLM's engine cores",
            hint="have vLLM start them: vllm serve --data-parallel-size",
            phase="start",
        )
    if (
        config.parallel_config.distributed_executor_backend == "external_launcher"
        and config.parallel_config.world_size > 1
    ):
        raise EngineUnsupported(
            "an external launcher started the ranks of this engine: each is an engine core of its own with a part of the model",
            hint="let the engine have one rank (a colocated one: vllm_tensor_parallel_size=1), or use a server",
            phase="start",
        )
    control = CoreControl(core)
    replica = addresses.new_replica_id("vllm")
    with _stopping_workers(core, replica):
        cards = _start_workers(core, replica)
        if control.in_process:
            control.lock.acquire()  # until the client is made: `hook_inproc`
        control.coordinator = _open(core, control, replica, cards, lacks)
    return control


def stop(control: CoreControl) -> None:
    """Takes back a `start`: vLLM could not make the rest of the engine core. Never raises. Where the core has a process of its
    own, workers end with that."""
    with contained("closing the coordinator", logger):
        if control.coordinator is not None:
            control.coordinator.close()
    if control.in_process:
        with contained("stopping the workers", logger):
            control.core.model_executor.collective_rpc("weightwire_stop", timeout=rank_timeout_s())
        control.lock.release()  # no command finds a worker


class _Started(msgspec.Struct, frozen=True):
    """A core's message to the other cores of its replica: its workers, or why it could not start."""

    workers: tuple[WorkerCard, ...] = ()
    error: ErrorInfo | None = None


def _start_together(core: Any, lacks: tuple[str, ...]) -> SharedCore:
    """Runs on every core of a replica. If one core fails, all fail with the same error."""
    sockets = connect(core)
    sockets.timeout_s = START_TIMEOUT_S
    replica = sockets.broadcast(addresses.new_replica_id("vllm").encode()).decode()
    own = SharedCore(core)
    with _stopping_workers(core, replica):
        cards = _agree(sockets, lambda: _start_workers(core, replica))
        leads = core.dp_rank == 0

        def open_here() -> Sequence[WorkerCard]:
            if leads:
                own.coordinator = _open(core, LeadingCore(own, sockets), replica, cards, lacks)
            return ()

        _agree(sockets, open_here)
        sockets.timeout_s = rank_timeout_s()
        if not leads:
            FollowingCore(own, sockets)
    return own


def _agree(sockets: RankSockets, act: Callable[[], Sequence[WorkerCard]]) -> list[WorkerCard]:
    """Has every core `act`; the cards of all. Raises the first error of any."""
    try:
        mine = _Started(tuple(act()))
    except ExecutorLost:
        raise
    except Exception as error:  # noqa: BLE001 -- it is raised on all cores
        mine = _Started(error=WeightwireError.wrap(error).info())
    told = [decode_as(one, _Started) for one in sockets.gather(msgspec.msgpack.encode(mine))]
    for one in told:
        if one.error is not None:
            raise WeightwireError.of(one.error)
    return [card for one in told for card in one.workers]


@contextlib.contextmanager
def _stopping_workers(core: Any, replica: str) -> Iterator[None]:
    """If the start fails, removes everything of ours from this core's ranks."""
    try:
        yield
    except ExecutorLost:
        raise
    except BaseException:
        if all(_ask_workers(core, hasattr, "weightwire_stop")):
            _ask_workers(core, "weightwire_stop")
        with contextlib.suppress(OSError, WeightwireError):
            addresses.remove_replica(replica)
        raise


def _start_workers(core: Any, replica: str) -> list[WorkerCard]:
    """The cards of this core's workers."""
    # Calling a method that a worker lacks would raise there, and leave the executor out of step.
    if not all(_ask_workers(core, hasattr, "weightwire_start")):
        raise EngineUnsupported(
            "the plug-in is live in the engine core, but not in every worker",
            hint="install weightwire wherever workers run; the workers' logs may say more",
            phase="start",
        )
    return started_cards(_ask_workers(core, "weightwire_start", replica), replica)


def _open(
    core: Any, control: EngineControl, replica: str, cards: list[WorkerCard], lacks: tuple[str, ...]
) -> ReplicaCoordinator:
    from vllm.v1.engine.core import EngineCoreProc

    config = core.vllm_config
    return open_coordinator(
        control,
        replica,
        cards,
        engine="vllm",
        engine_version=installed_version(*VLLM.distributions),
        model=str(config.model_config.model),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        tp=config.parallel_config.tensor_parallel_size,
        pp=config.parallel_config.pipeline_parallel_size,
        dp_rank=config.parallel_config.data_parallel_index,
        parent_pid=os.getppid() if isinstance(core, EngineCoreProc) else os.getpid(),
        lacks=lacks,
    )


def _ask_workers(core: Any, method: Any, *args: Any) -> list[Any]:
    try:
        answers: list[Any] = core.model_executor.collective_rpc(method, timeout=START_TIMEOUT_S, args=args)
    except Exception as error:
        raise ExecutorLost(
            f"the workers could not be asked: {error}", hint="WEIGHTWIRE_DISABLE=1 starts the engine without Weightwire"
        ) from error
    return answers
