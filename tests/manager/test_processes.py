"""Replicas and trainers that know each other's processes: by pid and start, with a pidfd and without one; and the runtime
directory in which they find each other, when somebody removes it."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel
from inference_plugin.net.processes import start_ticks
from inference_plugin.wire.errors import PeerLost
from inference_plugin.wire.messages import Pause, Sender, Stands
from tests.manager.conftest import Start
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected
from tests.support.rig import Rig, eventually, fork, kill
from trainer_adapters.fleet.registry import Registry

NO_PIDFD = ["EPERM", "EMFILE", "ENOSYS"]


def holds(rig: Rig, seed: int) -> bool:
    return rig.peek() == digests_expected(checkpoint(seed), rig.tp)


def state(rig: Rig) -> str:
    return next(card.state for card in addresses.discover() if card.replica == rig.replica)


@pytest.mark.parametrize("code", NO_PIDFD)
def test_without_pidfds_updates_commit_and_the_death_of_a_rank_is_noticed(
    start: Start, directory: Path, code: str
) -> None:
    """The longest that anybody waits for the news is `processes.LOOK_EVERY_S`, not the 600 s of the operation."""
    environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory), "WEIGHTWIRE_TEST_NO_PIDFD": code}
    rig = start(tp=2, WEIGHTWIRE_TEST_NO_PIDFD=code)
    out = directory / "ranks"
    out.mkdir()
    steps = [{"version": 1}, {"version": 2, "fault": "kill"}]
    options = {"timeout_s": 600}
    pids = [
        fork(
            "tests.manager.ranks:one_rank",
            environment,
            rank=rank,
            world=2,
            directory=str(out),
            steps=steps,
            options=options,
        )
        for rank in range(2)
    ]

    def step(number: int) -> dict[str, Any]:
        path = out / f"rank0.step{number}"
        seen: dict[str, Any] = json.loads(eventually(lambda: path.exists() and path.read_text(), path.name))
        return seen

    assert "error" not in step(0) or step(0)["error"] is None, step(0)
    assert holds(rig, 1)
    seen = step(1)
    assert (seen["error"], seen["rank"]) == ("PeerLost", 1) and "trainer rank 1's process ended" in seen["text"]
    assert holds(rig, 1)
    kill(pids[0])


@pytest.mark.parametrize("code", NO_PIDFD)
def test_without_pidfds_a_pause_stands_while_its_manager_lives_and_ends_with_it(
    start: Start, directory: Path, tmp_path: Path, code: str
) -> None:
    environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory), "WEIGHTWIRE_TEST_NO_PIDFD": code}
    rig = start(WEIGHTWIRE_TEST_NO_PIDFD=code)
    ready = tmp_path / "ready"
    pausing = fork("tests.manager.test_pausing:pause_and_wait", environment, ready=str(ready), lease_s=600, level=0)
    eventually(ready.exists, "the pause")
    looked_s = time.monotonic() + 1.2  # the coordinator has looked twice by then
    while time.monotonic() < looked_s:
        assert state(rig) == "paused"
        time.sleep(0.05)
    kill(pausing)
    eventually(lambda: state(rig) == "serving", "the replica to go on")


def test_a_pause_ends_when_the_pid_of_its_manager_is_another_processs(start: Start) -> None:
    """As the coordinator sees it: a process with that pid runs, and started later than the manager did."""
    rig = start()
    gone = Sender("s", os.getpid(), addresses.boot_id(), start_ticks() - 1)
    with Channel(rig.card.address) as coordinator:
        assert coordinator.request(Pause(gone, 600.0), Stands, timeout_s=60).state == "paused"
    eventually(lambda: state(rig) == "serving", "the replica to go on, long before its lease ends")


def test_a_replica_whose_pid_is_another_processs_is_no_replica(start: Start) -> None:
    rig = start()
    stale = msgspec.structs.replace(rig.card, start_ticks=rig.card.start_ticks - 1)
    assert rig.card.start_ticks == start_ticks(rig.pid) and rig.card.workers[0].start_ticks == start_ticks(
        rig.worker_pid()
    )
    addresses.write_card(stale)
    registry = Registry()
    try:
        assert stale not in registry.cards(), "the living one may have written its own card by now"
    finally:
        registry.close()
    eventually(lambda: [card.replica for card in addresses.discover()] == [rig.replica], "the living one's own card")


def test_a_worker_whose_pid_is_another_processs_is_lost_at_once(start: Start) -> None:
    rig = start()
    (worker,) = rig.card.workers
    reused = msgspec.structs.replace(worker, start_ticks=worker.start_ticks - 1)
    addresses.write_card(msgspec.structs.replace(rig.card, workers=(reused,)))
    with SyncManager(timeout_s=600) as manager, pytest.raises(PeerLost, match="is gone"):
        manager.update(ShardSource(checkpoint(1)), 1)


def test_a_removed_runtime_directory_is_made_again_and_replicas_and_managers_find_each_other(
    start: Start, directory: Path
) -> None:
    """Nobody waits longer than `listening.MEND_EVERY_S` for it."""
    rig = start(tp=2)
    with SyncManager(timeout_s=60) as manager:
        manager.update(ShardSource(checkpoint(1)), 1)
        job = addresses.runtime_dir()
        eventually(lambda: _removed(job), "the end of the directory")
        eventually(lambda: [card.replica for card in addresses.discover()] == [rig.replica], "the card")
        names = {"f", "0", "1"}
        eventually(
            lambda: all((addresses.runtime_dir() / f"{rig.replica}.{name}").is_socket() for name in names),
            "the sockets",
        )
        assert (addresses.runtime_dir().stat().st_mode & 0o777) == 0o700
        manager.update(ShardSource(checkpoint(2)), 2)
        assert holds(rig, 2)
        eventually(lambda: addresses.local_registries(), "the manager's own socket")
        later = start()
        there = {rig.replica, later.replica}
        eventually(lambda: {one.replica for one in manager.replicas()} == there, "a replica that came later")
    with SyncManager(timeout_s=60) as another:  # over sockets that were bound anew
        assert another.update(ShardSource(checkpoint(3)), 3).failed == ()
    assert holds(rig, 3) and holds(later, 3)
    rig.ask("stop")
    eventually(
        lambda: not list(addresses.runtime_dir().glob(f"{rig.replica}.*")), "nothing of the one that was stopped"
    )


def test_an_update_right_after_the_runtime_directory_was_removed_waits_for_the_replicas_to_make_it_again(
    start: Start, directory: Path
) -> None:
    rig = start()
    job = addresses.runtime_dir()
    with SyncManager(timeout_s=60) as manager:
        for version in range(1, 6):
            manager.update(ShardSource(checkpoint(version)), version)
            eventually(lambda: _removed(job), "the end of the directory")
        assert manager.verify(ShardSource(checkpoint(5))).ok
        assert holds(rig, 5)
        kill(rig.pid)
        with pytest.raises(PeerLost, match="no replica of job 'default' runs"):
            manager.update(ShardSource(checkpoint(6)), 6)


def _removed(directory: Path) -> bool:
    shutil.rmtree(directory, ignore_errors=True)  # the replica may be writing into it
    return not directory.exists()


def _replaced_by_a_file(directory: Path) -> bool:
    """Whether this put a file in the directory's place before the replica made the directory again."""
    if not _removed(directory):
        return False
    try:
        directory.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def test_a_replica_finds_room_again_after_its_directory_could_not_be_made(start: Start, directory: Path) -> None:
    rig = start()
    eventually(lambda: _replaced_by_a_file(directory), "a file where the directory was")
    time.sleep(2.5)  # whoever looks every `MEND_EVERY_S` has met it
    directory.unlink()
    directory.mkdir(mode=0o700, exist_ok=True)  # the replica may have been first
    eventually(lambda: [card.replica for card in addresses.discover()] == [rig.replica], "the card")
    with SyncManager(timeout_s=60) as manager:
        eventually(lambda: (addresses.runtime_dir() / f"{rig.replica}.0").is_socket(), "the worker's socket")
        eventually(lambda: (addresses.runtime_dir() / f"{rig.replica}.f").is_socket(), "the coordinator's socket")
        assert manager.update(ShardSource(checkpoint(1)), 1).failed == ()
