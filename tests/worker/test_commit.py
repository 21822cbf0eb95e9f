"""A commit step by step: how it treats requests in flight, by what the ranks say of it, and one that comes again."""

from __future__ import annotations

from typing import Any

import pytest

from inference_plugin.engines.commit import CommitPlan, commit_on_all_ranks
from inference_plugin.engines.operations import RankReply
from inference_plugin.engines.standing import Standing
from inference_plugin.wire.messages import Committed, InFlight, RankCommit


@pytest.mark.parametrize(
    ("asked", "scaled", "followed"),
    [
        ("keep", [False, False], "keep"),
        ("keep", [False, True], "recompute"),
        ("abort", [True, True], "abort"),
        ("drain", [True, True], "drain"),
    ],
)
def test_where_an_update_may_change_how_cached_keys_are_read_requests_that_would_keep_theirs_are_computed_anew(
    asked: InFlight, scaled: list[bool], followed: InFlight
) -> None:
    steps = commit_on_all_ranks(CommitPlan("n", "policy", "t", 1, asked, asked), Standing(), lambda: 0.0, 0.0)
    next(steps)
    stop: Any = steps.send([RankReply("", rank, scales_cache=scales) for rank, scales in enumerate(scaled)])
    assert stop.in_flight == followed
    span: Any = steps.send(False)
    assert span.facts == {"in_flight": asked}
    install: Any = steps.send(None)
    assert install.operation.name == "install"
    finish: Any = steps.send([RankReply("", rank) for rank in range(2)])
    assert finish.in_flight == followed


def test_a_transaction_that_all_ranks_have_committed_is_answered_and_nothing_is_stopped_or_written() -> None:
    steps = commit_on_all_ranks(CommitPlan("n", "policy", "t", 1, "keep", "keep"), Standing(), lambda: 0.0, 0.0)
    next(steps)
    done = tuple(RankCommit(rank, 1, 0.0, False) for rank in range(2))
    with pytest.raises(StopIteration) as ended:
        steps.send([RankReply("", rank, commit=done[rank]) for rank in range(2)])
    assert ended.value.value == Committed(1, done, 0.0, 0.0, already=True)
