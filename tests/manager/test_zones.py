"""Zones: trainer ranks write a worker's second set themselves, with one copy, and no late writer reaches what is served."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_plugin.wire.errors import CommitFailed, SyncTimeout
from inference_plugin.wire.reports import UpdateReport
from tests.manager.conftest import Start
from tests.manager.trainer import Trainer
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected
from tests.support.rig import Rig, eventually, stands_still
from trainer_adapters import LocalSlice

MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ (\d+) +/memfd:weightwire")


def source(seed: int, layers: int = 2) -> ShardSource:
    return ShardSource(checkpoint(seed, layers))


def holds(rig: Rig, seed: int) -> bool:
    return rig.peek() == digests_expected(checkpoint(seed, rig.layers), rig.tp, rig.layers)


def ways(report: UpdateReport) -> list[tuple[str, str, str]]:
    return [(replica.status, replica.transport, replica.install) for replica in report.replicas]


def mapped(pid: int, permissions: str) -> set[int]:
    """Inodes of our memory files that a process has mapped with these permissions."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(found[2]) for line in lines if (found := MAPPING.match(line)) and found[1] == permissions}


def held(pid: int) -> set[int]:
    """Inodes of our memory files that a process has open or mapped."""
    opened = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            opened |= {file.stat().st_ino} if is_ours(file) else set()
    return opened | mapped(pid, "rw-s") | mapped(pid, "r--s")


ZONE = [("committed", "zone", "standby")]


@pytest.mark.parametrize("tp", [1, 2])
def test_each_version_in_turn_lies_where_the_engine_computes_after_one_copy(start: Start, tp: int) -> None:
    rig = start(tp=tp)
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2, 3, 4, 5):
            report = manager.update(source(version), version)
            assert holds(rig, version) and ways(report) == ZONE and report.copies_per_byte == 1
            assert manager.verify(source(version)).ok


def test_two_zones_are_used_in_turn_and_the_worker_holds_no_more(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2):
            manager.update(source(version), version)
        zones = held(rig.worker_pid())
        assert len(zones) == 2
        for version in (3, 4, 5):
            manager.update(source(version), version)
            assert held(rig.worker_pid()) == zones


class Watched(ShardSource):
    """Calls `look` once some slices were written."""

    def __init__(self, seed: int, look: Any) -> None:
        super().__init__(checkpoint(seed))
        self._look = look

    def slices(self) -> Iterator[LocalSlice]:
        for i, item in enumerate(super().slices()):
            if i == 5:
                self._look()
            yield item


def test_a_rank_s_writable_mapping_ends_before_the_update_goes_on(start: Start) -> None:
    """So a later write of the trainer faults in the trainer."""
    rig = start()
    during: list[set[int]] = []
    with SyncManager(timeout_s=60) as manager:
        before = mapped(os.getpid(), "rw-s")
        after: list[set[int]] = []
        manager.on("staged", lambda **_: after.append(mapped(os.getpid(), "rw-s")))
        for version in (1, 2, 3):
            during.clear()
            manager.update(Watched(version, lambda: during.append(mapped(os.getpid(), "rw-s"))), version)
            (zones,) = during
            assert len(zones - before) == 1 + (version == 1), "the zone, and with the first update the probe"
            assert zones - after[-1] <= held(rig.worker_pid())
            assert not after[-1] & mapped(rig.worker_pid(), "rw-s")
            before = mapped(os.getpid(), "rw-s")


def test_a_rank_that_was_stopped_while_it_wrote_writes_into_nothing_when_it_wakes(
    start: Start, directory: Path, trainer: Any
) -> None:
    rig = start()
    stopped = {"version": 3, "fault": "stop", "timeout_s": 8}
    # Rank 0 stays: what a trainer that is gone had kept is freed.
    ranks: Trainer = trainer(2, [{"version": 1}, {"version": 2}, stopped, {"wait": "the end", "only": [0]}])
    eventually(lambda: (ranks.out / "rank0.step1").exists(), "the update before")
    assert holds(rig, 2)
    late = ranks.pids[1]
    eventually(lambda: stands_still(late), "a rank that stands still in its writing")
    (reached,) = mapped(late, "rw-s") & held(rig.worker_pid())
    assert ranks.step(0, 2)["error"] == "SyncTimeout" and holds(rig, 2)
    with SyncManager(timeout_s=60) as manager:
        for version in (4, 5, 6):
            assert ways(manager.update(source(version), version)) == ZONE
            assert reached not in held(rig.worker_pid()), "what it may still write into is not used again"
        os.kill(late, signal.SIGCONT)
        eventually(lambda: reached not in mapped(late, "rw-s"), "the end of its writing")
        assert holds(rig, 6) and manager.verify(source(6)).ok


def test_an_update_that_came_to_nothing_leaves_a_zone_that_is_never_used_again(start: Start) -> None:
    rig = start(tp=2)
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)

        def fails() -> None:
            raise SyncTimeout("the source stalls")

        used: list[set[int]] = []
        own = mapped(os.getpid(), "rw-s")
        with pytest.raises(SyncTimeout, match="the source stalls"):
            manager.update(Watched(2, lambda: (used.append(mapped(os.getpid(), "rw-s") - own), fails())), 2)
        assert holds(rig, 1) and len(used[0]) == 2
        for version in (3, 4, 5):
            manager.update(source(version), version)
            assert holds(rig, version)
            assert not used[0] & (held(rig.worker_pid(0)) | held(rig.worker_pid(1)))


def test_an_installation_that_fails_on_one_rank_is_swapped_back_on_all(start: Start) -> None:
    rig = start(tp=2)
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2):
            manager.update(source(version), version)
        rig.ask("fail", step="install", rank=1)
        with pytest.raises(CommitFailed, match="undone on all ranks"):
            manager.update(source(3), 3)
        assert holds(rig, 2)
        for version in (4, 5, 6):
            assert ways(manager.update(source(version), version)) == ZONE and holds(rig, version)


def test_two_replicas_of_a_host_share_a_segment_and_one_that_is_left_gets_a_zone(start: Start) -> None:
    stays, leaves = start(), start()
    with SyncManager(timeout_s=60) as manager:
        report = manager.update(source(1), 1)
        assert ways(report) == [("committed", "shm", "standby")] * 2
        leaves.end()
        eventually(
            lambda: [each.replica for each in manager.replicas() if each.state != "lost"] == [stays.replica], "it"
        )
        for version in (2, 3, 4):
            assert ways(manager.update(source(version), version)) == ZONE and holds(stays, version)
        again = start()
        eventually(lambda: caught_up(manager, again, 4), "the replica that is there again")
        report = manager.update(source(5), 5)
        assert ways(report) == [("committed", "shm", "standby")] * 2 and holds(again, 5) and holds(stays, 5)


def test_an_engine_that_overwrites_its_weights_takes_a_segment(start: Start) -> None:
    rig = start()
    with SyncManager(install="copy", timeout_s=60) as manager:
        assert ways(manager.update(source(1), 1)) == [("committed", "shm", "copy")] and holds(rig, 1)


def caught_up(manager: SyncManager, rig: Rig, version: int) -> bool:
    return any((one.replica, one.state, one.version) == (rig.replica, "current", version) for one in manager.replicas())


def test_a_replica_that_joins_is_caught_up_from_the_zones_of_the_one_that_is_there(start: Start) -> None:
    there = start(tp=2)
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2):
            assert ways(manager.update(source(version), version)) == ZONE
        joins = start()
        eventually(lambda: caught_up(manager, joins, 2), "the replica that joined")
        assert holds(joins, 2) and holds(there, 2)


def test_a_replica_that_was_killed_is_caught_up_from_its_own_zones_when_it_is_there_again(start: Start) -> None:
    dies = start()
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2, 3):
            manager.update(source(version), version)
        dies.end()
        again = start()
        eventually(lambda: caught_up(manager, again, 3), "the replica that is there again")
        assert holds(again, 3)
        assert ways(manager.update(source(4), 4)) == ZONE and holds(again, 4)


def test_bytes_of_a_kept_zone_that_are_no_longer_what_the_trainer_wrote_are_not_installed(start: Start) -> None:
    dies = start()
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)
        zones = held(dies.worker_pid())
        dies.end()
        files = [file for file in Path("/proc/self/fd").iterdir() if file.is_file() and is_ours(file)]
        kept = next(file for file in files if file.stat().st_ino in zones)
        with kept.open("r+b") as zone:
            first = zone.read(1)
            zone.seek(0)
            zone.write(bytes([first[0] ^ 1]))
        again = start()
        words = "is not what the trainer sent"
        eventually(lambda: words in {s.replica: s.reason for s in manager.replicas()}.get(again.replica, ""), words)
        assert holds(again, 0)
        assert ways(manager.update(source(2), 2)) == ZONE and holds(again, 2)


def is_ours(file: Path) -> bool:
    return str(file.readlink()).startswith("/memfd:weightwire")


def test_several_replicas_of_a_host_have_zones_where_these_are_asked_for(start: Start) -> None:
    rigs = [start(), start(tp=2)]
    with SyncManager(timeout_s=60, transport="zone", install="standby") as manager:
        for version in (1, 2, 3):
            assert ways(manager.update(source(version), version)) == ZONE * 2
            assert all(holds(rig, version) for rig in rigs)
