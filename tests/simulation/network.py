"""Simulated sockets: requests and replies that may be lost, late, out of order or come twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from inference_plugin.net.channel import RESEND_S
from inference_plugin.wire.errors import PeerLost, ProtocolError, WeightwireError
from inference_plugin.wire.messages import Body, Failed
from tests.simulation.world import Process, Task, World

if TYPE_CHECKING:
    from tests.simulation.world import Fault

__all__ = ["Asker", "Network", "SimulatedChannel", "take_ready"]

Handle = Callable[["Asker", Body], None]


class Network:
    """Addresses and who answers there."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.servers: dict[str, tuple[Process, Handle]] = {}
        self.channels: dict[SimulatedChannel, None] = {}
        """Open ones."""

    def serve(self, address: str, process: Process, handle: Handle) -> None:
        self.servers[address] = process, handle

    def carry(self, party: str, receiver: Process, act: Callable[..., None], *arguments: Any) -> None:
        """Brings one message to a process, unless a fault is due. `party`: the replica, or the trainer, whose link it is."""
        world = self.world
        delay_s = 0.0003 + 0.002 * world.chance.random()
        if world.armed_faults:
            if world.armed("lose", party) is not None:
                return
            fault: Fault | None
            if world.armed("duplicate", party) is not None:
                world.at(delay_s + world.soon(), receiver, act, *arguments)
            elif (fault := world.armed("delay", party, 40)) is not None:
                delay_s += 40 * fault.size**3
        world.at(delay_s, receiver, act, *arguments)

    def ended(self, process: Process) -> None:
        """The process is gone: whoever waits for it notices, as `ProcessWatch` does."""
        for channel in list(self.channels):
            if channel.owner is process:
                del self.channels[channel]
            elif channel.peer is process and channel.is_open:
                self.world.at(0.001, channel.owner, channel.lost)


class SimulatedChannel:
    """Stands for `net.channel.Channel`: what the product sends goes to `network`, and news wakes the task that sent."""

    network: Network

    def __init__(self, address: str, *, resends: bool = True, **where: Any) -> None:
        self.address = address
        self.where = {k: v for k, v in where.items() if k in ("side", "replica", "rank")}
        self.sent_messages = 0
        world = self.network.world
        assert world.current is not None
        self.owner = world.current
        self.peer, self._handle = self.network.servers[address]
        self._party = self.peer.party if self.peer.party != self.owner.party else self.owner.party
        self.task: Task | None = None
        self.news: Body | WeightwireError | None = None
        self._resends = resends
        self._pending: Body | None = None
        self._sending = 0
        self._again_s = 0.0
        self._resend_at_s = self._look_at_s = math.inf
        self.network.channels[self] = None

    @property
    def is_open(self) -> bool:
        return self._pending is not None

    def send(self, body: Body, payload: Any = None) -> None:
        self._settle(None)
        self.task, self._pending = self.network.world.task, body
        if not self.peer.alive:
            self.network.world.at(0.0, self.owner, self.lost)
        self._transmit(RESEND_S)

    def _transmit(self, again_s: float) -> None:
        """Only the reply to the latest sending counts (REQ_CORRELATE)."""
        self._sending += 1
        self.sent_messages += 1
        self.network.carry(self._party, self.peer, self._handle, Asker(self, self._sending), self._pending)
        if self._resends:
            self._again_s, self._resend_at_s = 2 * again_s, self.network.world.now_s + again_s
            self._look_later()

    def _look_later(self) -> None:
        """One event of the heap is enough: an earlier one sets the next."""
        if self._resend_at_s < self._look_at_s:
            self._look_at_s = self._resend_at_s
            self.network.world.at_time(self._look_at_s, self.owner, self._look, self._look_at_s)

    def _look(self, at_s: float) -> None:
        """Sends the request again if its time has come."""
        if at_s != self._look_at_s:
            return
        self._look_at_s = math.inf
        if self._pending is None or self not in self.network.channels:
            return
        if self._resend_at_s <= self.network.world.now_s:
            self._transmit(self._again_s)
        else:
            self._look_later()

    def replied(self, sending: int, body: Body) -> None:
        """A reply has come."""
        if sending != self._sending or self._pending is None or self not in self.network.channels:
            return
        self._take(WeightwireError.of(body.error).at(**self.where) if isinstance(body, Failed) else body)

    def lost(self) -> None:
        """The peer's process is gone."""
        if self._pending is not None and self in self.network.channels:
            self._take(PeerLost(f"the process behind {self.address} is gone", **self.where))

    def _take(self, news: Any) -> None:
        self._settle(news)
        if self.network.world.lines is not None:
            said = f"{type(news).__name__}{f': {news.message}' if isinstance(news, WeightwireError) else ''}"
            self.network.world.note(f"{self.owner.name} <- {self.address}: {said}")
        if self.task is not None:
            self.task.news()

    def __enter__(self) -> SimulatedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._settle(None)
        self.task = None
        self.network.channels.pop(self, None)

    def _settle(self, news: Any) -> None:
        """Nothing is awaited any more, and nothing sent again."""
        self._pending, self.news = None, news


class Asker:
    """Whom a server answers."""

    __slots__ = ("answered", "channel", "sending")

    def __init__(self, channel: SimulatedChannel, sending: int) -> None:
        self.channel = channel
        self.sending = sending
        self.answered = False

    @property
    def peer(self) -> bytes:
        return b"%d" % id(self.channel)

    def reply(self, body: Body) -> None:
        if self.answered:
            return
        self.answered = True
        channel = self.channel
        channel.network.carry(channel.peer.party, channel.owner, channel.replied, self.sending, body)

    def fail(self, error: WeightwireError) -> None:
        self.reply(Failed(error.info()))


def take_ready(channels: Sequence[Any], kind: type, *, timeout_s: float) -> list[tuple[Any, Any]]:
    """Stands for `net.channel.take_ready`; never waits."""
    found = []
    for channel in channels:
        if (news := channel.news) is not None:
            channel.news = None
            if not isinstance(news, kind | WeightwireError):
                news = ProtocolError(f"expected {kind.__name__}, got {type(news).__name__}", **channel.where)
            found.append((channel, news))
    return found
