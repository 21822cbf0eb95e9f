"""How a worker reads a trainer rank's memory by NIXL.

A read that its transaction no longer waits for may still bring bytes. Its buffer is not used again, and its agent is closed only
once it is over: over TCP, UCX aborts the process of a trainer that answers a read of an agent that has gone.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from inference_plugin.transports.nixl_agent import Agent, GivenUp, Registered, Span, close_when_over
from inference_plugin.wire.errors import PeerLost, SyncTimeout, TransportUnavailable, VersionConflict
from inference_plugin.wire.host_memory import check_fits

__all__ = ["Reader"]

FEWEST_BYTES = 1 << 16
"""Of a buffer that a worker registers; larger ones are powers of two, so that few are replaced by larger ones."""

SHORTEST_WAIT_S, LONGEST_WAIT_S = 20e-6, 1e-3
"""Between two looks at a read."""


class Reader:
    """A worker's two buffers, which are read into in turn, and the trainer ranks that it read from."""

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._peers: dict[bytes, str] = {}
        self._buffers: list[Registered | None] = [None, None]
        self._given_up: dict[str, GivenUp] = {}

    def read(
        self, metadata: bytes, spans: Sequence[Span], dropped: threading.Event, until_s: float = math.inf
    ) -> memoryview:
        """The bytes of `spans`, one after the other; they last until the read after the next. Raises `PeerLost`, `SyncTimeout` at
        `until_s`, `VersionConflict` once they are `dropped`."""
        try:
            return self._read(metadata, spans, dropped, until_s)
        except (PeerLost, TransportUnavailable):
            self.close()  # NIXL never connects again to a peer that it lost
            raise

    def _read(self, metadata: bytes, spans: Sequence[Span], dropped: threading.Event, until_s: float) -> memoryview:
        agent = self._agent = self._agent or Agent()
        if (peer := self._peers.get(metadata)) is None:
            peer = self._peers[metadata] = agent.meet(metadata)
        if (before := self._given_up.get(peer)) is not None:
            # So a rank that stands still costs one buffer, not one per update.
            self._wait_for(peer, before, dropped, until_s)
            del self._given_up[peer]
            agent.unregister(before.buffer)
        nbytes = sum(size for _, size in spans)
        buffer = self._next_buffer(agent, nbytes)
        if nbytes:
            reading = agent.read(peer, spans, buffer.memory.data_ptr())
            self._wait_for(peer, GivenUp(reading, buffer), dropped, until_s)
        return buffer.memory[:nbytes].numpy().data

    def _next_buffer(self, agent: Agent, nbytes: int) -> Registered:
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer is None or buffer.memory.numel() < nbytes:
            wanted_bytes = 1 << max(nbytes - 1, FEWEST_BYTES - 1).bit_length()
            check_fits(wanted_bytes, "nixl: a buffer to read into", "a smaller WEIGHTWIRE_BUCKET_BYTES takes less")
            if buffer is not None:
                agent.unregister(buffer)
            buffer = self._buffers[0] = agent.register(wanted_bytes)
        return buffer

    def _wait_for(self, peer: str, wanted: GivenUp, dropped: threading.Event, until_s: float) -> None:
        wait_s = SHORTEST_WAIT_S
        while not wanted.reading.is_over():  # NIXL tells nobody of the end
            if dropped.wait(wait_s) or time.monotonic() > until_s:
                self._given_up[peer] = wanted
                self._buffers = [None if each is wanted.buffer else each for each in self._buffers]
                if dropped.is_set():
                    raise VersionConflict("the transaction was dropped")
                raise SyncTimeout("a read was not over in time", phase="stage")
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def close(self) -> None:
        """Frees everything; the next read begins anew."""
        agent, self._agent = self._agent, None
        given_up, self._given_up = list(self._given_up.values()), {}
        if agent is not None:
            close_when_over(agent, given_up)
        self._peers.clear()
        self._buffers = [None, None]
