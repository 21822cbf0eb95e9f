"""Collectives between trainer ranks and workers: bytes, faults on either side, and groups that are made anew."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from inference_plugin.devices import DEVICES
from inference_plugin.net import addresses
from inference_plugin.transports import collective
from inference_plugin.transports.backends import BACKENDS, VARIABLE
from inference_plugin.transports.collective import CollectiveReceiver, Probe
from inference_plugin.transports.interfaces import INTERFACE, serve_store
from inference_plugin.transports.topology import Process
from inference_plugin.wire.errors import PeerLost, ProtocolError, SyncTimeout, TransportUnavailable, WeightwireError
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source
from tests.manager.trainer import Trainer
from tests.support.devices import LateDevice
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import Rig, kill
from trainer_adapters.sources.base import LocalSlice


class Watched(ShardSource):
    """A source that calls `then` when its second slice is asked for: in the middle of the broadcasts' making."""

    def __init__(self, seed: int, then: Any) -> None:
        super().__init__(checkpoint(seed))
        self.then = then

    def slices(self) -> Iterator[LocalSlice]:
        for i, item in enumerate(super().slices()):
            if i == 1:
                self.then()
            yield item


def test_another_host_is_refused_with_what_to_use_instead(directory: Path) -> None:
    with pytest.raises(TransportUnavailable, match="another host") as raised:
        CollectiveReceiver().check_probe(msgspec.msgpack.encode(Probe("elsewhere", False, "gloo", "")))
    assert "zmq" in raised.value.hint


def test_an_interface_that_only_the_trainer_names_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = msgspec.msgpack.encode(Probe("elsewhere", True, "gloo", ""))
    with pytest.raises(TransportUnavailable, match=f"this process has no {INTERFACE}"):
        CollectiveReceiver().check_probe(offered)
    monkeypatch.setenv(INTERFACE, "lo")
    CollectiveReceiver().check_probe(offered)


def test_a_store_listens_on_its_interface_alone_and_only_while_it_is_needed() -> None:
    with pytest.raises(TransportUnavailable, match="interface 'eth77' is unknown") as raised:
        serve_store("eth77")
    assert "lo" in raised.value.hint
    store, (address, port) = serve_store("lo")
    listening = [one.laddr for one in psutil.Process().net_connections() if one.status == "LISTEN"]
    assert [one.ip for one in listening if one.port == port] == [address] == ["127.0.0.1"]
    del store
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, port)).close()


def test_on_an_interface_that_both_sides_name_every_version_arrives(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERFACE, "lo")
    rigs = [start(tp=2, **{INTERFACE: "lo"}), start(**{INTERFACE: "lo"})]
    with SyncManager(transport="collective", timeout_s=60) as manager:
        for version in (1, 2):
            report = manager.update(source(version), version)
            assert [(r.status, r.transport) for r in report.replicas] == [("committed", "collective")] * 2
            assert all(holds(rig, version) for rig in rigs)
    assert not list(directory.rglob("collective-*"))


def test_a_device_that_trainer_and_engine_share_is_refused_where_the_backend_wants_two(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "two", dataclasses.replace(BACKENDS["gloo"], queues=True))
    monkeypatch.setitem(DEVICES, "cuda", device := LateDevice())
    with pytest.raises(
        TransportUnavailable, match="two can't broadcast from a trainer to an engine on the same device"
    ):
        CollectiveReceiver().check_probe(msgspec.msgpack.encode(Probe(addresses.here(), False, "two", device.uuid())))
    for fine in (
        Probe(addresses.here(), False, "two", "GPU-2"),
        Probe(addresses.here(), False, "gloo", device.uuid()),
    ):
        CollectiveReceiver().check_probe(msgspec.msgpack.encode(fine))


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "/etc/passwd"},
        {"name": "collective-1-1-a/../x"},
        {"senders": 0},
        {"timeout_s": 1e9},
        {"receivers": ()},
        {"receivers": (("here", 1),)},
        {"receivers": ((addresses.boot_id(), 1),)},
        {"store": ("10.0.0.1", 0)},
        {"store": ("a" * 65, 7777)},
    ],
)
def test_a_meeting_that_cannot_be_meant_is_refused_before_anything_is_opened(directory: Path, wrong: Any) -> None:
    here = Process(addresses.boot_id(), os.getpid())
    meeting = {
        "name": "collective-1-1-a",
        "receivers": (here,),
        "senders": 1,
        "timeout_s": 1.0,
        "backend": "gloo",
    } | wrong
    manifest = source(1).manifest()
    with pytest.raises(ProtocolError):
        CollectiveReceiver().open(manifest, msgspec.msgpack.encode(meeting), [manifest.whole(0)])
    assert not list(directory.rglob("collective-*"))


def test_what_a_killed_trainer_leaves_is_removed_by_the_next_reader(directory: Path) -> None:
    left = addresses.runtime_dir() / f"collective-{2**22 + 1}-1-abc.0"
    left.touch()
    addresses.discover()
    assert not left.exists()


@pytest.mark.parametrize("install", ["copy", "standby"])
def test_every_worker_of_every_replica_holds_each_version(start: Start, install: Any, directory: Path) -> None:
    rigs = [start(tp=2), start(tp=1)]
    with SyncManager(transport="collective", install=install, timeout_s=60) as manager:
        for version in (1, 2, 3):
            report = manager.update(source(version), version)
            assert [(r.status, r.transport) for r in report.replicas] == [("committed", "collective")] * 2
            assert all(holds(rig, version) for rig in rigs)
        assert len({r.digest for r in report.replicas}) == 1
    assert not list(directory.rglob("collective-*"))


def test_two_trainer_ranks_broadcast_what_each_holds(start: Start, directory: Path) -> None:
    rigs: list[Rig] = [start(tp=2), start(tp=1)]
    ranks = Trainer(directory, 2, [{"version": v} for v in (1, 2)], transport="collective")
    for number in range(2):
        assert all("ok" in ranks.step(rank, number) for rank in range(2))
    assert all(holds(rig, 2) for rig in rigs)


def test_the_trainer_s_own_groups_are_as_they_were(start: Start, directory: Path) -> None:
    rig = start(tp=2)
    ranks = Trainer(
        directory,
        2,
        [{"version": 1}, {"version": 2, "fault": "raise"}, {"version": 3}],
        transport="collective",
        sums=True,
    )
    for number, outcome in enumerate(("ok", "error", "ok")):
        seen = [ranks.step(rank, number) for rank in range(2)]
        assert [(outcome in s, s["sum"], s["groups"]) for s in seen] == [(True, 2.0, 1)] * 2
    assert holds(rig, 3)


def test_the_sender_alone_says_where_a_bucket_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = start(tp=2)
    counts = itertools.cycle([1, 3, 2])
    monkeypatch.setattr(
        collective.BroadcastBuffer, "has_room", lambda bucket, _: not bucket.pieces or len(bucket.pieces) < next(counts)
    )
    with SyncManager(transport="collective", timeout_s=60) as manager:
        manager.update(source(1), 1)
    assert holds(rig, 1)


@pytest.mark.parametrize(("chosen", "refused"), [("gloo", None), ("nccl", "needs a torch")])
def test_an_explicit_backend_is_taken_or_refused_with_those_there_are(
    start: Start, monkeypatch: pytest.MonkeyPatch, chosen: str, refused: str | None
) -> None:
    monkeypatch.setenv(VARIABLE, chosen)
    rig = start()
    with SyncManager(transport="collective", timeout_s=60) as manager:
        if refused is None:
            assert manager.update(source(1), 1).failed == ()
        else:
            with pytest.raises(
                TransportUnavailable, match=f"'{chosen}' can't be used here: .*{refused}.*usable here: gloo"
            ):
                manager.update(source(1), 1)
    assert holds(rig, 1 if refused is None else 0)


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_trainer_rank_lost_in_the_middle_is_a_typed_error_and_the_engines_keep_their_version(
    start: Start, directory: Path, fault: str
) -> None:
    rig = start(tp=2)
    ranks = Trainer(directory, 2, [{"version": 1}, {"version": 2, "fault": fault}], transport="collective")
    assert "ok" in ranks.step(0, 0)
    seen = ranks.step(0, 1)
    assert seen["error"] in ("WeightwireError", "PeerLost") and seen["side"] in ("trainer", "manager"), seen
    assert holds(rig, 1)
    with SyncManager(transport="collective", timeout_s=60) as manager:
        manager.update(source(3), 3)
    assert holds(rig, 3)


def test_a_worker_killed_in_the_middle_is_a_lost_peer_and_the_next_update_makes_groups_without_it(start: Start) -> None:
    survivor, lost = start(tp=2), start(tp=1)
    with SyncManager(transport="collective", timeout_s=60) as manager:
        manager.update(source(1), 1)
        with pytest.raises(WeightwireError) as raised:
            manager.update(Watched(2, lambda: kill(lost.worker_pid())), 2)
        assert isinstance(raised.value, PeerLost) and raised.value.phase == "stage"
        assert holds(survivor, 1)
        lost.end()
        assert [r.status for r in manager.update(source(3), 3).replicas] == ["committed"]
    assert holds(survivor, 3)


def test_a_worker_that_stalls_ends_the_update_by_its_deadline_and_takes_the_next_one(start: Start) -> None:
    rig, stalled = start(tp=1), start(tp=1)
    with SyncManager(transport="collective", timeout_s=60) as manager:
        manager.update(source(1), 1)
        manager.settings.timeout_s = 4
        with pytest.raises(WeightwireError) as raised:
            manager.update(Watched(2, lambda: os.kill(stalled.worker_pid(), signal.SIGSTOP)), 2)
        assert isinstance(raised.value, PeerLost | SyncTimeout)
        os.kill(stalled.worker_pid(), signal.SIGCONT)
        assert holds(rig, 1) and holds(stalled, 1)
        manager.settings.timeout_s = 60
        assert manager.update(source(3), 3).failed == ()
    assert holds(rig, 3) and holds(stalled, 3)
