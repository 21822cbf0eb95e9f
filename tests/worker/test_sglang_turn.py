"""Turns of SGLang's ranks: where these can't reach each other, each refuses by what it knows itself; where no step runs, SGLang's
watchdog is told."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from inference_plugin.engines.sglang import scheduler as scheduler_module
from inference_plugin.engines.sglang.control import FollowerControl, LeaderControl
from inference_plugin.engines.sglang.scheduler import SchedulerRank
from inference_plugin.engines.sglang.turn import EngineOperation, Step, Turn


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
    one.paused = False
    one.retract = lambda: one.ended.append("retract")  # type: ignore[method-assign]
    one.scheduler, one.held = SimpleNamespace(waiting_queue=["a request"]), []
    one.end_request = lambda request, reason, status: one.ended.append(reason)  # type: ignore[method-assign]
    one.go_on = lambda: one.ended.append("continue")  # type: ignore[method-assign]
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


def test_sglang_s_watchdog_does_not_end_an_engine_that_stands_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the engine where a batch is under way for five minutes without a step; `keep` leaves one under way."""
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.io_struct"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    requests: Any = sys.modules["sglang.srt.managers.io_struct"]
    requests.AbortReq = requests.PauseGenerationReqInput = SimpleNamespace
    one = scheduler_rank("")
    one.model = SimpleNamespace(device=torch.device("cpu"))
    one.scheduler = SimpleNamespace(
        _engine_paused=False, cur_batch_for_debug="a batch", pause_generation=lambda _: None
    )
    LeaderControl(one, []).pause("keep")
    assert one.scheduler.cur_batch_for_debug is None, "in a commit that streams"
    one.scheduler.cur_batch_for_debug = "the next batch"
    one.perform(Step(engine=EngineOperation("stand")))
    assert one.scheduler.cur_batch_for_debug is None, "in a manager's pause"


def test_a_rank_that_fails_as_it_starts_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in of SGLang's may draft by anything, also by what can't be watched for loads."""
    context: Any = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(attn_tp_rank=0)
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    closed = []

    def made(name: str, **fields: Any) -> Any:
        return lambda *_: SimpleNamespace(close=lambda: closed.append(name), **fields)

    monkeypatch.setattr(scheduler_module, "ServedModel", made("model", drafts=[SimpleNamespace()]))
    monkeypatch.setattr(scheduler_module, "Doorbell", made("bell"))
    monkeypatch.setattr(scheduler_module, "RankRuntime", made("runtime"))
    runner = SimpleNamespace(model=torch.nn.Module())
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), idle_sleeper=None)
    ranks: Any = SimpleNamespace(rank=0, tp_rank=0, stage=0, stages=1, size=1)
    with pytest.raises(TypeError):
        SchedulerRank(scheduler, ranks, "sglang-1")
    assert {"runtime", "bell"} <= set(closed)
