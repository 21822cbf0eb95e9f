"""Whether the ranks of a replica can be reached that run on another host than its coordinator."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel, Outgoing, fan_out
from inference_plugin.wire.errors import EngineUnsupported
from inference_plugin.wire.messages import Describe, WorkerCard

__all__ = ["check_reached"]

REACH_TIMEOUT_S = 10.0
"""For the answers of all ranks of other hosts, while the engine starts."""

HINT = (
    "on every host of the engine set WEIGHTWIRE_LISTEN=tcp://INTERFACE:* and WEIGHTWIRE_KEY to the job's key, as "
    "docs/hosts.md says; WEIGHTWIRE_DISABLE=1 starts the engine without Weightwire"
)


def check_reached(workers: Sequence[WorkerCard]) -> None:
    """Raises `EngineUnsupported` if a worker of another host, or of another pid namespace, does not answer at its address. A
    trainer would find out only in its first update."""
    away = [worker for worker in workers if worker.boot_id != addresses.boot_id()]
    for worker in away:
        if why := _stays_there(worker):
            raise _unreached(worker, f"listens at {worker.address}, {why}")
    with contextlib.ExitStack() as stack:
        asked = []
        for worker in away:
            channel = Channel(worker.address, silence_s=REACH_TIMEOUT_S, side="worker", rank=worker.rank)
            asked.append(Outgoing(stack.enter_context(channel), Describe()))
        for worker, answer in zip(away, fan_out(asked, WorkerCard, timeout_s=REACH_TIMEOUT_S), strict=True):
            if not isinstance(answer, WorkerCard):
                raise _unreached(worker, f"is not reached from here: {answer.message}") from answer
            if (answer.replica, answer.rank) != (worker.replica, worker.rank):
                raise _unreached(worker, f"is not who answers at {worker.address}")


def _stays_there(worker: WorkerCard) -> str:
    """Why nobody but its own host reaches this worker's address; "" if others may."""
    is_container = worker.boot_id.partition("/")[0] == addresses.boot_id().partition("/")[0]  # of this host
    if worker.address.startswith("ipc://"):
        shares_directory = is_container and Path(worker.address.removeprefix("ipc://")).is_socket()
        return "" if shares_directory else "a file of its own host"
    host = worker.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        if not is_container and ipaddress.ip_address(host).is_loopback:
            return "which means its own host"
    return ""


def _unreached(worker: WorkerCard, why: str) -> EngineUnsupported:
    return EngineUnsupported(
        f"the ranks of this engine are on several hosts, and rank {worker.rank} {why}",
        hint=HINT,
        phase="start",
        side="worker",
        rank=worker.rank,
        replica=worker.replica,
    )
