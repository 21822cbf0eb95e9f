"""The two channels of a worker to one pool, and their timers. All of it belongs to the thread of `connections`."""

from __future__ import annotations

import math
import time
from typing import Any

from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel
from inference_plugin.wire.errors import PeerLost, SyncTimeout
from inference_plugin.wire.messages import Body, Done
from trainer_adapters.batch.rollouts.link import PoolLink

__all__ = ["HEARTBEATS", "PoolConnection"]

HEARTBEATS = 3
"""`Take`s sent within the time after which a silent worker is lost."""


class Asking:
    """One connection: its open request, and when that is to be sent again."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.due_s = 0.0
        self._kind: type[Any] = Done

    @property
    def is_open(self) -> bool:
        return self.channel.is_open

    def send(self, body: Body, kind: type[Any], due_s: float = math.inf) -> None:
        self._kind, self.due_s = kind, due_s
        self.channel.send(body)

    def reply(self) -> Any:
        """The reply, if it has come. Raises `PeerLost`, and what the pool replied."""
        if not self.channel.is_open:
            if self.channel.peer_is_gone():
                raise PeerLost(f"the process behind {self.channel.address} is gone")
            return None
        try:
            return self.channel.receive(self._kind, timeout_s=0)
        except SyncTimeout:
            if self.channel.is_open:
                return None
            raise

    def wait(self, until_s: float) -> None:
        """Waits for the reply to the open request."""
        if self.channel.is_open:
            self.channel.receive(self._kind, timeout_s=max(0.0, until_s - time.monotonic()))


class PoolConnection:
    """One pool: its link, its two connections and its timers."""

    take: Asking
    announce: Asking

    def __init__(self, address: str, process: tuple[int, int], link: PoolLink, silence_s: float) -> None:
        self.address = address
        self.link = link
        self.silence_s = silence_s
        self.told = ""
        self.is_connected = False
        self.rests_until_s = 0.0
        self._process = process

    def connect(self, silence_s: float) -> bool:
        """Makes the connections, which come about in the background. False while the pool is left alone. Raises
        `WeightwireError`."""
        if time.monotonic() < self.rests_until_s:
            return False
        pid, started = self._process
        made: list[Asking] = []
        try:
            for _ in range(2):
                channel = Channel(
                    self.address,
                    pid=pid,
                    start_ticks=started,
                    peer_boot_id=addresses.boot_id() if pid else "",
                    resends=False,
                    silence_s=silence_s,
                    side="rollout worker",
                )
                made.append(Asking(channel))
        except BaseException:
            for asking in made:
                asking.channel.close()
            raise
        self.take, self.announce = made
        self.is_connected = True
        return True

    def rest(self) -> None:
        """Leaves the pool alone for a while: it refused something, or is not there."""
        self.rests_until_s = time.monotonic() + self.silence_s / HEARTBEATS

    @property
    def sources(self) -> list[Any]:
        return [*self.take.channel.sources, *self.announce.channel.sources] if self.is_connected else []

    @property
    def due_s(self) -> float:
        """When the next step is due even without news."""
        if not self.is_connected:
            return self.rests_until_s
        due_s = self.take.due_s
        if self.announce.is_open:
            due_s = min(due_s, self.announce.due_s, self.announce.channel.look_at_s)
        elif self.link.finished and self.rests_until_s > time.monotonic():
            due_s = min(due_s, self.rests_until_s)
        return min(due_s, self.take.channel.look_at_s)

    def close(self) -> None:
        if self.is_connected:
            self.take.channel.close()
            self.announce.channel.close()
            self.is_connected = False
