"""How a turn reaches every rank: the messages in it, and the bells that wake ranks."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import msgspec
import zmq

from inference_plugin.engines.commit import CommitPlan
from inference_plugin.net import addresses
from inference_plugin.net.channel import context_of_process
from inference_plugin.net.gate import Gate
from inference_plugin.net.listening import lacks_room
from inference_plugin.wire.errors import ConfigError

__all__ = ["Doorbell", "EngineOperation", "EngineReply", "Step", "Turn"]


@dataclasses.dataclass
class Turn:
    """Travels among SGLang's requests: every rank takes a turn in the pass in which it arrives. It answers the rings up to number
    `rung`."""

    rung: int = 0
    rid: str = "weightwire"
    http_worker_ipc: None = None


class EngineOperation(msgspec.Struct, frozen=True):
    """What every rank does to its own scheduler, in a turn."""

    name: Literal["retract", "abort", "drain", "flush", "stand", "resume", "refuse"]
    reason: str | None = None


class EngineReply(msgspec.Struct, frozen=True):
    """`done`: false if the operation can't be done yet."""

    done: bool = True
    error: str | None = None


class Step(msgspec.Struct, frozen=True):
    """What the leader of a turn sends: a commit that every rank runs by itself up to its end or its wait, the end of that
    wait (`stopped`), one operation of the groups or of the engine, or (none of them) the end of the turn, which may have
    `failed`."""

    commit: CommitPlan | None = None
    stopped: bool = False
    rank: bytes | None = None
    engine: EngineOperation | None = None
    failed: bool = False


RING_LIMIT_MS = 100
"""Longest wait for a ring that was sent to this rank, since a turn may stop generation. A ring that comes later wakes this rank
alone, which then waits for the others: they look up once a second."""

LONGEST_RING_BYTES = 19

LOOK_UP_MS = 20
"""How long a rank sleeps at once where no ring can wake it. Each waking is a pass of the event loop."""


class Doorbell:
    """Wakes a rank that sleeps while it is idle. `address` is empty where the rank never sleeps, and behind SGLang's Rust server,
    where requests alone can wake it: there it looks up often.

    Ranks that have requests of their own sleep: the first one, and with data-parallel attention the others, too. Each pass of
    the event loop is a collective of all of them, so a rank that is awake waits for those that sleep. Therefore all bells get
    every ring, which is its number, and all ranks answer a ring in the same turn.

    While the runtime directory has no room for its socket, rings wait at the sender, and the rank takes turns when it looks up.
    """

    def __init__(self, sleeper: Any, replica: str, rank: int) -> None:
        self.address = ""
        self._socket: zmq.Socket[bytes] | None = None
        self._gate: Gate | None = None
        if (poller := getattr(sleeper, "poller", None)) is not None:
            self._socket = context_of_process().socket(zmq.PULL)
            self.address = addresses.ipc_address(replica, f"bell{rank}")
            self._bind(self._socket)
            poller.register(self._socket, zmq.POLLIN)
        elif hasattr(sleeper, "timeout_ms"):
            sleeper.timeout_ms = min(sleeper.timeout_ms, LOOK_UP_MS)
        self._poller: Any = poller
        self._heard = 0

    def close(self) -> None:
        """Later rings reach nobody."""
        if self._socket is not None:
            self._poller.unregister(self._socket)
            if self._gate is not None:
                self._gate.close()
            self._socket.close(linger=0)
            self._socket = None

    def quiet(self, rung: int) -> None:
        """Discards the rings up to number `rung`, of which the last may still be on its way, and what is no ring."""
        if self._socket is None or not (self._gate is not None or self._bind(self._socket)):
            return
        while self._heard < rung:
            if not self._socket.poll(RING_LIMIT_MS):
                self._heard = rung  # it was lost
            elif (said := self._socket.recv()).isdigit() and len(said) <= LONGEST_RING_BYTES:
                self._heard = min(int(said), rung)

    def _bind(self, socket: zmq.Socket[bytes]) -> bool:
        """False where there is no room for the socket."""
        try:
            addresses.runtime_dir()  # it may have had no room either
            socket.bind(self.address)
        except (ConfigError, zmq.ZMQError) as error:
            if not lacks_room(error):
                raise
            return False
        self._gate = Gate(socket, self.address)
        return True
