"""The bell that wakes a rank of SGLang which sleeps while it is idle: which rings a turn answers, and which are left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from inference_plugin.engines.sglang import turn
from inference_plugin.engines.sglang.turn import Doorbell
from tests.support.small_disk import small_disk, without_inodes


class Sleeper:
    """What SGLang's idle sleeper polls, and somebody who rings."""

    def __init__(self) -> None:
        self.poller = zmq.Poller()
        self.bell = Doorbell(SimpleNamespace(poller=self.poller), "sglang-1", 0)
        self._ringing: Any = zmq.Context.instance().socket(zmq.PUSH)
        self._ringing.connect(self.bell.address)

    def ring(self, *rings: bytes) -> None:
        for one in rings:
            self._ringing.send(one)

    def wakes(self, within_ms: int = 0) -> bool:
        return bool(self.poller.poll(within_ms))

    def close(self) -> None:
        self.bell.close()
        self._ringing.close(linger=0)


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sleeper]:
    monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(turn, "RING_LIMIT_MS", 60_000)  # on a busy machine a ring takes its time
    one = Sleeper()
    yield one
    one.close()


def test_a_rank_that_only_requests_can_wake_looks_up_often() -> None:
    """As `RustServerIdleSleeper` of SGLang 0.5.23: it waits for its server's requests, up to a second."""
    for sleeps_ms, then_ms in ((1000, turn.LOOK_UP_MS), (5, 5)):
        sleeper = SimpleNamespace(timeout_ms=sleeps_ms)
        bell = Doorbell(sleeper, "sglang-1", 0)
        assert (sleeper.timeout_ms, bell.address) == (then_ms, "")
        bell.quiet(1)
        bell.close()


def test_a_turn_answers_its_rings_and_leaves_those_that_came_later(sleeper: Sleeper) -> None:
    sleeper.ring(b"1", b"2", b"3")
    assert sleeper.wakes(60_000)
    sleeper.bell.quiet(2)
    sleeper.bell.quiet(2)  # a turn without a ring of its own
    assert sleeper.wakes(60_000), "ring 3 is for the next turn"
    sleeper.bell.quiet(3)
    assert not sleeper.wakes()


def test_a_ring_that_is_still_on_its_way_does_not_wake_the_rank_after_its_turn(sleeper: Sleeper) -> None:
    sleeper.ring(b"1")
    sleeper.bell.quiet(1)  # it need not have arrived
    assert not sleeper.wakes()


def test_a_ring_that_was_lost_is_waited_for_once(sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as short:
        short.setattr(turn, "RING_LIMIT_MS", 1)
        sleeper.bell.quiet(1)
    sleeper.ring(b"2")
    sleeper.bell.quiet(2)
    assert not sleeper.wakes()


@pytest.mark.parametrize("garbage", [b"", b"\x00\xff", b"-1", b"1.5", b"9" * 5000, "²".encode()])
def test_what_is_no_ring_is_discarded_with_the_next_ring(sleeper: Sleeper, garbage: bytes) -> None:
    sleeper.ring(garbage, b"1")
    assert sleeper.wakes(60_000)
    sleeper.bell.quiet(1)
    assert not sleeper.wakes()


def test_a_number_that_was_never_rung_answers_no_later_ring(sleeper: Sleeper) -> None:
    sleeper.ring(b"99", b"1", b"2")
    sleeper.bell.quiet(1)
    sleeper.bell.quiet(2)
    sleeper.ring(b"3")
    assert sleeper.wakes(60_000)
    sleeper.bell.quiet(3)
    assert not sleeper.wakes()


def test_rings_wait_for_a_bell_that_has_no_room_for_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk() as path:
        monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(path))
        with without_inodes(path):
            sleeper = Sleeper()
            sleeper.ring(b"1", b"2")
            sleeper.bell.quiet(1)  # the turn that comes although no ring could
        sleeper.bell.quiet(2)
        sleeper.ring(b"3")
        assert sleeper.wakes(60_000)
        sleeper.bell.quiet(3)
        assert not sleeper.wakes()
        sleeper.close()
