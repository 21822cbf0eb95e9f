"""Turns of engine cores that share experts: data-parallel ranks of a mixture of experts are one replica.

vLLM has these cores step together. While one of them has a request, each takes the same steps, with an empty batch where it has
none, and in every step they exchange tokens for their experts. The first core has the coordinator. Its commands run in turns, in
which all cores stand after the same step:

1. The first core asks the others to begin no further step. A thread of each answers at once how many it has begun.
2. The first core tells everybody the largest of these numbers. A core that has taken fewer steps takes the rest: a step that
   one core has begun ends only if the others take it, too.
3. All cores stand. They do what the first one sends, and answer.
4. The first core ends the turn.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from inference_plugin.engines.control import EngineControl
from inference_plugin.engines.gloo_group import GlooGroup
from inference_plugin.engines.rank_sockets import RankSockets, sockets_of
from inference_plugin.engines.vllm.shared_core import CoreOrder, CoreReply, SharedCore
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import EngineUnsupported, PeerLost, WeightwireError
from inference_plugin.wire.messages import InFlight, MemoryTag

__all__ = ["FollowingCore", "LeadingCore", "connect"]

logger = logging.getLogger("vllm.weightwire")

_AGAIN_S = 0.01
"""Rest before a turn is begun again, where a core was in a collective of vLLM's own."""


class LeadingCore(EngineControl):
    """All cores as their coordinator sees them; on the first one."""

    def __init__(self, own: SharedCore, sockets: RankSockets) -> None:
        self._own = own
        self._sockets = sockets
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._drained: Future[None] | None = None
        self._lost: PeerLost | None = None
        own.take_turn = self.take_turn

    def submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._own.submit(self.take_turn)

    def take_turn(self) -> None:
        """Runs the submitted commands while all cores stand; returns at once where this core has to step first."""
        try:
            self._take_turn()
        except Exception as error:
            logger.exception("weightwire: the first engine core left a turn")
            self._lose(error)
            self._own.gate.open()

    def _take_turn(self) -> None:
        own = self._own
        may_be_drained = self._drained is not None and not own.core.has_work()
        if not self._commands and not may_be_drained and not own.gate.halted:
            return
        if not own.gate.halted and self._lost is None and not self._halt():
            return
        if own.gate.behind:
            own.step_on()
            return
        self._end_drain()
        while self._commands:
            self._commands.popleft()()
        if self._lost is None:
            self._tell(CoreOrder("end"))
        own.end_turn()

    def _halt(self) -> bool:
        """Begins a turn. False where one core is in a collective of vLLM's own, which may wait for this core."""
        gate = self._own.gate
        try:
            self._tell(CoreOrder("halt"))
            begun = [reply.begun for reply in self._answers()]
            own = gate.halt()
            assert own is not None  # this thread is in no collective
            known = [own, *(steps for steps in begun if steps is not None)]
            if None in begun:
                gate.release()
                self._tell(CoreOrder("allow", steps=None))
                again = threading.Timer(_AGAIN_S, self._own.submit, [self.take_turn])
                again.daemon = True
                again.start()
                return False
            self._tell(CoreOrder("allow", steps=max(known)))
            gate.allow(max(known))
        except PeerLost as error:  # the commands fail with it
            logger.error("weightwire: %s", error)
        return True

    def call_ranks(self, request: bytes) -> list[bytes]:
        return [answer for reply in self._ask(CoreOrder("rank", request=request)) for answer in reply.answers]

    def finish(self, request: bytes, in_flight: InFlight) -> list[bytes]:
        order = CoreOrder("finish", request=request, in_flight=in_flight)
        return [answer for reply in self._ask(order) for answer in reply.answers]

    def pause(self, in_flight: InFlight) -> Future[None] | None:
        if in_flight == "drain" and not all(reply.done for reply in self._ask(CoreOrder("drain"))):
            self._drained = Future()  # `_end_drain` completes it
            return self._drained
        self._ask(CoreOrder("stand", in_flight=in_flight))
        return None

    def hold(self, asleep: frozenset[MemoryTag]) -> None:
        self._ask(CoreOrder("hold", asleep=tuple(asleep)))

    def resume(self) -> None:
        self._drained = None
        stand = all(reply.done for reply in self._ask(CoreOrder("look")))
        self._ask(CoreOrder("go_on", stand=stand))

    def installed(self, group: str, stamp: str, txn: str, in_flight: InFlight) -> None:
        self._own.installed(group, stamp, txn, in_flight)

    def refuse(self, reason: str | None) -> None:
        self._own.refuse(reason)  # this core first: whoever can't be reached can't keep it from refusing
        self._ask(CoreOrder("refuse", reason=reason))

    def _end_drain(self) -> None:
        """Completes the wait for requests to end, if none runs on any core."""
        drained = self._drained
        if drained is None:
            return
        try:
            if not all(reply.done for reply in self._ask(CoreOrder("drain"))):
                return
            self._drained = None
            self._ask(CoreOrder("stand", in_flight="drain"))
        except Exception as error:  # noqa: BLE001 -- it is the pause's
            self._drained = None
            drained.set_exception(error)
        else:
            drained.set_result(None)

    def _ask(self, order: CoreOrder) -> list[CoreReply]:
        """What every core replies, this one first."""
        self._tell(order)
        replies = [self._own.perform(order), *self._answers()]
        for index, reply in enumerate(replies):
            if reply.error is not None:
                error = WeightwireError.of(reply.error)
                logger.warning("weightwire: engine core %d failed in %r: %s", index, order.name, error.message)
                raise error
        return replies

    def _tell(self, order: CoreOrder) -> None:
        if self._lost is not None:
            raise self._lost
        try:
            self._sockets.tell(msgspec.msgpack.encode(order))
        except WeightwireError as error:
            raise self._lose(error) from error

    def _answers(self) -> list[CoreReply]:
        try:
            return [decode_as(answer, CoreReply) for answer in self._sockets.answers()]
        except WeightwireError as error:
            raise self._lose(error) from error

    def _lose(self, error: Exception) -> PeerLost:
        """No turn follows this one."""
        if self._lost is None:
            self._lost = PeerLost(f"the engine cores have lost each other: {error}", hint="start the engine anew")
            self._sockets.close()
            self._own.lost(str(error))
        return self._lost


class FollowingCore:
    """On every other core: does what the first one sends."""

    def __init__(self, own: SharedCore, sockets: RankSockets) -> None:
        self._own = own
        self._sockets = sockets
        self._orders: queue.SimpleQueue[CoreOrder | Exception] = queue.SimpleQueue()
        own.take_turn = self.take_turn
        threading.Thread(target=self._listen, name="weightwire-core", daemon=True).start()

    def _listen(self) -> None:
        """On a thread of its own: answers "halt" whatever the core is doing, and passes on the other orders."""
        try:
            while True:
                order = decode_as(self._sockets.receive(None), CoreOrder)
                if order.name != "halt":
                    self._orders.put(order)
                    continue
                begun = self._own.gate.halt()
                self._sockets.answer(msgspec.msgpack.encode(CoreReply(begun=begun)))
                if begun is None:
                    self._sockets.receive(self._sockets.timeout_s)  # that the turn is off
                else:
                    self._own.submit(self.take_turn)
        except Exception as error:  # noqa: BLE001 -- told on the core's own thread
            self._orders.put(error)
            self._own.submit(self._look_for_the_end)

    def take_turn(self) -> None:
        """Follows the first core; returns at once where this core has to step first."""
        gate = self._own.gate
        try:
            while gate.halted:
                if gate.behind:
                    self._own.step_on()
                    return
                self._follow(self._next())
        except Exception as error:
            logger.exception("weightwire: an engine core left a turn")
            self._leave(error)

    def _follow(self, order: CoreOrder) -> None:
        if order.name == "allow" and order.steps is not None:
            self._own.gate.allow(order.steps)
        elif order.name in ("allow", "end"):
            self._own.end_turn()
        else:
            self._sockets.answer(msgspec.msgpack.encode(self._own.perform(order)))

    def _next(self) -> CoreOrder:
        try:
            order = self._orders.get(timeout=self._sockets.timeout_s)
        except queue.Empty:
            raise PeerLost(f"the first core was silent for {self._sockets.timeout_s:g} s") from None
        if isinstance(order, Exception):
            raise order
        return order

    def _look_for_the_end(self) -> None:
        """The first core has left. In a turn `_next` finds out."""
        with contextlib.suppress(queue.Empty):
            while not self._own.gate.halted:
                order = self._orders.get_nowait()
                if isinstance(order, Exception):
                    self._leave(order)

    def _leave(self, error: Exception) -> None:
        self._sockets.close()
        self._own.lost(str(error))


# --- how the cores find each other ------------------------------------------------------------------------------------------


def connect(core: Any) -> RankSockets:
    """Sockets to the other cores; all of them call this while they start. Raises `EngineUnsupported`, on all of them alike."""
    config = core.vllm_config.parallel_config
    for what in ("enable_elastic_ep", "enable_eplb", "enable_fault_tolerance"):
        if getattr(config, what, False):
            raise EngineUnsupported(
                f"a mixture of experts on data-parallel ranks with {what} changes its ranks or its experts while it runs",
                hint=f"start it without {what}",
                phase="start",
            )
    # vLLM itself does not use the group yet.
    sockets = sockets_of(GlooGroup(core.dp_group), core.dp_rank, core.dp_size)
    if sockets is None:
        raise EngineUnsupported(
            "data-parallel ranks that share experts are on several hosts, or can't reach each other by a socket",
            hint="keep them on one host, and its runtime directory writable",
            phase="start",
        )
    return sockets
