"""The front: what it makes of answers that are missing, mixed up or not there at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inference_plugin.engines.front import Front, open_front
from inference_plugin.engines.rank import RankOperation, RankReply
from inference_plugin.wire import addresses
from inference_plugin.wire.channel import Channel
from inference_plugin.wire.errors import PeerLost, ProtocolError
from inference_plugin.wire.messages import (
    Begun,
    Commit,
    Committed,
    Describe,
    Done,
    RankCommit,
    ReplicaCard,
    WorkerCard,
)


class Control:
    """An engine whose thread is whoever submits, and whose ranks answer as the test says."""

    def __init__(self, answers: Callable[[RankOperation], list[RankReply]]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def submit(self, command: Callable[[], None]) -> None:
        command()

    def call_ranks(self, request: bytes) -> list[bytes]:
        operation = msgspec.msgpack.decode(request, type=RankOperation)
        self.asked.append(operation.name)
        return [msgspec.msgpack.encode(reply) for reply in self.answers(operation)]

    def pause(self, in_flight: Any, paused: Callable[[BaseException | None], None]) -> None:
        paused(None)

    def hold(self, asleep: frozenset[str]) -> None:
        """Nothing runs."""

    def resume(self) -> None:
        """Nothing was paused."""

    def installed(self, group: str, version: int, in_flight: Any) -> None:
        """There is no cache."""

    def refuse(self, reason: str | None) -> None:
        """Nobody generates."""


def front_of(control: Control, workers: int) -> Front:
    replica = addresses.new_replica_id("plain")
    cards = [WorkerCard(replica, rank, rank, 0, 1, "", "cpu", 0) for rank in range(workers)]
    return open_front(control, replica, cards, engine="plain", engine_version="0", model="m", tp=workers)


def committed(operation: RankOperation, ranks: int) -> list[RankReply]:
    done = [RankCommit(rank, 1, 0.0, False) for rank in range(ranks)]
    said = operation.name == "finish"
    return [RankReply(operation.nonce, r, commit=done[r] if said else None) for r in range(ranks)]


def commit(front: Front) -> Committed:
    with Channel(front.address) as asking:
        return asking.request(Commit("policy", "t", 1), Committed, timeout_s=60)


def test_a_commit_asks_all_ranks_in_order(directory: Path) -> None:
    control = Control(lambda operation: committed(operation, 2))
    front = front_of(control, 2)
    assert [rank.rank for rank in commit(front).ranks] == [0, 1]
    assert control.asked == ["check", "install", "finish"]
    front.close()
    front.close()
    assert list(addresses.runtime_dir().iterdir()) == []


@pytest.mark.parametrize("answering", [0, 1])
def test_fewer_answers_than_ranks_are_no_success(directory: Path, answering: int) -> None:
    """`all()` of nothing is true: an executor that returns nothing must not look like one that agreed."""
    front = front_of(Control(lambda operation: committed(operation, answering)), 2)
    with pytest.raises(PeerLost, match=f"{answering} of 2 workers answered 'check'"):
        commit(front)
    front.close()


def test_another_calls_answer_is_no_answer(directory: Path) -> None:
    front = front_of(Control(lambda _: [RankReply("an older nonce", 0)]), 1)
    with pytest.raises(PeerLost, match="returned another call's answer to 'check'") as raised:
        commit(front)
    assert raised.value.hint == "restart the engine"
    front.close()


def test_what_is_no_request_to_a_front_is_refused_and_the_front_goes_on(directory: Path) -> None:
    front = front_of(Control(lambda operation: committed(operation, 1)), 1)
    with Channel(front.address) as asking:
        with pytest.raises(ProtocolError, match="a front takes no Begun"):
            asking.request(Begun(), Done, timeout_s=60)
        with pytest.raises(ProtocolError, match="a message of 2 frames; one is expected"):
            asking.request(Describe(), ReplicaCard, timeout_s=60, payload=b"x")
        assert asking.request(Describe(), ReplicaCard, timeout_s=60).address == front.address
    front.close()
