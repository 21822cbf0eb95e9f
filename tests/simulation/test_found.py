"""Defects that the simulator has found, each without it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from inference_plugin.engines.commit import CommitPlan, commit_on_all_ranks
from inference_plugin.engines.operations import RankReply
from inference_plugin.engines.standing import Standing
from inference_plugin.wire.errors import ErrorInfo, SyncTimeout
from inference_plugin.wire.messages import RankCommit, ReplicaCard
from trainer_adapters.fleet.machine import FleetMachine
from trainer_adapters.fleet.machine_io import CardsSeen, Retained, Settled


def card(name: str, state: Any = "serving") -> ReplicaCard:
    return ReplicaCard(name, "e", "1", "m", "default", 1, "here", name, (), state=state)


def test_a_torn_replica_that_was_late_is_taken_by_the_next_update_because_nothing_else_heals_it() -> None:
    """It was neither caught up, being torn, nor updated, being late."""
    fleet = FleetMachine("policy")
    fleet.on(CardsSeen({name: card(name) for name in ("late", "fine")}, {}), 0.0)
    fleet.on(Settled(1, {"late": SyncTimeout("slow"), "fine": None}), 1.0)
    retained: Any = SimpleNamespace(version=1)
    fleet.on(Retained(retained), 1.0)
    assert fleet.free(["late", "fine"], 1) == {"fine"}, "it is left to catching up"
    fleet.on(CardsSeen({"late": card("late", "torn"), "fine": card("fine")}, {}), 2.0)
    assert fleet.free(["late", "fine"], 1) == {"late", "fine"}
    assert fleet.free(["late", "fine"], math.inf) == {"late", "fine"}


def test_a_commit_that_is_asked_again_is_not_called_failed_where_a_rank_has_installed_it() -> None:
    """The reply was lost, and when the commit was asked for again one rank could not answer."""
    plan = CommitPlan("n", "policy", "t", 1, "keep", "keep")
    steps = commit_on_all_ranks(plan, Standing(), lambda: 0.0, 0.0)
    next(steps)
    replies = [
        RankReply("", 0, commit=RankCommit(0, 1, 0.0, False)),
        RankReply("", 1, error=ErrorInfo("CommitFailed", "broken", rank=1)),
    ]
    released: Any = steps.send(replies)
    assert released.operation.name == "release"
    with pytest.raises(SyncTimeout, match="rank 1"):  # a report says of it that it does not know
        steps.send([])
