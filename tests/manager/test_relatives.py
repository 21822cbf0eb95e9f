"""Ways in which a promise was broken once, beside those of the other files: docs/assurance.md lists them by promise."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from inference_plugin.net import addresses
from inference_plugin.plugins import hookimpl
from inference_plugin.wire.errors import ManifestMismatch, ProtocolError, TornReplica, VersionConflict
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source
from tests.manager.test_overlap import half
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected
from tests.support.rig import Rig, eventually
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.update import machine_io

HERE = "tests.manager.test_relatives:"


def is_one_version(rig: Rig, *seeds: int) -> bool:
    return any(rig.peek() == digests_expected(checkpoint(seed), rig.tp) for seed in seeds)


def tear(rig: Rig, manager: SyncManager) -> None:
    manager.update(source(1), 1)
    rig.ask("fault", rank=1, step="install")
    rig.ask("fault", rank=0, step="undo")
    with pytest.raises(TornReplica):
        manager.update(source(2), 2)


# --- P1: one version --------------------------------------------------------------------------------------------------


def test_a_torn_group_is_not_healed_by_an_update_of_a_part_of_it(start: Start) -> None:
    rig = start(tp=2)
    with SyncManager(timeout_s=60) as manager:
        tear(rig, manager)
    norm = ShardSource({"norm.weight": checkpoint(3)["norm.weight"]})
    with SyncManager(partial=True, timeout_s=60) as part, pytest.raises(TornReplica):
        part.update(norm, 3)
    assert rig.ask("state")["refusal"] is not None


def test_the_way_back_of_a_replica_that_was_away_is_not_written_over(start: Start) -> None:
    here, away = start(), start(tp=2)
    card = addresses.runtime_dir() / f"{away.replica}.card"
    hidden = card.with_name("hidden")
    with SyncManager(timeout_s=60, install="copy", transport="shm", catch_up="never") as manager:
        manager.update(source(1), 1)
        os.kill(away.pid, signal.SIGSTOP)  # or it would write its card again
        card.rename(hidden)  # a directory that was cleaned up and made again, or a link that was cut
        for version in (2, 3):
            assert [r.replica for r in manager.update(source(version), version).replicas] == [here.replica]
        hidden.rename(card)
        os.kill(away.pid, signal.SIGCONT)
        away.ask("fault", rank=1, step="install")
        (failed,) = manager.update(source(4), 4).failed
    assert failed.replica == away.replica
    assert away.ask("state")["refusal"] is not None or holds(away, 1)


def test_closing_a_group_from_elsewhere_does_not_tear_a_commit_under_way(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as manager, SyncManager(timeout_s=60) as other:
        manager.update(source(1), 1)
        manager.settings.in_flight = "drain"
        pending = manager.update_async(source(2), 2)
        eventually(lambda: "pause:drain" in rig.ask("state")["log"], "the pause")
        try:
            with pytest.raises(VersionConflict, match="being committed"):
                other.close_group()
        finally:
            rig.ask("drained")
        assert pending.result(600).failed == ()
    assert holds(rig, 2)


def test_a_torn_replica_is_healed_by_the_whole_model_under_another_name(start: Start) -> None:
    rig = start(tp=2)
    with SyncManager(timeout_s=60) as manager:
        tear(rig, manager)
        manager.close_group()
    with SyncManager("other", timeout_s=60) as other:
        other.update(source(3), 3)
    assert holds(rig, 3)
    assert rig.ask("state")["refusal"] is None


def test_a_torn_replica_is_of_no_version(start: Start) -> None:
    rig = start(tp=2)
    with SyncManager(timeout_s=60) as manager:
        tear(rig, manager)
        assert manager.versions() == {rig.replica: None}
        (replica,) = manager.replicas()
        assert (replica.state, replica.version) == ("torn", None)


def test_a_trainer_that_starts_again_goes_on_behind_the_version_that_a_torn_replica_served(start: Start) -> None:
    rig = start(tp=2)
    with SyncManager(timeout_s=60) as manager:
        tear(rig, manager)
    with SyncManager(timeout_s=60) as again:
        assert again.update(source(3)).version == 2
    assert holds(rig, 3)


# --- P2: what the trainer meant is what the engine holds --------------------------------------------------------------


def test_a_part_is_no_whole_because_it_was_opened_as_a_part_before(start: Start) -> None:
    rig = start()
    with SyncManager(partial=True, timeout_s=60) as part:
        part.update(half(1, layers=True), 1)
    with SyncManager(timeout_s=60) as whole, pytest.raises(ManifestMismatch, match="no tensor of the manifest fills"):
        whole.update(half(2, layers=True), 2)
    assert not is_one_version(rig, 2)


def test_two_trainers_with_one_version_number_and_other_weights_are_told_apart(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as one, SyncManager(timeout_s=60) as other:
        one.update(source(1), 7)
        with pytest.raises(VersionConflict, match="served with other weights") as told:
            other.update(source(2), 7)
        assert told.value.phase == "seal"
    assert holds(rig, 1)


# --- P3: no wait without a deadline, one part's trouble is its own ----------------------------------------------------


def test_a_listener_that_takes_longer_than_the_lease_costs_no_replica(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60, lease_s=6) as manager:
        manager.on("staged", lambda **_: time.sleep(14))
        assert manager.update(source(1), 1).failed == ()
    assert holds(rig, 1)


def test_a_card_that_cannot_be_read_costs_nobody_else_the_update(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start()
    card = addresses.runtime_dir() / "plain-1-abc.card"
    card.write_bytes(b"")  # as a power cut leaves it, or another version
    with SyncManager(timeout_s=60) as manager:
        assert manager.update(source(1), 1).failed == ()
    assert caplog.text.count(f"the card {card} can't be read, its replica is left out") == 1
    assert holds(rig, 1)


class Gathering(ShardSource):
    """Its second slice takes longer than the lease, as one that is gathered or sent far away does."""

    def slices(self) -> Iterator[LocalSlice]:
        for i, item in enumerate(super().slices()):
            if i == 1:
                time.sleep(14)
            yield item


def test_a_slice_that_takes_longer_than_the_lease_costs_no_replica(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60, lease_s=6) as manager:
        assert manager.update(Gathering(checkpoint(1)), 1).failed == ()
    assert holds(rig, 1)


def test_a_manager_in_a_forked_process_says_so_instead_of_waiting(start: Start) -> None:
    start()
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)
        if (pid := os.fork()) == 0:
            signal.alarm(300)
            try:
                manager.update(source(2), 2)
            except ProtocolError:  # after a wait it would be a SyncTimeout
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# --- P8: a committed update is never reported as failed ---------------------------------------------------------------


class SlowInstallation:
    @hookimpl
    def weightwire_installing(self, step: str) -> None:
        if step == "install":
            threading.Event().wait(16)


class FailingListener:
    @hookimpl
    def weightwire_state_changed(self, state: str) -> None:
        if state == "idle":
            raise RuntimeError("a listener's own trouble")


slow_installation = SlowInstallation()
failing_listener = FailingListener()


def test_an_installation_that_ends_after_the_deadline_is_not_reported_as_failed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_io, "INSTALLING_S", 60.0)  # four seconds pass soon on a busy machine
    rig = start(WEIGHTWIRE_PLUGINS=f"{HERE}slow_installation")
    with SyncManager(timeout_s=15) as manager:
        report = manager.update(source(1), 1)
    assert report.failed == ()
    assert holds(rig, 1)


def test_a_listener_that_raises_after_the_installation_does_not_tear_the_replica(start: Start) -> None:
    rig = start(WEIGHTWIRE_PLUGINS=f"{HERE}failing_listener")
    with SyncManager(timeout_s=60) as manager:
        assert manager.update(source(1), 1).failed == ()
    assert rig.ask("state")["refusal"] is None
