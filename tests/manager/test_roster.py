"""What a manager makes of what it hears about replicas: how often one is tried, when it is tried again, who is remembered."""

from __future__ import annotations

import msgspec
import pytest
import torch

from inference_plugin.wire.errors import CommitFailed, ManifestMismatch, PeerLost, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import ReplicaCard
from tests.manager.test_registry import card
from tests.support.plain_engine import checkpoint, manifest_of
from trainer_adapters.fleet.machine import LOST_KEPT, OVERTAKEN, TRIES, FleetMachine
from trainer_adapters.fleet.machine_io import (
    Action,
    CardsSeen,
    CatchUp,
    CaughtUp,
    Event,
    NotCaughtUp,
    Retained,
    RetainedVersion,
    SegmentTaken,
    Settled,
    Tick,
    UpdateBegan,
    UpdateEnded,
)

MANIFEST = manifest_of(checkpoint(0))


class House:
    """A fleet's machine, what a registry would tell it, and a clock."""

    def __init__(self, *replicas: str) -> None:
        self.cards = {name: card(name) for name in replicas}
        self.heard = dict.fromkeys(replicas, 0.0)
        self.machine = FleetMachine("policy")
        self.now_s = 1000.0
        self.look()

    def on(self, event: Event) -> list[Action]:
        return self.machine.on(event, self.now_s)

    def look(self) -> None:
        self.on(CardsSeen(self.cards, self.heard))

    def states(self) -> dict[str, str]:
        return {status.replica: status.state for status in self.machine.statuses()}

    def update(self, version: int, *took: str, **failed: WeightwireError) -> None:
        """As an update ends, whose bytes are kept."""
        self.on(Settled(version, dict.fromkeys(took) | failed))
        segment = RetainedVersion(version, MANIFEST, (), "shm", b"", b"", f"segment-{version}", torch.empty(0))
        self.on(Retained(segment))

    def segment_taken(self, segment: str, busy: frozenset[str]) -> None:
        self.on(SegmentTaken("shm", segment, busy, MANIFEST.fingerprint))

    def claim(self) -> list[str]:
        """The replicas whose catch-ups start now."""
        self.look()
        return [action.card.replica for action in self.on(Tick()) if isinstance(action, CatchUp)]


@pytest.mark.parametrize(("error", "tries"), [(CommitFailed("undone"), TRIES), (ManifestMismatch("another model"), 1)])
def test_one_that_fails_is_tried_again_when_it_is_heard_of_and_not_for_ever(error: WeightwireError, tries: int) -> None:
    house = House("a", "b")
    assert house.claim() == []  # nothing was sent yet
    house.update(1, "a")
    for _ in range(tries):
        assert house.claim() == ["b"] and house.claim() == []
        house.heard["b"] = 0.0
        house.on(NotCaughtUp("b", error))
        assert house.claim() == [], "nothing was heard of it since"
        house.heard["b"] = float("inf")
    assert house.claim() == [] and house.states() == {"a": "current", "b": "joining"}
    house.update(2, "a")
    assert house.claim() == ["b"], "another version may fit"


def test_nobody_begins_to_be_caught_up_during_an_update_and_whoever_is_keeps_its_segment() -> None:
    house = House("a", "b", "c")
    house.update(1, "a", "b")
    assert house.claim() == ["c"]
    house.on(UpdateBegan())
    assert house.machine.free(house.cards, 1) == {"a", "b"}
    assert house.machine.segments_read() == {"segment-1"}
    house.segment_taken("segment-2", frozenset({"segment-1"}))
    house.update(2, "a", b=SyncTimeout("slow", phase="seal"))
    assert house.claim() == []
    assert house.machine.free(["c"], 1) == set()
    house.on(UpdateEnded())
    assert house.claim() == ["b"], "c is under way"
    house.on(CaughtUp("c"))
    assert house.states() == {"a": "current", "b": "behind", "c": "behind"}
    assert house.claim() == ["c"]


def test_one_that_updates_keep_overtaking_is_left_to_the_next_one_for_ever_longer() -> None:
    house = House("a", "b")
    house.update(1, "a")
    for version in range(2, 6):
        assert house.claim() == ["b"]
        house.now_s += 10  # what catching up takes
        house.update(version, "a")
        house.on(CaughtUp("b"))
        assert house.states()["b"] == "behind"
        if (times := version - 1 - OVERTAKEN) >= 0:
            house.now_s += 10 * 2**times - 1
            assert house.claim() == [] and house.machine.free(house.cards, 1) == {"a", "b"}, "an update takes it in"
            assert house.machine.wakes_at_s == house.now_s + 1, "nobody need tell that the time is over"
            house.now_s += 2
    house.update(6, "a", b=SyncTimeout("slow", phase="seal"))
    assert house.claim() == ["b"]
    house.on(CaughtUp("b"))
    assert house.states() == {"a": "current", "b": "current"}


def test_bytes_that_an_update_takes_are_nobodys_last_version_any_more() -> None:
    for segment, busy, still_there in (
        ("segment-1", frozenset[str](), False),
        ("segment-2", frozenset[str](), False),
        ("segment-2", frozenset({"segment-1"}), True),
    ):
        house = House("a", "b")
        house.update(1, "a")
        house.segment_taken(segment, busy)
        assert house.claim() == (["b"] if still_there else []), (
            "the update failed; this is what is left of the last one"
        )


def test_one_whose_weights_somebody_else_wrote_is_behind_and_left_to_the_next_update() -> None:
    house = House("a")
    house.update(1, "a")
    assert house.states() == {"a": "current"}
    house.cards["a"] = msgspec.structs.replace(house.cards["a"], unknown={"policy": "the engine loaded others"})
    assert house.claim() == []
    (status,) = house.machine.statuses()
    assert (status.state, status.version, status.reason) == ("behind", None, "the engine loaded others")
    assert house.machine.free(house.cards, 1) == {"a"}
    house.cards["a"] = msgspec.structs.replace(house.cards["a"], unknown={"critic": "the engine loaded others"})
    house.look()
    assert house.states() == {"a": "current"}, "it is another group's"


def test_one_whose_card_says_that_it_is_torn_is_of_no_version() -> None:
    """By somebody else's update: this manager's own was committed."""
    house = House("a")
    house.update(1, "a")
    house.cards["a"] = msgspec.structs.replace(house.cards["a"], state="torn", detail="an update failed half way")
    house.look()
    (status,) = house.machine.statuses()
    assert (status.state, status.version, status.reason) == ("torn", None, "an update failed half way")


def test_one_that_an_update_lost_is_back_when_it_is_heard_of_and_knows_what_it_served() -> None:
    house = House("a", "b")
    house.update(1, "a", "b")
    house.update(2, "a", b=PeerLost("no answer", phase="seal"))
    house.look()
    assert house.states() == {"a": "current", "b": "lost"}, "its card is still there, and says nothing new"
    house.heard["b"] = float("inf")
    house.look()
    assert [(s.state, s.version) for s in house.machine.statuses()] == [("current", 2), ("behind", 1)]
    assert house.claim() == ["b"]


@pytest.mark.parametrize("phase", ["commit", "install", "finish"])
def test_the_version_of_one_that_an_update_lost_in_its_commit_is_unknown(phase: str) -> None:
    house = House("a", "b")
    house.update(1, "a", "b")
    house.update(2, "a", b=PeerLost("rank 1 has ended", phase=phase))
    assert [(s.state, s.version) for s in house.machine.statuses()] == [("current", 2), ("lost", None)]


def test_lost_ones_are_remembered_up_to_a_number_and_the_living_always() -> None:
    gone = [f"gone-{i:03}" for i in range(LOST_KEPT + 5)]
    house = House("here", *gone)
    for name in gone:
        lost: ReplicaCard = house.cards.pop(name)
        house.look()
        assert house.states()[lost.replica] == "lost"
    assert sorted(house.states()) == [*gone[5:], "here"] and house.states()["here"] == "joining"


def test_an_update_takes_late_replicas_only_where_too_few_others_are_left() -> None:
    house = House("a", "b", "c")
    house.update(1, "a", "b", "c")
    house.update(2, "a", "b", c=SyncTimeout("slow", phase="seal"))
    assert house.machine.free(house.cards, 1) == house.machine.free(house.cards, 2) == {"a", "b"}
    assert house.machine.free(house.cards, 3) == {"a", "b", "c"}, "as many are needed"
    house.now_s += 1
    house.heard["c"] = house.now_s
    house.look()
    assert house.machine.free(house.cards, 1) == {"a", "b", "c"}, "it was heard of since"
