"""Workers that pass buckets on: bytes, what leaves the trainer, and relays that are killed or stalled in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inference_plugin.net import curve
from inference_plugin.net.channel import Channel
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import PeerLost, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import OpenGroup
from inference_plugin.wire.reports import UpdateReport
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source
from tests.manager.trainer import Trainer
from tests.support.managers import SyncManager
from tests.support.plain_engine import PlainModel, ShardSource, checkpoint, manifest_of
from tests.support.rig import Rig, kill
from trainer_adapters.settings import Quorum
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.update import transaction

NBYTES = manifest_of(checkpoint(0)).nbytes
SILENCE_S = 3.0
"""Where one stalls, or others are to notice that nobody feeds them."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "ABORT_TIMEOUT_S", 1.0)  # one that is stalled doesn't answer


class Watched(ShardSource):
    """A source that calls `then` in the middle of its slices."""

    def __init__(self, seed: int, then: Any) -> None:
        super().__init__(checkpoint(seed))
        self.then = then

    def slices(self) -> Iterator[LocalSlice]:
        slices = list(super().slices())
        for i, item in enumerate(slices):
            if i == len(slices) // 2:
                self.then()
            yield item


def replicas(start: Start, count: int, **options: Any) -> list[Rig]:
    """In the order in which a chain goes through them."""
    rigs = [start(**options) for _ in range(count)]
    return sorted(rigs, key=lambda rig: rig.replica)


def manager(fan_out: Any, *, silence_s: float | None = None, **options: Any) -> SyncManager:
    config = Config().but(silence_s=silence_s)
    one = SyncManager(transport="zmq", fan_out=fan_out, config=config, **{"timeout_s": 60, **options})
    msgspec.structs.force_setattr(one.settings.config, "bucket_bytes", 1600)
    return one


def failed(report: UpdateReport) -> dict[str, WeightwireError]:
    return {r.replica: WeightwireError.of(r.error) for r in report.failed if r.error is not None}


@pytest.mark.parametrize("fan_out", ["chain", "tree"])
def test_every_rank_of_every_replica_holds_each_version(start: Start, fan_out: Any) -> None:
    rigs = [*replicas(start, 4, tp=2), start(tp=1)]
    with manager(fan_out) as one:
        for version in (1, 2, 3):
            report = one.update(source(version), version)
            assert [r.status for r in report.replicas] == ["committed"] * 5
            assert all(holds(rig, version) for rig in rigs)
        assert len({r.digest for r in report.replicas}) == 1
        assert one.verify(source(3)).ok


@pytest.mark.parametrize(("fan_out", "copies"), [("direct", (2, 5)), ("chain", (1, 1)), ("tree", (2, 2))])
def test_what_leaves_the_trainer_does_not_depend_on_the_number_of_replicas(
    start: Start, fan_out: Any, copies: tuple[int, int]
) -> None:
    rigs = replicas(start, 2)
    with manager(fan_out) as one:
        sent = [one.update(source(1), 1).egress_bytes]
        rigs += replicas(start, 3)
        one.update(source(2), 2)
        report = one.update(source(3), 3)
        sent.append(report.egress_bytes)
    assert [nbytes / NBYTES for nbytes in sent] == list(copies)
    assert all(holds(rig, 3) for rig in rigs)


def test_each_rank_is_sent_its_own_part_of_a_tensor_and_nothing_of_the_others(start: Start) -> None:
    rig = start(tp=2)
    with manager("direct") as one:
        sent = one.update(source(1), 1).egress_bytes
    models = [PlainModel(2, rank, 2) for rank in range(2)]
    assert sent == sum(p.numel() * p.itemsize for model in models for p in model.parameters()) < 2 * NBYTES
    assert holds(rig, 1)


def test_auto_sends_directly_to_few_and_by_a_tree_to_many(start: Start) -> None:
    rigs = replicas(start, 3)
    with manager("auto") as one:
        assert one.update(source(1), 1).egress_bytes == 3 * NBYTES
        rigs += replicas(start, 1)
        assert one.update(source(2), 2).egress_bytes == 2 * NBYTES
    assert all(holds(rig, 2) for rig in rigs)


def test_two_trainer_ranks_send_through_the_same_tree(start: Start, directory: Path) -> None:
    rigs = [*replicas(start, 3, tp=2), start(tp=1)]
    ranks = Trainer(directory, 2, [{"version": v} for v in (1, 2)], transport="zmq", fan_out="tree")
    for number in range(2):
        assert all("ok" in ranks.step(rank, number) for rank in range(2))
    assert all(holds(rig, 2) for rig in rigs)


def test_over_tcp_workers_pass_on_with_the_jobs_key(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve.make_key(directory / "key")
    monkeypatch.setenv(curve.VARIABLE, str(directory / "key"))
    environment = {curve.VARIABLE: str(directory / "key"), "WEIGHTWIRE_LISTEN": "tcp://127.0.0.1:*"}
    rigs = replicas(start, 4, **environment)
    with manager("chain") as one:
        report = one.update(source(1), 1)
        assert (report.failed, report.egress_bytes) == ((), NBYTES)
    assert all(holds(rig, 1) for rig in rigs)


@pytest.mark.parametrize(("fan_out", "position"), [("chain", 1), ("tree", 0), ("tree", 3)])
def test_a_relay_killed_in_the_middle_costs_its_replica_and_nobody_below_it(
    start: Start, fan_out: Any, position: int
) -> None:
    rigs = replicas(start, 6)
    with manager(fan_out, silence_s=SILENCE_S) as one:
        one.update(source(1), 1)
        lost = rigs.pop(position)
        report = one.update(Watched(2, lambda: kill(lost.worker_pid())), 2)
        assert {name: type(error) for name, error in failed(report).items()} == {lost.replica: PeerLost}
        assert all(holds(rig, 2) for rig in rigs)
        lost.end()
        assert one.update(source(3), 3).failed == ()
    assert all(holds(rig, 3) for rig in rigs)


def test_a_replica_that_drops_out_by_another_of_its_ranks_leaves_nobody_below_it_behind(start: Start) -> None:
    """Its first worker lives and passed buckets on, but its transaction is over."""
    rigs = replicas(start, 4, tp=2)
    with manager("chain", silence_s=SILENCE_S) as one:
        one.update(source(1), 1)
        lost = rigs.pop(1)
        report = one.update(Watched(2, lambda: kill(lost.worker_pid(1))), 2)
        assert {name: type(error) for name, error in failed(report).items()} == {lost.replica: PeerLost}
    assert all(holds(rig, 2) for rig in rigs)


def test_a_chain_without_its_first_worker_is_lost_at_once_for_this_update(start: Start) -> None:
    """Nobody else has what the trainer sent."""
    first, *others = replicas(start, 3, tp=2)
    apart = start(tp=1)
    with manager("chain", silence_s=SILENCE_S, timeout_s=600) as one:
        one.update(source(1), 1)
        report = one.update(Watched(2, lambda: kill(first.worker_pid())), 2)
        errors = failed(report)
        assert set(errors) == {rig.replica for rig in (first, *others)}
        for rig in others:
            assert isinstance(errors[rig.replica], PeerLost)
            assert f"{first.replica}, which was to feed it, is lost" in errors[rig.replica].message
        assert holds(apart, 2) and all(holds(rig, 1) for rig in others)
        first.end()
        assert one.update(source(3), 3).failed == ()
    assert all(holds(rig, 3) for rig in (apart, *others))


@pytest.mark.parametrize(("fan_out", "position"), [("chain", 1), ("tree", 0)])
def test_a_relay_that_stalls_is_stepped_over_and_takes_the_next_update(
    start: Start, fan_out: Any, position: int
) -> None:
    rigs = replicas(start, 4)
    stalled, others = rigs[position], rigs[:position] + rigs[position + 1 :]
    with manager(fan_out, silence_s=SILENCE_S, timeout_s=600) as one:
        one.update(source(1), 1)
        one.settings.stragglers = Quorum(3)
        report = one.update(Watched(2, lambda: os.kill(stalled.worker_pid(), signal.SIGSTOP)), 2)
        os.kill(stalled.worker_pid(), signal.SIGCONT)
        assert {name: type(error) for name, error in failed(report).items()} == {stalled.replica: SyncTimeout}
        assert all(holds(rig, 2) for rig in others) and holds(stalled, 1)
        one.settings.stragglers = "report"
        assert one.update(source(3), 3).failed == ()
    assert all(holds(rig, 3) for rig in rigs)


def test_a_worker_at_the_end_that_stalls_holds_up_neither_the_trainer_nor_the_commit(start: Start) -> None:
    *others, last = replicas(start, 4)
    with manager("chain", silence_s=SILENCE_S, timeout_s=600) as one:
        one.update(source(1), 1)
        one.settings.stragglers = Quorum(3)
        report = one.update(Watched(2, lambda: os.kill(last.worker_pid(), signal.SIGSTOP)), 2)
        os.kill(last.worker_pid(), signal.SIGCONT)
        assert list(failed(report)) == [last.replica]
        assert all(holds(rig, 2) for rig in others) and holds(last, 1)


@pytest.mark.parametrize("fan_out", ["chain", "tree"])
def test_a_relay_killed_after_the_trainer_has_written_is_made_good_by_whoever_has_its_bytes(
    start: Start, fan_out: Any
) -> None:
    rigs = [*replicas(start, 6), start(tp=2)]
    lost = rigs.pop(0)
    with manager(fan_out, silence_s=SILENCE_S) as one:
        one.update(source(1), 1)
        one.on("staged", lambda **_: kill(lost.worker_pid()))
        report = one.update(source(2), 2)
        errors = failed(report)
        assert isinstance(errors.pop(lost.replica), PeerLost)
        if fan_out == "tree":
            assert errors == {}
        assert all(isinstance(error, PeerLost) for error in errors.values())  # of a chain, those that it hadn't reached
    assert all(holds(rig, 1 if rig.replica in errors else 2) for rig in rigs)


def test_a_manifest_is_encoded_once_for_all_replicas_that_open_the_group_by_one_transport(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 tensors take rank 0 2 ms, for 512 replicas over a second."""
    rigs = [start(), start(tp=2)]
    sent: list[OpenGroup] = []
    send = Channel.send

    def noted(channel: Channel, body: Any, payload: Any = None) -> None:
        if isinstance(body, OpenGroup):
            sent.append(body)
        send(channel, body, payload)

    monkeypatch.setattr(Channel, "send", noted)
    with SyncManager(timeout_s=60, transport="shm") as manager:
        manager.update(ShardSource(checkpoint(1)), 1)
    assert all(holds(rig, 1) for rig in rigs)
    assert len(sent) == 3 and len({id(body) for body in sent}) == 1, "the codec keeps the bytes of a body"
