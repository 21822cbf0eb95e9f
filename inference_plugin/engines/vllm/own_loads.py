"""vLLM's own commands that write the served model's weights, beside our updates: `reload_weights`, its weight transfer by another
backend, and whatever a user's own worker extension does; and those that release their memory.

They are taken. From then on nobody knows the weights' version: answers are stamped `unknown`, the replica's card says who wrote
them, and its groups have no version until their next update.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from inference_plugin.engines.monkeypatch import contained
from inference_plugin.engines.noted_loads import noted_so_far
from inference_plugin.engines.operations import RankOperation, RankReply
from inference_plugin.engines.vllm.core import CoreControl
from inference_plugin.wire.codec import decode_as

__all__ = ["ask_of_loads_here", "note_memory", "noted_loads"]

logger = logging.getLogger("vllm.weightwire")

WRITES = frozenset(
    {"reload_weights", "start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"}
)
"""Methods of vLLM's workers that write weights, also where they call no `load_weights` of the model."""


@contextlib.contextmanager
def noted_loads(control: CoreControl, method: Any) -> Iterator[None]:
    """Around a call on all workers of a core, on its own thread. Those that write weights are known beforehand; after any other
    the workers are asked whether it loaded some."""
    if isinstance(method, str) and method in WRITES:
        _forget(control, f"vLLM's own {method} wrote the weights")
    try:
        yield
    except TimeoutError:
        raise  # they don't answer
    except Exception:
        _forget(control, "")
        raise
    _forget(control, "")


def ask_of_loads_here(control: CoreControl) -> None:
    """Before a step of an in-process engine: its caller may have called the live model's loader."""
    if control.loads_told != (loads := noted_so_far()):
        control.loads_told = loads
        _forget(control, "")


def note_memory(control: CoreControl, move: Callable[[], Any], level: int | None) -> Any:
    """Around vLLM's own sleep at that level, or its wake-up (None), on the core's own thread."""
    executor = control.core.model_executor
    if level is not None and "weights" not in executor.sleeping_tags:
        _tell(control, "note_sleep", "vLLM's own sleep of level 2 discarded the weights" if level == 2 else "")
    failed = "vLLM's own sleep failed"
    try:
        result = move()
        failed = ""
        return result
    finally:
        if "weights" not in executor.sleeping_tags:
            _tell(control, "note_wake_up", failed)


def _forget(control: CoreControl, reason: str) -> None:
    """Has this core's workers forget the version for a `reason`. Without one they do so where one of them tells of a load since
    the last call."""
    why = _tell(control, "forget", reason)
    if why and not reason:
        _tell(control, "forget", why)  # some may not have loaded any: their version is of no use alone


def _tell(control: CoreControl, name: Literal["forget", "note_sleep", "note_wake_up"], reason: str) -> str:
    """Returns why the version of some group is unknown; "" where they are known."""
    unknown: dict[str, str] = {}
    with contained("telling workers of vLLM's own commands", logger):
        operation = RankOperation(secrets.token_hex(8), name, reason=reason)
        # Of this core alone: where several share experts, vLLM calls each of them.
        answers = CoreControl.call_ranks(control, msgspec.msgpack.encode(operation))
        for answer in answers:
            # After an exception in one worker, others may still answer the call before.
            with contained("reading a worker's answer", logger):
                reply = decode_as(answer, RankReply)
                unknown |= reply.unknown if reply.nonce == operation.nonce else {}
        if unknown:
            control.lose_version()
            if (coordinator := control.coordinator) is not None:
                coordinator.lose_version(unknown)
    return next(iter(unknown.values()), "")
