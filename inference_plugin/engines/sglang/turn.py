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

from inference_plugin.engines.commit import CommitPlan
from inference_plugin.engines.rank_runtime import rank_timeout_s
from inference_plugin.net import addresses
from inference_plugin.net.gate import Gate

__all__ = ["Doorbell", "EngineOperation", "EngineReply", "Ranks", "Step", "Turn"]

INLINE_BYTES = 4096
"""Longest message that travels in one collective."""

_LENGTH_BYTES = 8
_START_TIMEOUT_S = 600.0


@dataclasses.dataclass
class Turn:
    """Travels among SGLang's requests: every rank takes a turn in the pass in which it arrives."""

    rid: str = "weightwire"
    http_worker_ipc: None = None


class EngineOperation(msgspec.Struct, frozen=True):
    """What every rank does to its own scheduler, in a turn."""

    name: Literal["retract", "abort", "drain", "flush", "stand", "resume", "refuse"]
    reason: str | None = None


class EngineReply(msgspec.Struct, frozen=True):
    """`done` false: what was asked can't be done yet."""

    done: bool = True
    error: str | None = None


class Step(msgspec.Struct, frozen=True):
    """What the leader of a turn sends: a commit that every rank runs by itself up to its end or its wait, the end of that
    wait (`stopped`), one operation of the groups or of the engine, or (none of them) the end of the turn."""

    commit: CommitPlan | None = None
    stopped: bool = False
    rank: bytes | None = None
    engine: EngineOperation | None = None


class Ranks:
    """This replica's ranks, over a gloo group that nobody else uses: what fails in it leaves SGLang's own in step.

    A message up to `INLINE_BYTES` costs one collective, a longer one a second. `collectives` counts them.
    """

    def __init__(self, parallel: Any) -> None:
        self.rank, self.size = int(parallel.tp_rank), int(parallel.tp_size)
        self.leads = self.rank == 0
        self.collectives = 0
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
        frame = _frame(data)
        self._broadcast(frame)
        length = _length(frame)
        if length <= INLINE_BYTES:
            return _content(frame, length)
        rest = torch.empty(length, dtype=torch.uint8)
        if self.leads:
            rest = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._broadcast(rest)
        return rest.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank, on all ranks."""
        if self.size == 1:
            return [data]
        frames = self._all_gather(_frame(data))
        lengths = [_length(frame) for frame in frames]
        if max(lengths) <= INLINE_BYTES:
            return [_content(frame, length) for frame, length in zip(frames, lengths, strict=True)]
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

    def _done(self, work: Any) -> None:
        self.collectives += 1
        work.wait(timedelta(seconds=rank_timeout_s()))


def _frame(data: bytes) -> torch.Tensor:
    """The length of `data`, and `data` itself where it is short enough."""
    content = data if len(data) <= INLINE_BYTES else b""
    return torch.frombuffer(
        bytearray(len(data).to_bytes(_LENGTH_BYTES) + content.ljust(INLINE_BYTES, b"\0")), dtype=torch.uint8
    )


def _length(frame: torch.Tensor) -> int:
    return int.from_bytes(frame[:_LENGTH_BYTES].numpy().tobytes())


def _content(frame: torch.Tensor, length: int) -> bytes:
    return frame[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes()


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
            self._gate = Gate(self._socket, self.address)
            poller.register(self._socket, zmq.POLLIN)
        self._poller: Any = poller

    def close(self) -> None:
        """From now on nobody rings it."""
        if self._socket is not None:
            self._poller.unregister(self._socket)
            self._gate.close()
            self._socket.close(linger=0)
            self._socket = None

    def quiet(self) -> None:
        """Takes what was rung; called in each pass of the event loop."""
        with contextlib.suppress(zmq.Again):
            while self._socket is not None:
                self._socket.recv(zmq.DONTWAIT)
