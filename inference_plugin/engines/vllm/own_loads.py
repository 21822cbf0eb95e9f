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
from inference_plugin.engines.operations import RankOperation, RankReply
from inference_plugin.engines.vllm.core import CoreControl
from inference_plugin.wire.codec import decode_as

__all__ = ["note_memory", "noted_loads"]

logger = logging.getLogger("vllm.weightwire")

WRITES = frozenset(
    {"reload_weights", "start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"}
)
"""Methods of vLLM's workers that write weights, also where they call no `load_weights` of the model."""


@contextlib.contextmanager
def noted_loads(core: Any, control: CoreControl, method: Any) -> Iterator[None]:
    """Around a call on all workers of `core`, on its own thread. Those that write weights are known beforehand; after any other
    the workers are asked whether it loaded some."""
    if method in WRITES:
        _forget(core, control, f"vLLM's own {method} wrote the weights")
        yield
        return
    try:
        yield
    except TimeoutError:
        raise  # they don't answer
    except Exception:
        _forget(core, control, "")
        raise
    _forget(core, control, "")


def note_memory(core: Any, control: CoreControl, move: Callable[[], Any], level: int | None) -> Any:
    """Around vLLM's own sleep at that level, or its wake-up (None), on the core's own thread."""
    executor = core.model_executor
    slept = "weights" in executor.sleeping_tags
    result = move()
    sleeps = "weights" in executor.sleeping_tags
    if sleeps and not slept:
        _tell(core, control, "note_sleep", "vLLM's own sleep of level 2 discarded the weights" if level == 2 else "")
    elif slept and not sleeps:
        _tell(core, control, "note_wake_up", "")
    return result


def _forget(core: Any, control: CoreControl, reason: str) -> None:
    """Has this core's workers forget the version for a `reason`; without one asks them whether they have since the last time."""
    _tell(core, control, "forget", reason)


def _tell(core: Any, control: CoreControl, name: Literal["forget", "note_sleep", "note_wake_up"], reason: str) -> None:
    with contained("telling workers of vLLM's own commands", logger):
        operation = RankOperation(secrets.token_hex(8), name, reason=reason)
        # Of this core alone: where several share experts, vLLM calls each of them.
        answers = CoreControl.call_ranks(control, msgspec.msgpack.encode(operation))
        replies = [decode_as(answer, RankReply) for answer in answers]
        unknown = {
            group: who for reply in replies if reply.nonce == operation.nonce for group, who in reply.unknown.items()
        }
        if unknown:
            control.lose_version()
            if (coordinator := core._weightwire_coordinator) is not None:
                coordinator.lose_version(unknown)
