"""Asks many processes at once, and tells a silent process from one that is at work.

An opening, a commit or a verification may take minutes, and its answer comes only at the end. Meanwhile the process still
answers a `Describe` at once: that is its sign of life. A process that answers neither for `silence_s` is silent; only the
request that needs it ends, and the other requests go on.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from inference_plugin.net.channel import Channel, take_ready
from inference_plugin.wire.closing import Closing
from inference_plugin.wire.errors import PeerLost, ProtocolError, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import Body, Describe

__all__ = ["Ask", "Connect", "Inquiry", "ask_all"]

logger = logging.getLogger(__name__)

PROBE_SHARE = 0.25
"""Share of `silence_s` after which the processes behind an unanswered request are asked for a sign of life; each sign is
followed by the next question after the same time."""

STOOD_STILL_S = 0.5
"""A wait that ends this much too late means that this process itself stood still."""

Reply = TypeVar("Reply")
Connect = Callable[[], Channel]
"""Connects to one process, for signs of life: the channel of the request itself is waiting for its answer."""


class Ask(msgspec.Struct, frozen=True):
    """A request that may take long, and the processes on whose life its answer depends. Without `processes` it has
    `silence_s` (default: the inquiry's) to be answered."""

    channel: Channel
    body: Body
    processes: tuple[Connect, ...] = ()
    silence_s: float | None = None


@dataclass(eq=False, slots=True)
class _Probe:
    connect: Connect
    due_s: float
    channel: Channel | None = None
    asked_s: float | None = None


@dataclass(eq=False, slots=True)
class _Open:
    channel: Channel
    asked_s: float
    silence_s: float
    probes: list[_Probe]

    @property
    def look_at_s(self) -> float:
        """When a sign of life is to be asked for, or is overdue."""
        if not self.probes:
            return self.asked_s + self.silence_s
        return min([p.due_s if p.asked_s is None else p.asked_s + self.silence_s for p in self.probes])

    def silence(self, now_s: float) -> SyncTimeout | None:
        """The error of a request on which a silent process works."""
        silent = [(p.channel, p.asked_s) for p in self.probes] if self.probes else [(self.channel, self.asked_s)]
        for channel, asked_s in silent:
            if channel is not None and asked_s is not None and now_s - asked_s >= self.silence_s:
                words = f"{channel.address} has given no sign of life for {self.silence_s:g} s"
                return SyncTimeout(words, **channel.where)
        return None


class Inquiry(Closing, Generic[Reply]):
    """Open requests whose answers are of type `kind`, for one thread. A context manager, which closes the probes."""

    def __init__(self, kind: type[Reply], *, silence_s: float) -> None:
        self._kind = kind
        self._silence_s = silence_s
        self._open: dict[Channel, _Open] = {}
        self._probed: dict[Channel, tuple[_Open, _Probe]] = {}
        """Signs of life that were asked for and have not come."""
        self.unsent: list[tuple[Channel, Reply | WeightwireError]] = []

    @property
    def waits(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._open or self.unsent)

    @property
    def look_at_s(self) -> float:
        """When a sign of life is to be asked for, or is overdue; infinity if nothing is open."""
        return min([request.look_at_s for request in self._open.values()], default=math.inf)

    def ask(self, ask: Ask) -> None:
        """Sends a request."""
        now_s = time.monotonic()
        silence_s = self._silence_s if ask.silence_s is None else ask.silence_s
        try:
            ask.channel.send(ask.body)
        except WeightwireError as error:
            self.unsent.append((ask.channel, error))
            return
        first_s = now_s + PROBE_SHARE * silence_s
        probes = [_Probe(each, first_s) for each in ask.processes]
        self._open[ask.channel] = _Open(ask.channel, now_s, silence_s, probes)

    def give_up(self, channel: Channel) -> None:
        """No longer waits for that answer."""
        if (request := self._open.pop(channel, None)) is not None:
            for probe in request.probes:
                if probe.channel is not None:
                    self._probed.pop(probe.channel, None)
                    probe.channel.close()

    def take(self, until_s: float) -> list[tuple[Channel, Reply | WeightwireError]]:
        """Returns the answers that are there, else the first that come until `until_s` (of `time.monotonic()`), else nothing. A
        silent process's answer is a `SyncTimeout`."""
        taken, self.unsent = self.unsent, []
        while self._open and not taken:
            began_s = time.monotonic()
            look_at_s = self.look_at_s
            if look_at_s <= began_s:
                self._probe(began_s)
                look_at_s = self.look_at_s
            wake_s = min(until_s, look_at_s)
            self._receive(max(0.0, wake_s - time.monotonic()), taken)
            now_s = time.monotonic()
            self.forgive(now_s - max(wake_s, began_s))
            if now_s >= look_at_s:
                self._end_silent(now_s, taken)
            if now_s >= until_s:
                break
        return taken

    def close(self) -> None:
        """Waits for nothing any longer; may be called twice."""
        for channel in list(self._open):
            self.give_up(channel)

    def _receive(self, timeout_s: float, taken: list[tuple[Channel, Reply | WeightwireError]]) -> None:
        for channel, reply in take_ready([*self._open, *self._probed], msgspec.Struct, timeout_s=timeout_s):
            if (probed := self._probed.pop(channel, None)) is not None:
                request, probe = probed
                if isinstance(reply, PeerLost):
                    self.give_up(request.channel)
                    taken.append((request.channel, reply))
                probe.asked_s = None
                probe.due_s = time.monotonic() + PROBE_SHARE * request.silence_s
            elif channel in self._open:
                self.give_up(channel)
                if isinstance(reply, self._kind | WeightwireError):
                    taken.append((channel, reply))
                else:
                    words = f"expected {self._kind.__name__}, got {type(reply).__name__}"
                    taken.append((channel, ProtocolError(words, **channel.where)))

    def _probe(self, now_s: float) -> None:
        """Asks for the signs of life that are due."""
        due = [(r, p) for r in self._open.values() for p in r.probes if p.asked_s is None and p.due_s <= now_s]
        for request, probe in due:
            try:
                probe.channel = probe.channel or probe.connect()
                probe.channel.send(Describe())
                probe.asked_s = now_s
                self._probed[probe.channel] = request, probe
            except Exception as error:  # noqa: BLE001 -- what this process lacks (descriptors) is not the other's silence
                logger.warning("weightwire: a sign of life could not be asked for: %s", error)
                probe.due_s = now_s + request.silence_s

    def _end_silent(self, now_s: float, taken: list[tuple[Channel, Reply | WeightwireError]]) -> None:
        for request in list(self._open.values()):
            if (error := request.silence(now_s)) is not None:
                self.give_up(request.channel)
                taken.append((request.channel, error))

    def forgive(self, late_s: float) -> None:
        """Where this process itself stood still, what it did not hear meanwhile was nobody's silence."""
        if late_s < STOOD_STILL_S:
            return
        for request in self._open.values():
            request.asked_s += late_s
            for probe in request.probes:
                if probe.asked_s is not None:
                    probe.asked_s += late_s


def ask_all(
    asks: Sequence[Ask],
    kind: type[Reply],
    *,
    timeout_s: float,
    silence_s: float,
    heard: Callable[[int, Reply | WeightwireError], None] = lambda _place, _answer: None,
) -> list[Reply | WeightwireError]:
    """Sends all requests at once; returns the answers and errors in the order of the requests. `heard(place, answer)` is called
    with each as it comes."""
    deadline_s = time.monotonic() + timeout_s
    places = {ask.channel: place for place, ask in enumerate(asks)}
    answers: dict[int, Reply | WeightwireError] = {}

    def take(channel: Channel, answer: Reply | WeightwireError) -> None:
        answers[places[channel]] = answer
        heard(places[channel], answer)

    with Inquiry(kind, silence_s=silence_s) as inquiry:
        for ask in asks:
            inquiry.ask(ask)
        while inquiry.waits and ((taken := inquiry.take(deadline_s)) or time.monotonic() < deadline_s):
            for channel, answer in taken:
                take(channel, answer)
    for channel, place in places.items():
        if place not in answers:
            take(
                channel,
                SyncTimeout(f"no reply from {channel.address} within {round(timeout_s, 3):g} s", **channel.where),
            )
    return [answers[place] for place in range(len(asks))]
