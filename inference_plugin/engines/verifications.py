"""A verification: the live parameters are read back in portions, with steps of the engine between two of them.

A commit between two portions invalidates what was read: the reading starts again, at most `TRIES` times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from inference_plugin.engines.actions import Ask, Rest, Steps
from inference_plugin.engines.operations import RankOperation, RankReply, raise_first
from inference_plugin.engines.standing import Standing
from inference_plugin.wire.errors import SyncTimeout, VersionConflict, WeightwireError
from inference_plugin.wire.messages import RankVerify, Verified, Verify

__all__ = ["Reading", "verify"]

TRIES = 4
SHORTEST_REST_S = 0.001


@dataclass
class Reading:
    """What a verification has read so far. `name` is unique within the replica; each attempt has a token of its own."""

    request: Verify
    name: str
    attempt: int = 0
    begun: bool = False
    portions: dict[int, list[RankVerify]] = field(default_factory=dict)
    """By rank."""

    def operation(self) -> RankOperation:
        """Reads the next portion."""
        name = "read_on" if self.begun else "verify"
        return RankOperation("", name, self.request.group, f"{self.name}.{self.attempt}")  # type: ignore[arg-type]

    def keep(self, reply: RankReply) -> None:
        if reply.verify is not None:
            self.portions.setdefault(reply.rank, []).append(reply.verify)

    def begin_again(self) -> None:
        self.attempt, self.begun = self.attempt + 1, False
        self.portions = {}

    def answer(self) -> Verified:
        """All portions of all ranks."""
        ranks = []
        for _, read in sorted(self.portions.items()):
            boxes = tuple(box for portion in read for box in portion.boxes)
            unreadable = {name: why for portion in read for name, why in portion.unreadable.items()}
            ranks.append(msgspec.structs.replace(read[-1], boxes=boxes, unreadable=unreadable))
        return Verified(tuple(ranks))

    def late(self) -> SyncTimeout:
        count = sum(len(portion.boxes) for read in self.portions.values() for portion in read)
        where = f"after {count} tensors" if self.begun else "before the engine's thread was free"
        return SyncTimeout(f"{where} the {self.request.timeout_s:g} s of the verification were over")


def verify(standing: Standing, reading: Reading, now_s: Callable[[], float]) -> Steps[Verified]:
    """Reads everything on all ranks, and rests after each portion for as long as it took."""
    try:
        while True:
            standing.check_awake()
            started_s, operation = now_s(), reading.operation()
            reading.begun = True
            replies: list[RankReply] = yield Ask(operation)
            raise_first(replies)
            rest_s = SHORTEST_REST_S
            if any(reply.left == "changed" for reply in replies):
                if reading.attempt + 1 >= TRIES:
                    raise VersionConflict(
                        f"the weights changed {TRIES} times while they were read back",
                        hint="verify while no update is on its way",
                    )
                reading.begin_again()
            else:
                for reply in replies:
                    reading.keep(reply)
                if not any(reply.left == "more" for reply in replies):
                    return reading.answer()
                rest_s = max(now_s() - started_s, SHORTEST_REST_S)
            yield Rest(rest_s)
    except Exception:
        if reading.begun:
            # A lost rank holds nothing, and neither does a group that is gone.
            with contextlib.suppress(WeightwireError):
                yield Ask(msgspec.structs.replace(reading.operation(), name="stop_reading"))
        raise
