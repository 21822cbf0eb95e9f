"""The trainer's ranks among themselves: they come together, lose each other, and are together again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_plugin.transports import shm
from inference_plugin.wire import codec
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import PeerLost, ProtocolError, SyncTimeout
from inference_plugin.wire.messages import PROTOCOL_VERSION, Body, Failed, Ready, Wrote
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source
from tests.manager.trainer import Trainer
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import eventually
from trainer_adapters import SyncManager
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.update.turns import Turns

FAR_FROM_THE_DEADLINE_S = 60.0
"""Half of the default deadline: whoever took less was told, and didn't wait for it."""


V = [{"version": version} for version in range(10)]
"""The update of each version, on all ranks."""

WRONG: dict[str, tuple[int, list[dict[str, Any]], set[tuple[int, int]]]] = {
    "rank 1 leaves one out": (2, [V[1], V[2] | {"only": [0]}, V[3], V[4], V[5]], {(0, 1), (0, 2), (1, 2)}),
    "rank 1 leaves two out": (
        2,
        [V[1], V[2] | {"only": [0]}, V[3] | {"only": [0]}, V[4], V[5], V[6], V[7]],
        {(0, 1), (0, 2), (0, 3), (0, 4), (1, 3), (1, 4)},
    ),
    "rank 1 of three leaves one out": (
        3,
        [V[1], V[2] | {"only": [0, 2]}, V[3], V[4], V[5]],
        {(0, 1), (0, 2), (1, 2), (2, 1), (2, 2)},
    ),
    "rank 1 calls one twice": (2, [V[1], V[1] | {"only": [1]}, V[2], V[3]], {(1, 1)}),
    "rank 0 calls one twice": (2, [V[1], V[1] | {"only": [0]}, V[2], V[3]], {(0, 1)}),
    "rank 0 leaves one out": (2, [V[1], V[2] | {"only": [1]}, V[3], V[4], V[5]], {(1, 1), (0, 2), (1, 2)}),
    "rank 0 of three leaves one out": (
        3,
        [V[1], V[2] | {"only": [1, 2]}, V[3], V[4], V[5]],
        {(1, 1), (2, 1), (0, 2), (1, 2), (2, 2)},
    ),
    "rank 1 calls with another version": (2, [V[1], V[2] | {"fault": "another version"}, V[3]], {(0, 1), (1, 1)}),
    "rank 1 verifies where rank 0 updates": (2, [V[1], V[2] | {"verify": [1]}, V[3]], {(0, 1), (1, 1)}),
    "rank 0 verifies where rank 1 updates": (2, [V[1], V[2] | {"verify": [0]}, V[3]], {(0, 1), (1, 1)}),
    "rank 1 verifies once more": (
        2,
        [V[1], V[1] | {"verify": [1], "only": [1]}, V[2], V[3], V[4]],
        {(1, 1), (0, 2), (1, 2)},
    ),
    "rank 1 leaves an update out among verifications": (
        2,
        [V[1], V[2] | {"only": [0]}, V[2] | {"verify": [0, 1]}, V[3], V[3] | {"verify": [0, 1]}, V[4]],
        {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)},
    ),
    "rank 1 raises before it reports": (
        2,
        [V[1], V[2] | {"fault": "ends before it reports"}, V[3], V[4]],
        {(0, 1), (1, 1)},
    ),
}
"""How many ranks, what they do, and which `(rank, step)` fail: all others are as if nothing had been wrong."""


@pytest.mark.parametrize("wrong", WRONG)
def test_ranks_that_lost_each_other_fail_at_once_and_are_together_again(
    start: Start, trainer: Callable[..., Trainer], wrong: str
) -> None:
    world, steps, fails = WRONG[wrong]
    rig = start()
    ranks = trainer(world, steps)
    seen = {
        (rank, number): ranks.step(rank, number)
        for number, step in enumerate(steps)
        for rank in step.get("only", range(world))
    }
    assert {place for place, result in seen.items() if "error" in result} == fails, seen
    for place in fails:
        result = seen[place]
        assert result["seconds"] < FAR_FROM_THE_DEADLINE_S, result
        assert result["error"] in ("VersionConflict", "SyncTimeout", "SystemExit"), result
        assert result["error"] == "SystemExit" or "call update and verify on every rank" in result["text"], result
    assert holds(rig, steps[-1]["version"])


def test_a_rank_that_comes_after_rank_0_gave_up_is_told_at_once_though_rank_0_is_in_no_operation(
    start: Start, trainer: Callable[..., Trainer]
) -> None:
    rig = start()
    steps = [
        V[1],
        {"wait": "rank 1 comes", "only": [1]},
        V[2] | {"timeout_s": 1, "only": [0]},
        V[2] | {"only": [1]},
        {"wait": "go on"},
        V[3],
    ]
    ranks = trainer(2, steps)
    assert "trainer ranks [1] were not heard of in time" in ranks.step(0, 2)["text"]
    ranks.let("rank 1 comes")
    late = ranks.step(1, 3)
    assert late["error"] == "SyncTimeout" and "rank 0 has given this operation up, 'update:2'" in late["text"], late
    assert late["seconds"] < FAR_FROM_THE_DEADLINE_S
    ranks.let("go on")
    assert all("ok" in ranks.step(rank, 5) for rank in (0, 1))
    assert holds(rig, 3)


def test_a_rank_that_is_stopped_while_it_writes_and_wakes_after_the_deadline_is_told_at_once(
    start: Start, trainer: Callable[..., Trainer]
) -> None:
    """It woke into a wait of `timeout_s` and ten seconds more; rank 0 is in no operation meanwhile."""
    rig = start()
    limit_s = 8
    steps = [V[1], V[2] | {"fault": "stop", "timeout_s": limit_s}, {"wait": "go on"}, V[3]]
    ranks = trainer(2, steps)
    assert ranks.step(0, 1)["error"] == "SyncTimeout"
    woken_s = time.monotonic()
    late = ranks.woken(1, 1)
    assert time.monotonic() - woken_s < limit_s + 9
    assert late["error"] == "SyncTimeout", late
    ranks.let("go on")
    assert all("ok" in ranks.step(rank, 3) for rank in (0, 1))
    assert holds(rig, 3)


def test_a_rank_that_gave_up_before_rank_0_came_is_not_waited_for(
    start: Start, trainer: Callable[..., Trainer]
) -> None:
    rig = start()
    steps = [
        V[1],
        V[2] | {"timeout_s": 1, "only": [1]},
        {"wait": "rank 0 comes", "only": [0]},
        V[2] | {"only": [0]},
        {"wait": "both try again"},
        V[2],
        V[3],
    ]
    ranks = trainer(2, steps)
    early = ranks.step(1, 1)
    assert early["error"] == "SyncTimeout" and early["rank"] == 0, early
    assert "rank 0 did not answer in time: it has not called 'update'" in early["text"], early
    ranks.let("rank 0 comes")
    alone = ranks.step(0, 3)
    assert alone["error"] in ("SyncTimeout", "VersionConflict") and alone["rank"] == 1, alone
    assert alone["seconds"] < FAR_FROM_THE_DEADLINE_S
    ranks.let("both try again")
    assert all("ok" in ranks.step(rank, number) for rank in (0, 1) for number in (5, 6))
    assert holds(rig, 3)


def test_an_update_that_failed_on_all_ranks_can_be_called_again(start: Start, trainer: Callable[..., Trainer]) -> None:
    rig = start()
    late = {"fault": "stop", "timeout_s": 3}
    ranks = trainer(2, [V[1], V[2] | {"fault": "raise"}, V[2], V[3] | late, {"wait": "woken"}, V[3], V[4]])
    eventually(lambda: (ranks.out / "rank0.step3").exists(), "rank 0's deadline")
    assert ranks.woken(1, 3)["error"] == "SyncTimeout"
    ranks.let("woken")
    for number in (2, 5, 6):
        assert all("ok" in ranks.step(rank, number) for rank in (0, 1)), [ranks.step(r, number) for r in (0, 1)]
    assert holds(rig, 4)


def test_a_rank_whose_report_cant_be_sent_fails_with_a_typed_error_and_leaves_no_other_waiting(
    start: Start, trainer: Callable[..., Trainer]
) -> None:
    rig = start()
    ranks = trainer(2, [V[1], V[2] | {"fault": "numpy's integers"}, V[3]])
    told, own = ranks.step(0, 1), ranks.step(1, 1)
    assert (own["error"], own["side"], own["rank"]) == ("WeightwireError", "trainer", 1) and "int64" in own["text"]
    assert told["error"] == "SyncTimeout" and "trainer rank 1 gave 'update:2' up" in told["text"]
    assert max(told["seconds"], own["seconds"]) < FAR_FROM_THE_DEADLINE_S
    assert "ok" in ranks.step(0, 2) and "ok" in ranks.step(1, 2) and holds(rig, 3)


@pytest.mark.parametrize("alone", [0, 1])
def test_a_manager_that_only_one_rank_makes_is_a_typed_error_and_the_next_one_works(
    start: Start, trainer: Callable[..., Trainer], alone: int
) -> None:
    rig = start()
    ranks = trainer(2, [V[1]], alone=alone)
    seen = ranks.note(f"rank{alone}.alone")
    assert seen["rank"] == 1 - alone and seen["seconds"] < FAR_FROM_THE_DEADLINE_S
    assert f"trainer ranks [{1 - alone}] have not made their SyncManager within 1 s" in seen["text"]
    assert "make one on every rank" in seen["text"]
    assert all("ok" in ranks.step(rank, 0) for rank in (0, 1))
    assert holds(rig, 1)


@pytest.mark.parametrize(
    ("apart", "named"),
    {
        "two groups, crosswise": ([{"group": "actor"}, {"group": "opponent"}], "group='actor' and 'opponent'"),
        "for other replicas": ([{"replicas": "a"}, {"replicas": "b"}], "replicas='a' and 'b'"),
        "other requests in flight": ([{}, {"in_flight": "abort"}], "in_flight='keep' and 'abort'"),
        "one rank looks for NaN": ([{}, {"check_finite": True}], "check_finite=False and True"),
    }.values(),
)
def test_managers_of_two_groups_that_met_crosswise_are_refused_on_all_ranks_and_the_next_one_works(
    start: Start, trainer: Callable[..., Trainer], apart: list[dict[str, Any]], named: str
) -> None:
    rig = start()
    ranks = trainer(2, [V[1]], apart=apart)
    for rank in (0, 1):
        text = ranks.note(f"rank{rank}.apart")["text"]
        assert f"ranks 0 and 1 made this SyncManager with different settings: {named}" in text and "same order" in text
        assert "ok" in ranks.step(rank, 0)
    assert holds(rig, 1)


def test_the_ranks_of_a_sub_group_are_a_trainer(start: Start, trainer: Callable[..., Trainer]) -> None:
    rig = start()
    ranks = trainer(3, [V[1], V[2]], ranks=[2, 1])
    assert all("ok" in ranks.step(rank, number) for rank in (0, 1) for number in (0, 1))
    assert holds(rig, 2)


# --- ranks in any order, without processes ------------------------------------------------------------------------------

OFF = st.tuples(
    st.integers(0, 2), st.integers(0, 5), st.sampled_from(["leaves out", "twice", "verifies", "other version"])
)
"""Which rank does what wrong, at which of its calls."""


def calls_of(rank: int, wrong: list[tuple[int, int, str]], right: int) -> list[str]:
    calls = [[f"update:{version}"] for version in range(6)]
    for who, number, what in wrong:
        if who == rank:
            one = f"update:{number}"
            changed = {
                "leaves out": [],
                "twice": [one, one],
                "verifies": [one, "verify"],
                "other version": ["update:99"],
            }
            calls[number] = changed[what]
    return [*(call for some in calls for call in some), *(f"update:{version}" for version in range(6, 6 + right))]


def played(scripts: list[list[str]]) -> list[set[str]]:
    """Which calls succeed on each rank: `Turns` with what `TrainerRanks` does about its verdicts. Nobody is slow or killed."""
    turns = Turns()
    left = [list(reversed(script)) for script in scripts]
    done: list[set[str]] = [set() for _ in scripts]
    others = range(1, len(scripts))

    def over(rank: int) -> None:
        left[rank].pop()
        if rank and left[rank]:
            turns.reported(rank, left[rank][-1])

    for rank in others:
        turns.reported(rank, left[rank][-1])
    while left[0]:
        now = left[0][-1]
        turns.enter(now)
        told: set[int] = set()
        while True:
            verdicts = {rank: turns.judge(rank, left[rank][-1]) if left[rank] else "gone" for rank in others}
            late = [rank for rank, verdict in verdicts.items() if verdict == "late"]
            for rank in late:
                turns.knows_the_end(rank, left[rank][-1])
                over(rank)
            if not late:
                break
        together = set(verdicts.values()) == {"joins"}
        here = [rank for rank in others if verdicts[rank] == "joins"]
        here += [rank for rank in others if verdicts[rank] == "astray"]
        for rank in (0, *here):
            if together:
                done[rank].add(now)
            told.add(rank)
            over(rank)
        turns.leave(set(others) - told)
    return done


@settings(max_examples=200, deadline=None)
@given(wrong=st.lists(OFF, max_size=3, unique_by=lambda one: one[:2]))
def test_whatever_calls_were_wrong_the_ranks_are_together_again_after_a_few_right_ones(
    wrong: list[tuple[int, int, str]],
) -> None:
    right = 12
    done = played([calls_of(rank, wrong, right) for rank in range(3)])
    last = {f"update:{version}" for version in range(6 + right - 2, 6 + right)}
    assert all(last <= one for one in done), done
    assert done[0] == done[1] == done[2]


@pytest.mark.parametrize(("kind", "healthy"), [("vllm", 0), ("vllm", 1), ("lora", 0)])
def test_a_rank_that_fails_before_an_adapter_is_made_together_leaves_no_other_waiting_for_it(
    start: Start, trainer: Callable[..., Trainer], kind: str, healthy: int
) -> None:
    rig = start()
    ranks = trainer(2, [V[1], V[2] | {"made_together": [healthy], "kind": kind, "timeout_s": 20}, V[3]])
    seen = [ranks.step(rank, 1) for rank in (0, 1)]
    own = {
        healthy: f"trainer ranks [{1 - healthy}] have not made their adapter of a {kind} model within 10 s",
        1 - healthy: "an object of type NoneType cannot be sent",
    }
    for result in seen:
        assert result["seconds"] < FAR_FROM_THE_DEADLINE_S and own[0] in result["text"], seen
    assert own[1] in seen[1]["notes"][0], "rank 1 raises rank 0's error, and tells its own beside it"
    assert all("ok" in ranks.step(rank, 2) for rank in (0, 1))
    assert holds(rig, 3)


# --- slices that the ranks make together --------------------------------------------------------------------------------


class Together(ShardSource):
    """Stands in a collective before its second slice until the other ranks are there."""

    def __init__(self, seed: int) -> None:
        super().__init__(checkpoint(seed))
        self.others_are_there = threading.Event()
        self.config: Config | None = None
        self.runs_ended = 0

    def configure(self, config: Config) -> None:
        self.config = config

    def made_together(self) -> frozenset[int]:
        return frozenset([0])

    def slices(self) -> Iterator[LocalSlice]:
        for i, item in enumerate(super().slices()):
            if i == 1:
                self.others_are_there.wait()
            yield item
        self.runs_ended += 1


def test_slices_that_another_rank_never_comes_to_end_the_update_by_its_deadline(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)
        stuck = Together(2)
        manager.settings.timeout_s = 1
        with pytest.raises(SyncTimeout, match="did not make the next slice together") as raised:
            manager.update(stuck, 2)
        assert raised.value.phase == "stage" and raised.value.side == "trainer"
        with pytest.raises(
            ProtocolError, match=r"trainer ranks \[0\] are still in the export of an update that failed"
        ):
            manager.update(Together(2), 2)
        assert holds(rig, 1)
        manager.settings.timeout_s = 60
        stuck.others_are_there.set()
        eventually(lambda: stuck.runs_ended, "the end of the collectives")
        fine = Together(3)
        fine.others_are_there.set()
        manager.update(fine, 3)
    assert holds(rig, 3)


def test_the_error_of_a_rank_that_leaves_the_others_in_a_collective_is_raised_on_all(
    start: Start, trainer: Callable[..., Trainer]
) -> None:
    rig = start()
    steps = [V[1], V[2] | {"fault": "raise", "together": "collective", "timeout_s": 5}, {"wait": "go on"}, V[3]]
    ranks = trainer(2, steps)
    for rank in (0, 1):
        seen = ranks.step(rank, 1)
        assert "out of memory, says rank 1" in seen["text"] and seen["rank"] == 1, seen
    ranks.let("collective")
    ranks.let("go on")
    assert all("ok" in ranks.step(rank, 3) for rank in (0, 1))
    assert holds(rig, 3)


def test_a_transport_that_fails_before_it_takes_a_slice_leaves_no_other_rank_waiting(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: Any, **__: Any) -> Any:
        raise PeerLost("nobody is there")

    rig = start()
    together = Together(1)
    together.others_are_there.set()
    with SyncManager(transport="shm", timeout_s=60) as manager:
        monkeypatch.setattr(shm.TRANSPORT.sender, "write", write)
        with pytest.raises(PeerLost, match="nobody is there"):
            manager.update(together, 1)
        assert together.runs_ended == 1, "the other ranks wait in the source's collectives"
    assert holds(rig, 0)


def test_a_source_is_given_the_managers_configuration(start: Start) -> None:
    start()
    together = Together(1)
    together.others_are_there.set()
    config = Config(bucket_bytes=5 << 20)
    with SyncManager(config=config, timeout_s=60) as manager:
        manager.update(together, 1)
    assert together.config == config.but(timeout_s=60)


# --- whatever is sent to rank 0 ----------------------------------------------------------------------------------------

EXTREMES = [-1, 0, 1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, float("nan"), float("-inf"), True, None]
EXTREMES += ["", "update:2", "x" * 70_000, "\0", b"", b"\xff" * 1000, [], {}, [[[[]]]], {"kind": "?", "message": ""}]

STRUCTS = {kind.__struct_config__.tag: kind.__struct_fields__ for kind in Body.__args__}  # type: ignore[attr-defined]

values = st.sampled_from(EXTREMES) | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20)
bodies = st.sampled_from(sorted(STRUCTS)).flatmap(
    lambda tag: st.fixed_dictionaries({"type": st.just(tag)}, optional=dict.fromkeys(STRUCTS[tag], values))
)
envelopes = st.fixed_dictionaries({"protocol": st.just(PROTOCOL_VERSION) | values, "seq": values, "body": bodies})
pretenders = st.builds(
    Ready,
    count=st.integers(-(2**63), 2**63),
    operation=st.sampled_from(["update:2", "update:3", "verify", ""]),
    rank=st.sampled_from([0, 1, 2, 2**31, 2**63]),
    secret=st.sampled_from(["", "guess"]),
    given_up=st.booleans(),
) | st.builds(Wrote, txn=st.just("0" * 24), rank=st.sampled_from([0, 1, 2, 2**63]), messages=st.integers(-1, 2**63))
frames = st.one_of(
    st.lists(st.binary(max_size=50), min_size=1, max_size=4),
    envelopes.map(lambda envelope: [b"", msgspec.msgpack.encode(envelope)]),
    pretenders.map(lambda body: [b"", codec.encode(body)]),
)


def test_whatever_is_sent_to_rank_0_updates_go_on(
    start: Start, trainer: Callable[..., Trainer], directory: Path
) -> None:
    """Between operations, and while rank 0 waits for a rank that doesn't come yet."""
    rig = start()
    steps = [V[1], {"wait": "two", "only": [0]}, {"wait": "three", "only": [1]}, V[2], V[3]]
    ranks = trainer(2, steps)
    assert all("ok" in ranks.step(rank, 0) for rank in (0, 1))
    (path,) = directory.rglob("trainer-*")
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(f"ipc://{path}")

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(sent=frames)
    def send(sent: list[bytes]) -> None:
        stranger.send_multipart(sent)

    def is_answered() -> None:
        """A malformed request is answered with an error, so all that was sent before was taken."""
        while stranger.poll(0):
            stranger.recv_multipart()
        stranger.send_multipart([b"", b"mark"])
        assert stranger.poll(300_000), "rank 0 answers nobody any more"

    try:
        send()
        for _ in range(3000):  # malformed ones in a row
            stranger.send_multipart([b"", b"\xc1"])
        is_answered()
        ranks.let("two")
        send()
        is_answered()
        ranks.let("three")
        for number in (3, 4):
            assert all("ok" in ranks.step(rank, number) for rank in (0, 1)), [ranks.step(r, number) for r in (0, 1)]
        assert holds(rig, 3)
        while stranger.poll(0):
            assert isinstance(codec.decode(stranger.recv_multipart()[-1]).body, Failed)
    finally:
        stranger.close()
        context.term()
