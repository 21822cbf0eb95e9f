"""What a manager makes of what it hears about replicas: how often one is tried, when it is tried again, who is remembered."""

from __future__ import annotations

import pytest
import torch

from inference_plugin.wire.channel import Channel
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import CommitFailed, ManifestMismatch, PeerLost, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import ReplicaCard
from inference_plugin.wire.reports import ReplicaReport
from tests.manager.test_registry import card
from tests.support.plain_engine import checkpoint, manifest_of
from trainer_adapters.replicas import ReplicaSession
from trainer_adapters.roster import LOST_KEPT, OVERTAKEN, TRIES, Kept, Roster

MANIFEST = manifest_of(checkpoint(0))


class House:
    """A roster, and what a registry would tell it."""

    def __init__(self, *replicas: str) -> None:
        self.cards = {name: card(name) for name in replicas}
        self.heard = dict.fromkeys(replicas, 0.0)
        self.roster = Roster("policy")
        self.look()

    def look(self) -> None:
        self.roster.look(self.cards.values, lambda name: self.heard.get(name, 0.0))

    def states(self) -> dict[str, str]:
        return {status.replica: status.state for status in self.roster.statuses()}

    def update(self, version: int, *took: str, **failed: WeightwireError) -> None:
        """As an update ends, whose bytes are kept."""
        self.roster.settle(
            version,
            [ReplicaReport(name, "plain", "committed", version) for name in took]
            + [ReplicaReport(name, "plain", "failed", None, error=error.info()) for name, error in failed.items()],
        )
        self.roster.keep(Kept(version, MANIFEST, (), "shm", b"", b"", f"segment-{version}", torch.empty(0)))

    def claim(self) -> list[str]:
        return [each.replica for each, _ in self.roster.claim(lambda name: self.heard[name])]

    def session(self, name: str) -> ReplicaSession:
        """One over which nothing is asked any more."""
        session = ReplicaSession(self.cards[name], Config(), Channel("ipc:///nowhere"), [])
        session.close()
        return session


@pytest.mark.parametrize(("error", "tries"), [(CommitFailed("undone"), TRIES), (ManifestMismatch("another model"), 1)])
def test_one_that_fails_is_tried_again_when_it_is_heard_of_and_not_for_ever(error: WeightwireError, tries: int) -> None:
    house = House("a", "b")
    assert house.claim() == []  # nothing was sent yet
    house.update(1, "a")
    for _ in range(tries):
        assert house.claim() == ["b"] and house.claim() == []
        house.heard["b"] = 0.0
        house.roster.not_caught_up(house.session("b"), error)
        assert house.claim() == [], "nothing was heard of it since"
        house.heard["b"] = float("inf")
    assert house.claim() == [] and house.states() == {"a": "current", "b": "joining"}
    house.update(2, "a")
    assert house.claim() == ["b"], "another version may fit"


def test_nobody_begins_to_be_caught_up_during_an_update_and_whoever_is_keeps_its_segment() -> None:
    house = House("a", "b", "c")
    house.update(1, "a", "b")
    assert house.claim() == ["c"]
    with house.roster.updating():
        assert house.roster.free(house.cards, 1, 60) == {"a", "b"}
        assert house.roster.segments_needed() == {"segment-1"}
        house.roster.overwrites("shm", "segment-2", frozenset({"segment-1"}), MANIFEST)
        house.update(2, "a", b=SyncTimeout("slow", phase="seal"))
        assert house.claim() == []
        with pytest.raises(SyncTimeout, match="still being caught up"):
            house.roster.free(["c"], 1, 0.0)
    assert house.claim() == ["b"], "c is under way"
    house.roster.caught_up(house.session("c"))
    assert house.states() == {"a": "current", "b": "behind", "c": "behind"}
    assert house.claim() == ["c"]


def test_one_that_updates_keep_overtaking_is_left_to_the_next_one_for_ever_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House("a", "b")
    house.update(1, "a")
    now_s = 1000.0
    monkeypatch.setattr("trainer_adapters.roster.time.monotonic", lambda: now_s)
    for version in range(2, 6):
        assert house.claim() == ["b"]
        now_s += 10  # what catching up takes
        house.update(version, "a")
        house.roster.caught_up(house.session("b"))
        assert house.states()["b"] == "behind"
        if (times := version - 1 - OVERTAKEN) >= 0:
            now_s += 10 * 2**times - 1
            assert house.claim() == [] and house.roster.free(house.cards, 1, 60) == {"a", "b"}, "an update takes it in"
            now_s += 2
            assert house.roster.wait_for_news(), "nobody need tell that the time is over"
    house.update(6, "a", b=SyncTimeout("slow", phase="seal"))
    assert house.claim() == ["b"]
    house.roster.caught_up(house.session("b"))
    assert house.states() == {"a": "current", "b": "current"}


def test_bytes_that_an_update_takes_are_nobodys_last_version_any_more() -> None:
    for segment, busy, still_there in (
        ("segment-1", frozenset[str](), False),
        ("segment-2", frozenset[str](), False),
        ("segment-2", frozenset({"segment-1"}), True),
    ):
        house = House("a", "b")
        house.update(1, "a")
        house.roster.overwrites("shm", segment, busy, MANIFEST)
        assert house.claim() == (["b"] if still_there else []), (
            "the update failed; this is what is left of the last one"
        )


def test_one_that_an_update_lost_is_back_when_it_is_heard_of_and_knows_what_it_served() -> None:
    house = House("a", "b")
    house.update(1, "a", "b")
    house.update(2, "a", b=PeerLost("no answer", phase="seal"))
    house.look()
    assert house.states() == {"a": "current", "b": "lost"}, "its card is still there, and says nothing new"
    house.heard["b"] = float("inf")
    house.look()
    assert [(s.state, s.version) for s in house.roster.statuses()] == [("current", 2), ("behind", 1)]
    assert house.claim() == ["b"]


def test_lost_ones_are_remembered_up_to_a_number_and_the_living_always() -> None:
    gone = [f"gone-{i:03}" for i in range(LOST_KEPT + 5)]
    house = House("here", *gone)
    for name in gone:
        lost: ReplicaCard = house.cards.pop(name)
        house.look()
        assert house.states()[lost.replica] == "lost"
    assert sorted(house.states()) == [*gone[5:], "here"] and house.states()["here"] == "joining"
