"""What SGLang's ranks do when they can't reach each other: each refuses by what it knows itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from inference_plugin.engines.sglang.control import FollowerControl, LeaderControl
from inference_plugin.engines.sglang.scheduler import SchedulerRank
from inference_plugin.engines.sglang.turn import Turn


class Apart:
    """Ranks that lost each other."""

    size = 2

    def broadcast(self, data: bytes = b"") -> bytes:
        raise RuntimeError("Connection closed by peer")

    def gather(self, data: bytes) -> list[bytes]:
        raise RuntimeError("Connection closed by peer")


def scheduler_rank(unsure: str) -> Any:
    """A scheduler's rank without the scheduler: what ends requests there is written down."""
    one = object.__new__(SchedulerRank)
    one.rank, one.ranks, one.refusal, one.replica = 0, Apart(), None, "sglang-1"
    one.runtime = SimpleNamespace(unsure=lambda: unsure)
    one.bell = SimpleNamespace(quiet=lambda rung: None)
    one.ended = []
    one._paused = False
    one._retract = lambda: one.ended.append("retract")  # type: ignore[method-assign]
    one.scheduler, one._held = SimpleNamespace(waiting_queue=["a request"]), []
    one._end = lambda request, reason, status: one.ended.append(reason)  # type: ignore[method-assign]
    one._continue = lambda: one.ended.append("continue")  # type: ignore[method-assign]
    return one


def test_the_first_rank_refuses_before_it_tells_the_others_and_whether_or_not_it_can() -> None:
    first = scheduler_rank("")
    with pytest.raises(RuntimeError, match="Connection closed"):
        LeaderControl(first, []).refuse("torn")
    assert (first.refusal, first.ended) == ("torn", ["retract", "torn", "continue"])


@pytest.mark.parametrize("unsure", ["", "group 'policy' was committing"])
def test_a_rank_that_loses_the_others_in_the_middle_of_a_commit_refuses(unsure: str) -> None:
    follower = scheduler_rank(unsure)
    FollowerControl(follower).handle(Turn())
    assert (follower.refusal is not None) == bool(unsure)
    if unsure:
        assert "rank 0 lost the others while group 'policy' was committing" in follower.refusal
        assert follower.ended == ["retract", follower.refusal, "continue"]
