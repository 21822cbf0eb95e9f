"""The state machine of a group, request by request, over a real socket."""

from __future__ import annotations

import gc
import signal
import threading
from pathlib import Path

import pytest
import torch

from inference_plugin.net import addresses
from inference_plugin.wire.errors import (
    CommitFailed,
    DigestMismatch,
    ManifestMismatch,
    ProtocolError,
    SyncTimeout,
    TornReplica,
    TransportUnavailable,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.messages import Begun, CloseGroup, Done, Release
from tests.support.rig import eventually, fork, kill
from tests.support.worker import KeepingInstaller, Worker
from tests.transports.cases import assert_equal_bytes
from tests.worker.driver import MANIFEST, Driver, weights


def test_an_update_goes_through_its_states_to_the_new_version(worker: Worker, trainer: Driver) -> None:
    opened = trainer.open()
    assert opened.needs == (MANIFEST.whole(0), MANIFEST.whole(1))
    states = [worker.status().state]
    assert trainer.begin("t1", 3) == Begun(already=False)
    states.append(worker.status().state)
    trainer.write(weights(1))
    sealed = trainer.seal_fully("t1")
    states.append(worker.status().state)
    done = worker.commit("t1", 3)
    states.append(worker.status().state)
    assert states == ["idle", "receiving", "sealed", "idle"]
    assert (done.version, done.rank) == (3, 0)
    assert (worker.status().version, worker.status().digest) == (3, sealed.digest)
    assert sealed.checked_bytes == MANIFEST.nbytes
    assert_equal_bytes(worker.installer.installed, weights(1))


def test_the_digest_is_of_the_whole_group_and_equal_where_the_bytes_are(worker: Worker, trainer: Driver) -> None:
    trainer.open()
    digests = []
    for version, seed in ((1, 1), (2, 1), (3, 2)):
        digests.append(trainer.update(f"t{version}", version, weights(seed)).digest)
        worker.commit(f"t{version}", version)
    assert digests[0] == digests[1] != digests[2]


# --- repeated, late and out of order ----------------------------------------------------------------------------------


def test_every_request_may_come_again_and_is_applied_once(worker: Worker, trainer: Driver) -> None:
    first = trainer.open()
    assert trainer.open() == first
    assert worker.installer.calls == ["open"]
    trainer.begin("t1", 1)
    assert trainer.begin("t1", 1) == Begun(already=False)
    trainer.write(weights(1))
    assert trainer.renew("t1") == trainer.renew("t1") == Done()
    sealed = trainer.seal_fully("t1")
    assert trainer.seal("t1") == sealed
    assert trainer.begin("t1", 1) == Begun(already=False)
    assert worker.status().state == "sealed"
    committed = worker.commit("t1", 1)
    assert worker.commit("t1", 1) == committed
    assert worker.installer.calls == ["open", "prepare", "install", "finish"]
    assert trainer.begin("t1", 1) == Begun(already=True)
    assert trainer.abort("t1") == Done()
    assert (worker.status().state, worker.status().version) == ("idle", 1)


def test_requests_out_of_order_are_refused_and_change_nothing(worker: Worker, trainer: Driver) -> None:
    with pytest.raises(ProtocolError, match="no weight-update group is named 'policy'; open: none"):
        trainer.begin("t1", 1)
    assert trainer.abort("t1") == Done()
    trainer.open()
    for request in (trainer.renew, trainer.seal, trainer.bucket):
        with pytest.raises(ProtocolError, match="no transaction t1 is open"):
            request("t1")
    with pytest.raises(ProtocolError, match="no transaction t1 is open"):
        worker.commit("t1", 1)
    trainer.begin("t1", 1)
    with pytest.raises(ProtocolError, match="takes no bytes in messages"):
        trainer.bucket("t1")
    with pytest.raises(ProtocolError, match="transaction t1 is not sealed"):
        worker.commit("t1", 1)
    trainer.write(weights(1))
    trainer.seal_fully("t1")
    with pytest.raises(ProtocolError, match="transaction t1 is of version 1, not 2"):
        worker.commit("t1", 2)
    assert worker.status().state == "sealed"
    worker.commit("t1", 1)
    for request in (trainer.renew, trainer.seal):
        with pytest.raises(VersionConflict, match="t1 is committed already"):
            request("t1")


def test_another_list_of_pieces_than_at_the_first_seal_is_refused(worker: Worker, trainer: Driver) -> None:
    trainer.open()
    trainer.update("t1", 1, weights(1))
    with pytest.raises(ProtocolError, match="another list of pieces"):
        trainer.seal("t1", tuple(Piece(p.box, p.digest ^ 1) for p in trainer.pieces))
    assert worker.commit("t1", 1).version == 1


def test_a_begin_that_comes_after_its_abort_does_not_come_back_to_life(worker: Worker, trainer: Driver) -> None:
    trainer.open()
    trainer.begin("t1", 1)
    trainer.abort("t1", "the trainer gave up")
    with pytest.raises(VersionConflict, match="dropped: the trainer gave up"):
        trainer.begin("t1", 1)
    assert (worker.status().state, worker.status().txn) == ("idle", "")
    trainer.update("t2", 1, weights(1))
    assert worker.commit("t2", 1).version == 1


# --- versions ---------------------------------------------------------------------------------------------------------


def test_an_older_version_is_refused_and_an_equal_one_is_taken_with_its_weights_alone(
    worker: Worker, trainer: Driver
) -> None:
    trainer.open()
    trainer.update("t1", 5, weights(1))
    worker.commit("t1", 5)
    assert trainer.begin("t2", 5, digest=worker.status().digest) == Begun(already=True)
    assert trainer.begin("t2", 5) == Begun(already=False)
    trainer.write(weights(2))
    with pytest.raises(VersionConflict, match=r"version 5 is served with other weights.*leave `version` out"):
        trainer.seal_fully("t2")
    assert worker.installer.calls.count("install") == 1
    trainer.abort("t2")
    with pytest.raises(VersionConflict, match="version 4 is not newer than the installed 5"):
        trainer.begin("t3", 4)
    assert (worker.status().state, worker.status().version) == ("idle", 5)
    assert trainer.begin("t4", 6) == Begun(already=False)


def test_a_newer_update_overtakes_an_unfinished_one_and_an_older_does_not(worker: Worker, trainer: Driver) -> None:
    trainer.open()
    trainer.begin("t2", 2)
    with pytest.raises(VersionConflict, match="version 2 is on its way, 1 is older"):
        trainer.begin("t1", 1)
    trainer.begin("t3", 3)
    with pytest.raises(VersionConflict, match=r"dropped: another transaction overtook it.*another SyncManager"):
        trainer.seal("t2", ())
    trainer.write(weights(3))
    trainer.seal_fully("t3")
    worker.commit("t3", 3)
    assert_equal_bytes(worker.installer.installed, weights(3))


def test_an_update_that_overtakes_while_the_other_is_being_sealed_ends_the_sealing(
    worker: Worker, trainer: Driver
) -> None:
    trainer.open()
    worker.installer.gate.clear()
    trainer.begin("t1", 1)
    trainer.write(weights(1))
    assert not trainer.seal("t1", wait_s=0).done
    trainer.begin("t2", 2)
    worker.installer.gate.set()
    with pytest.raises(VersionConflict, match="overtook"):
        trainer.seal("t1")
    trainer.write(weights(2))
    trainer.seal_fully("t2")
    worker.commit("t2", 2)
    assert_equal_bytes(worker.installer.installed, weights(2))


# --- failures: the old version is served and the next update works ----------------------------------------------------


def serves(worker: Worker, seed: int, version: int) -> None:
    assert (worker.status().state, worker.status().version, worker.status().txn) == ("idle", version, "")
    assert_equal_bytes(worker.installer.installed, weights(seed))


@pytest.fixture
def served(worker: Worker, trainer: Driver) -> Driver:
    """Version 1 is installed."""
    trainer.open()
    trainer.update("t1", 1, weights(1))
    worker.commit("t1", 1)
    return trainer


def next_update_works(worker: Worker, trainer: Driver, version: int = 9) -> None:
    trainer.update(f"next{version}", version, weights(version))
    worker.commit(f"next{version}", version)
    serves(worker, version, version)


def test_abort_while_bytes_are_written_keeps_the_old_version(worker: Worker, served: Driver) -> None:
    served.begin("t2", 2)
    served.write(weights(2))
    assert served.abort("t2") == Done()
    serves(worker, 1, 1)
    next_update_works(worker, served)


def test_abort_while_sealing_stops_the_work_at_once_and_keeps_the_old_version(worker: Worker, served: Driver) -> None:
    worker.installer.gate.clear()  # preparing would never end by itself
    served.begin("t2", 2)
    served.write(weights(2))
    assert not served.seal("t2", wait_s=0).done
    assert served.abort("t2") == Done()
    eventually(
        lambda: not any(thread.name.startswith("weightwire-stage") for thread in threading.enumerate()),
        "the end of its thread, which may end a moment after the answer",
    )
    serves(worker, 1, 1)
    worker.installer.gate.set()
    next_update_works(worker, served)


def test_abort_of_a_sealed_update_keeps_the_old_version(worker: Worker, served: Driver) -> None:
    served.update("t2", 2, weights(2))
    served.abort("t2")
    with pytest.raises(VersionConflict, match="dropped"):
        worker.commit("t2", 2)
    serves(worker, 1, 1)
    next_update_works(worker, served)


def test_abort_comes_too_late_once_the_commit_has_begun(worker: Worker, served: Driver) -> None:
    served.update("t2", 2, weights(2))
    group = worker.table.named("policy")
    assert group.check_sealed("t2", 2) is None
    with pytest.raises(VersionConflict, match="too late to abort"):
        served.abort("t2")
    for begin in (lambda: served.begin("t3", 3), lambda: served.open(install="copy")):
        with pytest.raises(SyncTimeout, match="still under way here"):
            begin()
    group.install("t2")
    group.finish("t2", 0.0)
    serves(worker, 2, 2)


def test_a_commit_taken_back_before_anything_was_written_can_be_repeated_or_aborted(
    worker: Worker, served: Driver
) -> None:
    served.update("t2", 2, weights(2))
    group = worker.table.named("policy")
    group.check_sealed("t2", 2)
    group.release()
    assert worker.status().state == "sealed"
    worker.commit("t2", 2)
    serves(worker, 2, 2)


@pytest.mark.parametrize("tensor", ["a", "b"])
def test_a_byte_that_changed_between_write_and_seal_is_found_and_named(
    worker: Worker, served: Driver, tensor: str
) -> None:
    served.begin("t2", 2)
    served.write(weights(2))
    segment = next(s for s in served.shm.owned.values() if s.segment_id.encode() in served.segment).tensor
    segment[MANIFEST.layout.offsets[MANIFEST.index[tensor]]] ^= 1
    with pytest.raises(DigestMismatch, match=rf"{tensor}\[.*\] is not what the trainer sent") as raised:
        served.seal_fully("t2")
    assert (raised.value.phase, raised.value.version, raised.value.rank) == ("seal", 2, 0)
    with pytest.raises(DigestMismatch):
        worker.commit("t2", 2)
    served.abort("t2")
    serves(worker, 1, 1)
    next_update_works(worker, served)


def test_pieces_that_leave_something_out_or_hold_it_twice_are_named(worker: Worker, served: Driver) -> None:
    served.begin("t2", 2)
    a, b = served.write(weights(2))
    with pytest.raises(ManifestMismatch, match=r"written by nobody: b\[0:5\] \(5 elements\)"):
        served.seal("t2", (a,))
    with pytest.raises(ManifestMismatch, match=r"written more than once: a\[0:8, 0:4\]"):
        served.seal("t2", (a, a, b))
    with pytest.raises(ManifestMismatch, match=r"does not lie in shape \[5\]"):
        served.seal("t2", (a, Piece(Box(1, (1,), (5,)), 0)))
    assert served.seal_fully("t2").done


@pytest.mark.parametrize("step", ["prepare", "install"])
def test_an_installer_that_fails_leaves_the_old_version_and_its_text(worker: Worker, served: Driver, step: str) -> None:
    worker.installer.fail[step] = RuntimeError("out of paper")
    group = worker.table.named("policy")
    with pytest.raises((WeightwireError, RuntimeError), match="out of paper"):
        (served.update("t2", 2, weights(2)), worker.commit("t2", 2))
    if step == "install":
        group.undo("rank 0: out of paper")
        with pytest.raises(CommitFailed, match="out of paper"):
            worker.commit("t2", 2)
    else:
        served.abort("t2")
    worker.installer.fail.clear()
    assert (worker.status().state, worker.status().version) == ("idle", 1)
    next_update_works(worker, served)


def test_a_group_that_could_not_be_undone_is_torn_until_a_full_update(worker: Worker, served: Driver) -> None:
    served.update("t2", 2, weights(2))
    group = worker.table.named("policy")
    group.check_sealed("t2", 2)
    worker.installer.fail["undo"] = RuntimeError("no way back")
    said = "half; the roll-back failed: RuntimeError: no way back"
    with pytest.raises(TornReplica, match=said):
        group.undo("half")
    assert (worker.status().state, worker.status().detail) == ("torn", said)
    # Torn stays torn through whatever isn't a commit, and even the version it had may be sent to heal it.
    served.begin("t3", 1)
    served.abort("t3")
    assert worker.status().state == "torn"
    served.begin("t4", 1)
    served.write(weights(1))
    served.seal_fully("t4")
    assert worker.status().state == "torn"
    worker.commit("t4", 1)
    serves(worker, 1, 1)
    assert worker.status().detail == ""


def test_what_is_written_after_the_commit_does_not_reach_the_installed_weights(worker: Worker, served: Driver) -> None:
    served.update("t2", 2, weights(2))
    worker.commit("t2", 2)
    for segment in served.shm.owned.values():
        segment.tensor.fill_(255)
    serves(worker, 2, 2)


# --- the trainer vanishes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """`maps` collects garbage each time that a test looks: not through what other tests have imported, or the worker's threads
    wait for the interpreter nearly all the time."""
    gc.collect()
    gc.freeze()


def maps() -> set[str]:
    """Addresses at which segments are mapped in this process, the worker's."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if "memfd:weightwire" in line}


def test_a_silent_trainers_update_ends_with_its_lease_and_frees_its_memory(worker: Worker, served: Driver) -> None:
    served.begin("t2", 2, lease_s=0.05)
    eventually(lambda: worker.status().state == "idle", "the end of the lease")
    serves(worker, 1, 1)
    with pytest.raises(SyncTimeout, match=r"dropped: the trainer was silent for 0\.05 s"):
        served.seal("t2", ())
    next_update_works(worker, served)


def test_a_sealed_update_ends_with_its_lease_too(worker: Worker, served: Driver) -> None:
    served.begin("t2", 2, lease_s=3)
    served.write(weights(2))
    served.seal_fully("t2")
    eventually(lambda: worker.status().state == "idle", "the end of the lease")
    serves(worker, 1, 1)


def test_renewing_keeps_an_update_alive(worker: Worker, served: Driver) -> None:
    served.begin("t2", 2, lease_s=60)
    before = worker.table.wakes_at_s()
    served.renew("t2")
    after = worker.table.wakes_at_s()
    assert after > before


def trainer_that_hangs(address: str, seal: bool) -> None:
    """A whole trainer process that begins an update, writes, perhaps seals, and then is silent for ever."""
    trainer = Driver(address)
    trainer.open()
    trainer.begin("t2", 2, lease_s=3600)
    trainer.write(weights(2))
    if seal:
        trainer.seal_fully("t2")
    signal.pause()


@pytest.mark.parametrize("state", ["receiving", "sealed"])
def test_a_killed_trainers_update_ends_at_once_and_leaves_no_memory_mapped(worker: Worker, state: str) -> None:
    before = maps()
    pid = fork("tests.worker.test_groups:trainer_that_hangs", address=worker.address, seal=state == "sealed")
    eventually(lambda: worker.table.statuses() and worker.status().state == state, f"the state {state}")
    eventually(lambda: maps() > before, "the update's memory")
    kill(pid)
    eventually(lambda: worker.status().state == "idle", "the end of the update, an hour before its lease ends")
    eventually(lambda: maps() <= before, "the memory given back")
    successor = Driver(worker.address)
    successor.open()
    next_update_works(worker, successor)
    successor.close()


def test_what_is_kept_between_updates_goes_when_the_trainer_does(worker: Worker) -> None:
    before = maps()
    pid = fork("tests.worker.test_groups:trainer_that_hangs", address=worker.address, seal=True)
    eventually(lambda: worker.table.statuses() and worker.status().state == "sealed", "a sealed update")
    worker.commit("t2", 2)
    assert maps() > before
    kill(pid)
    eventually(lambda: maps() <= before, "the memory given back")
    serves(worker, 2, 2)


def test_what_is_kept_between_updates_can_be_asked_back(worker: Worker, served: Driver) -> None:
    before = maps()
    served.shm.close()
    assert maps() < before
    before = maps()
    assert served.ask(Release("policy"), Done) == served.ask(Release("nobody"), Done) == Done()
    assert maps() < before
    serves(worker, 1, 1)
    next_update_works(worker, served)


def test_a_trainer_of_another_host_is_watched_by_its_lease_only(
    worker: Worker, trainer: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.open("zmq")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(addresses, "boot_id", lambda: "another host")
        trainer.pid = 2**22 + 1  # no process has this id
        trainer.begin("t1", 1, segment=b"")
    assert trainer.describe().groups[0].state == "receiving"
    assert trainer.renew("t1") == Done()


# --- several groups, terms, closing -----------------------------------------------------------------------------------


def test_two_groups_under_way_at_once_do_not_mix(worker: Worker) -> None:
    policy, critic = Driver(worker.address, "policy"), Driver(worker.address, "critic")
    policy.open(), critic.open()
    policy.begin("p", 7), critic.begin("c", 1)
    policy.write(weights(1)), critic.write(weights(2))
    with pytest.raises(ProtocolError, match="no transaction c is open"):
        policy.renew("c")
    policy.seal_fully("p"), critic.seal_fully("c")
    worker.commit("c", 1, "critic")
    assert (worker.status("policy").state, worker.status("policy").version) == ("sealed", None)
    critic.begin("c2", 2)
    critic.abort("c2")
    worker.commit("p", 7)
    assert_equal_bytes(worker.installers["policy"].installed, weights(1))
    assert_equal_bytes(worker.installers["critic"].installed, weights(2))
    assert [(s.group, s.version) for s in worker.table.statuses()] == [("policy", 7), ("critic", 1)]
    policy.close(), critic.close()


def test_a_manifest_that_changed_is_told_from_the_one_that_was_agreed(worker: Worker, served: Driver) -> None:
    changed = Manifest((*MANIFEST.tensors, TensorSpec("c", "int8", (3,))))
    with pytest.raises(ManifestMismatch, match="the manifest changed since the group was opened") as raised:
        served.begin("t2", 2, fingerprint=changed.fingerprint)
    assert "open the group again" in raised.value.hint
    grown = Driver(worker.address, manifest=changed)
    grown.open()
    assert worker.status().version == 1  # opening anew keeps the installed version
    assert len(grown.open().needs) == 3
    with pytest.raises(ManifestMismatch):
        served.begin("t3", 3)
    grown.close()


def test_terms_that_are_refused_leave_the_agreed_ones_in_force(worker: Worker, served: Driver) -> None:
    worker.installer.fail_once["open"] = ManifestMismatch("the engine's model can't take: c")
    wrong = Driver(worker.address, manifest=Manifest((TensorSpec("c", "int8", (3,)),)))
    with pytest.raises(ManifestMismatch, match="can't take: c"):
        wrong.open()
    next_update_works(worker, served)
    wrong.close()


def test_terms_refused_for_another_groups_parameters_leave_the_agreed_ones_in_force(directory: Path) -> None:
    """The installer has agreed to the new manifest by then: what comes next must not be read by its layout."""
    worker = Worker(f"ipc://{directory}/w2", lambda _: KeepingInstaller(claims_by_name=True))
    other = Driver(worker.address, "critic", Manifest((TensorSpec("head", "int8", (3,)),)))
    other.open()
    trainer = Driver(worker.address)
    trainer.open(sharing=8)
    trainer.update("t1", 1, weights(1))
    worker.commit("t1", 1)
    both = Driver(worker.address, manifest=Manifest((TensorSpec("head", "int8", (3,)), *MANIFEST.tensors)))
    with pytest.raises(ManifestMismatch, match="parameters that group 'critic' writes already: head") as raised:
        both.open()
    assert "close that group first" in raised.value.hint
    assert worker.installer.sharing == 8, "eight replicas of this host share its free memory as before"
    trainer.update("t2", 2, weights(2))
    worker.commit("t2", 2)
    serves(worker, 2, 2)
    for driver in (other, trainer, both):
        driver.close()
    worker.close()


def test_a_refused_first_opening_leaves_no_group(directory: Path) -> None:
    error = ManifestMismatch("nothing fits")
    worker = Worker(f"ipc://{directory}/w2", lambda _: KeepingInstaller(fail={"open": error}))
    trainer = Driver(worker.address)
    with pytest.raises(ManifestMismatch, match="nothing fits"):
        trainer.open()
    assert worker.table.statuses() == ()
    eventually(lambda: worker.installer.calls == ["open", "close"], "the installer closed")
    trainer.close(), worker.close()


def test_an_unknown_transport_is_refused_with_those_there_are(worker: Worker, trainer: Driver) -> None:
    with pytest.raises(TransportUnavailable, match="no transport is named 'pigeon'") as raised:
        trainer.open("pigeon")
    assert raised.value.hint.startswith(
        "available: zone, shm, zmq, delta, nixl, store, collective, stream; not available: cuda_ipc: "
    )
    assert worker.table.statuses() == ()


def test_a_segment_that_cannot_be_reached_is_refused_before_anything_changes(worker: Worker, served: Driver) -> None:
    for segment in (b"", b"garbage"):
        with pytest.raises(ProtocolError, match="not a SegmentAddress"):
            served.begin("t2", 2, segment=segment)
    serves(worker, 1, 1)
    next_update_works(worker, served)


def test_a_segment_written_again_is_no_way_back_any_more(directory: Path) -> None:
    worker = Worker(f"ipc://{directory}/w2", lambda _: KeepingInstaller(keeps_previous=True))
    trainer = Driver(worker.address)
    trainer.open()
    trainer.update("t1", 1, weights(1))
    assert not worker.commit("t1", 1).releases_segment
    group = worker.table.named("policy")
    kept = group.work.update("t1").staging
    held = frozenset({kept.segment_id})
    trainer.begin("t2", 2, busy=held)
    assert group.group.installed is not None and group.group.installed.keeps
    assert torch.equal(worker.installer.read(kept.segment)["b"].view(torch.int32), weights(1)["b"].view(torch.int32))
    trainer.begin("t3", 3, busy=frozenset(set(trainer.shm.owned) - held))
    assert not group.group.installed.keeps
    trainer.close(), worker.close()


def test_closing_a_group_frees_it_twice_over_and_the_weights_stay(worker: Worker, served: Driver) -> None:
    served.begin("t2", 2)
    installer = worker.installer
    assert served.ask(CloseGroup("policy"), Done) == served.ask(CloseGroup("policy"), Done) == Done()
    assert worker.table.statuses() == ()
    assert installer.calls[-1] == "close"
    assert_equal_bytes(installer.installed, weights(1))
    with pytest.raises(ProtocolError, match="no weight-update group is named"):
        served.renew("t2")
    served.open()
    assert worker.status().version is None
