"""The first rank: the front's commands wait for a turn, in which it leads the others."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import zmq

from inference_plugin.engines.sglang.scheduler import Site
from inference_plugin.engines.sglang.turn import EngineOperation, EngineReply, Step
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import CommitFailed, PeerLost
from inference_plugin.wire.messages import InFlight, MemoryTag

__all__ = ["TurnControl"]


class TurnControl:
    """`engines.front.EngineControl` on the first rank: commands wait for a turn, and a turn reaches all ranks."""

    def __init__(self, site: Site, bells: Sequence[str]) -> None:
        self._site = site
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._waiting: Callable[[BaseException | None], None] | None = None
        self._lock = threading.Lock()
        self._bells = [_connected(address) for address in bells if address]

    def submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with self._lock, contextlib.suppress(zmq.Again):  # a bell that nobody answers has been rung often enough
            for bell in self._bells:
                bell.send(b"", zmq.DONTWAIT)

    def wants_turn(self) -> bool:
        """Called in each pass of the event loop."""
        if self._waiting is not None and self._site.scheduler.is_fully_idle():
            return True
        return bool(self._commands)

    def lead(self) -> None:
        """A turn on the first rank: what was submitted, then its end for the other ranks."""
        try:
            if self._waiting is not None and all(reply.done for reply in self._ask("flush")):
                waiting, self._waiting = self._waiting, None
                waiting(None)
            while self._commands:
                self._commands.popleft()()
        finally:
            self._site.ranks.broadcast(msgspec.msgpack.encode(Step()))

    def call_ranks(self, request: bytes) -> list[bytes]:
        return self._step(Step(rank=request))

    def pause(self, in_flight: InFlight, paused: Callable[[BaseException | None], None]) -> None:
        if self._site.model.device.type != "cpu":
            torch.accelerator.synchronize(self._site.model.device)  # a forward pass may be queued
        if in_flight == "keep":
            paused(None)
        elif in_flight == "recompute":
            if not all(reply.done for reply in self._ask("retract")):
                raise CommitFailed("SGLang could not flush its cache with all requests retracted", phase="commit")
            paused(None)
        else:
            self._ask(in_flight)
            self._waiting = paused  # `lead` calls it once all ranks are idle

    def hold(self, asleep: frozenset[MemoryTag]) -> None:
        self._ask("stand")

    def resume(self) -> None:
        self._waiting = None
        self._ask("resume")

    def installed(self, group: str, version: int, in_flight: InFlight) -> None:
        self._ask("installed", version=version)

    def refuse(self, reason: str | None) -> None:
        self._ask("refuse", reason=reason)

    def _ask(self, name: Any, **arguments: Any) -> list[EngineReply]:
        answers = self._step(Step(engine=EngineOperation(name, **arguments)))
        replies = [decode_as(answer, EngineReply) for answer in answers]
        for rank, reply in enumerate(replies):
            if reply.error is not None:
                raise PeerLost(f"the scheduler of rank {rank} failed in {name!r}: {reply.error}", rank=rank)
        return replies

    def _step(self, step: Step) -> list[bytes]:
        self._site.ranks.broadcast(msgspec.msgpack.encode(step))
        return self._site.ranks.gather(self._site.perform(step))


def _connected(address: str) -> Any:
    bell: Any = zmq.Context.instance().socket(zmq.PUSH)
    bell.setsockopt(zmq.LINGER, 0)
    bell.connect(address)
    return bell
