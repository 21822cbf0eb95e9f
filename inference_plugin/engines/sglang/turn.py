"""How a turn reaches every rank: what travels in it, the ranks' own process group, and the bells that wake them."""

from __future__ import annotations

import contextlib
import dataclasses
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
import zmq

from inference_plugin.engines.rank import rank_timeout_s
from inference_plugin.wire import addresses

__all__ = ["Doorbell", "EngineOperation", "EngineReply", "Ranks", "Step", "Turn"]

_START_TIMEOUT_S = 600.0


@dataclasses.dataclass
class Turn:
    """Travels among SGLang's requests: every rank takes a turn in the pass in which it arrives."""

    rid: str = "weightwire"
    http_worker_ipc: None = None


class EngineOperation(msgspec.Struct, frozen=True):
    """What every rank does to its own scheduler, in a turn."""

    name: Literal["retract", "abort", "drain", "flush", "stand", "resume", "installed", "refuse"]
    version: int = 0
    reason: str | None = None


class EngineReply(msgspec.Struct, frozen=True):
    """`done` false: what was asked can't be done yet."""

    done: bool = True
    error: str | None = None


class Step(msgspec.Struct, frozen=True):
    """What the leader of a turn sends: an operation of the groups, one of the engine, or (neither) the end."""

    rank: bytes | None = None
    engine: EngineOperation | None = None


class Ranks:
    """This replica's ranks, over a gloo group that nobody else uses: what fails in it leaves SGLang's own in step."""

    def __init__(self, parallel: Any) -> None:
        self.rank, self.size = int(parallel.tp_rank), int(parallel.tp_size)
        self.leads = self.rank == 0
        self._group: Any = None
        if self.size > 1:
            self._group = dist.new_group(
                parallel.tp_group.ranks,
                backend="gloo",
                timeout=timedelta(seconds=_START_TIMEOUT_S),
                use_local_synchronization=True,
            )

    def broadcast(self, data: bytes = b"") -> bytes:
        """The first rank's bytes, on all ranks."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        self._broadcast(length)
        content = torch.empty(int(length), dtype=torch.uint8)
        if self.leads:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._broadcast(content)
        return content.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank, on all ranks."""
        if self.size == 1:
            return [data]
        lengths = [int(length) for length in self._all_gather(torch.tensor([len(data)]))]
        padded = bytearray(data.ljust(max(lengths), b"\0"))
        contents = self._all_gather(torch.frombuffer(padded, dtype=torch.uint8))
        return [content.numpy().tobytes()[:length] for content, length in zip(contents, lengths, strict=True)]

    def _broadcast(self, tensor: torch.Tensor) -> None:
        source = dist.get_global_rank(self._group, 0)
        self._done(dist.broadcast(tensor, source, group=self._group, async_op=True))

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._done(dist.all_gather(gathered, tensor, group=self._group, async_op=True))
        return gathered

    @staticmethod
    def _done(work: Any) -> None:
        work.wait(timedelta(seconds=rank_timeout_s()))


class Doorbell:
    """Wakes a rank that sleeps on idle until one of its sockets has something. `address` is empty where none does.

    Beside the first rank those are, with data-parallel attention, all that have requests of their own.
    """

    def __init__(self, sleeper: Any, replica: str, rank: int) -> None:
        self.address = ""
        self._socket: zmq.Socket[bytes] | None = None
        if (poller := getattr(sleeper, "poller", None)) is not None:
            self._socket = zmq.Context.instance().socket(zmq.PULL)
            self._socket.bind(addresses.ipc_address(replica, f"bell{rank}"))
            self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            poller.register(self._socket, zmq.POLLIN)

    def quiet(self) -> None:
        """Takes what was rung; called in each pass of the event loop."""
        with contextlib.suppress(zmq.Again):
            while self._socket is not None:
                self._socket.recv(zmq.DONTWAIT)
