"""Messages among the processes of one replica over a process group of gloo: slow, and there wherever the engine itself is."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.engines.rank_sockets import START_TIMEOUT_S
from inference_plugin.wire.errors import PeerLost

__all__ = ["INLINE_BYTES", "GlooGroup"]

INLINE_BYTES = 4096
"""Longest message that travels in one collective; a longer one takes a second."""

_LENGTH_BYTES = 8


class GlooGroup:
    """A `ProcessGroup` that nobody else uses meanwhile. Once a rank has ended or is late, each call raises `PeerLost`."""

    def __init__(self, group: Any) -> None:
        self.timeout_s = START_TIMEOUT_S
        self._group = group
        self._lost: PeerLost | None = None

    def broadcast(self, data: bytes) -> bytes:
        """The first rank's bytes, on all ranks."""
        frame = _frame(data)
        self._broadcast(frame)
        length = _length(frame)
        if length <= INLINE_BYTES:
            return _content(frame, length)
        rest = torch.empty(length, dtype=torch.uint8)
        if self._group.rank() == 0:
            rest = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._broadcast(rest)
        return rest.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank, on all ranks."""
        frames = self._all_gather(_frame(data))
        lengths = [_length(frame) for frame in frames]
        if max(lengths) <= INLINE_BYTES:
            return [_content(frame, length) for frame, length in zip(frames, lengths, strict=True)]
        padded = bytearray(data.ljust(max(lengths), b"\0"))
        contents = self._all_gather(torch.frombuffer(padded, dtype=torch.uint8))
        return [content.numpy().tobytes()[:length] for content, length in zip(contents, lengths, strict=True)]

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._run(lambda: self._group.broadcast([tensor], options))

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self._group.size())]
        self._run(lambda: self._group.allgather([gathered], [tensor]))
        return gathered

    def _run(self, collective: Callable[[], Any]) -> None:
        if self._lost is not None:
            raise PeerLost(f"the ranks have lost each other: {self._lost.message}")
        try:
            collective().wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:  # torch has no other for it
            self._lost = PeerLost(f"a rank has ended, or was silent for {self.timeout_s:g} s: {error}")
            raise self._lost from error


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
