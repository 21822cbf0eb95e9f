"""The SyncManager end to end: real sockets, real processes, the plain engine."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from inference_plugin.net import channel, diagnosis
from inference_plugin.net.channel import Channel
from inference_plugin.net.records import last_report
from inference_plugin.transports import shm
from inference_plugin.transports.segment import SegmentAddress
from inference_plugin.transports.zmq import ZmqSender
from inference_plugin.wire import errors
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import (
    ArgumentError,
    CommitFailed,
    ConfigError,
    DigestMismatch,
    ManifestMismatch,
    PeerLost,
    SyncTimeout,
    TornReplica,
    TransportUnavailable,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Commit, Committed, Describe, ReplicaCard, WorkerCard
from inference_plugin.wire.reports import UpdateReport
from tests.manager.conftest import Start
from tests.manager.trainer import Trainer
from tests.support.managers import SyncManager
from tests.support.plain_engine import TIED, ShardSource, checkpoint, digests_expected, manifest_of
from tests.support.rig import ROOT, Rig, eventually, kill
from tests.trainers.launching import run_ranks
from trainer_adapters.fleet.fleet import Fleet
from trainer_adapters.update import machine


@pytest.fixture
def manager(directory: Path) -> Iterator[SyncManager]:
    with SyncManager(timeout_s=60) as one:
        yield one


def waiting(rig: Rig) -> int:
    """Commands that wait for a step boundary."""
    count: int = rig.ask("state")["waiting"]
    return count


def source(seed: int, layers: int = 2) -> ShardSource:
    return ShardSource(checkpoint(seed, layers))


def holds(rig: Rig, seed: int) -> bool:
    return rig.peek() == digests_expected(checkpoint(seed, rig.layers), rig.tp, rig.layers)


# --- what an update does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "install"),
    [*itertools.product(("shm", "zmq", "delta", "nixl"), ("copy", "standby")), ("stream", "streaming")],
)
def test_every_rank_of_every_replica_holds_each_version_in_turn(start: Start, transport: str, install: Any) -> None:
    rigs = [start(tp=2), start(tp=1)]
    assert all(holds(rig, 0) for rig in rigs)
    with SyncManager(transport=transport, install=install, timeout_s=60) as manager:
        for version in (1, 2, 3, 4):
            report = manager.update(source(version), version)
            assert all(holds(rig, version) for rig in rigs)
            assert [(r.status, r.version, r.transport, r.install) for r in report.replicas] == [
                ("committed", version, transport, install)
            ] * 2
        assert manager.verify(source(4)).ok
        assert manager.versions() == {rig.replica: 4 for rig in rigs}
        differs = manager.verify(source(3))
        assert not differs.ok and "embed.weight" in differs.replicas[0].differ[0]
    assert len({r.digest for r in report.replicas}) == 1


def test_one_update_may_take_two_transports(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with replicas of this host and of others: the slices are cut for those that are sent theirs, for both."""
    rigs = [start(tp=2), start(tp=2)]
    probe, asked = shm.ShmSender.probe, []

    def seen_by_the_first(sender: shm.ShmSender) -> bytes:
        asked.append(sender)
        address = decode_as(probe(sender), SegmentAddress)
        return msgspec.msgpack.encode(address if len(asked) == 1 else msgspec.structs.replace(address, inode=0))

    monkeypatch.setattr(shm.ShmSender, "probe", seen_by_the_first)
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2):
            report = manager.update(source(version), version)
            assert sorted(r.transport for r in report.replicas) == ["shm", "zmq"]
            assert len({r.digest for r in report.replicas}) == 1
            assert all(holds(rig, version) for rig in rigs)
        assert manager.verify(source(2)).ok


def test_a_workers_socket_may_be_tcp_on_loopback(start: Start) -> None:
    rig = start(tp=2, WEIGHTWIRE_LISTEN="tcp://127.0.0.1:*")
    assert all(worker.address.startswith("tcp://127.0.0.1:") for worker in rig.card.workers)
    with SyncManager(transport="zmq", timeout_s=60) as manager:
        assert manager.update(source(1), 1).failed == ()
    assert holds(rig, 1)


def test_the_report_says_what_travelled_how_often_and_how_long(start: Start, manager: SyncManager) -> None:
    rig = start(tp=2)
    report = manager.update(source(1), 1)
    assert (report.group, report.version) == ("policy", 1)
    assert report.bytes == manifest_of(checkpoint(1)).nbytes
    assert report.copies_per_byte == 1.0, "it swaps, alone on its host: a zone"
    assert {"scan", "agree", "stage", "seal", "commit", "stage.move", "stage.digest"} == set(report.phases)
    top = [report.phases[name] for name in ("scan", "agree", "stage", "seal", "commit")]
    assert all(seconds > 0 for seconds in top) and sum(top) <= report.seconds
    (replica,) = report.replicas
    assert (replica.replica, replica.engine, replica.mechanism) == (rig.replica, "plain", "plan")
    assert replica.stopped_s > 0 and replica.verify_s > 0 and replica.error is None
    assert last_report("policy") == report


def test_control_messages_do_not_depend_on_the_number_of_tensors(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a slow machine nothing is sent or asked again, and no lease is renewed.
    monkeypatch.setattr(channel, "RESEND_S", 600)
    monkeypatch.setattr(machine, "SEAL_WAIT_S", 5)  # the longest that a worker takes
    messages = {}
    for layers in (1, 50):
        rig = start(tp=2, layers=layers)
        with SyncManager("policy", timeout_s=600, lease_s=1800) as manager:
            counts = [manager.update(source(v, layers), v).messages for v in (1, 2, 3)]
        assert holds(rig, 3)
        messages[len(checkpoint(0, layers))] = counts
        rig.end()
    assert set(messages) == {8, 302}
    # describe nothing, open once; then per worker begin and seal, per replica one commit
    assert messages[8] == [7, 5, 5]
    assert messages[302][1:] == [5, 5]


def test_a_number_that_is_served_is_taken_again_with_its_weights_alone_and_an_older_one_is_refused(
    start: Start, manager: SyncManager
) -> None:
    """A loop that counts epochs, say, and updates more often: the engines would serve the first weights of each."""
    rig = start(tp=2)
    manager.update(source(5), 5)
    with pytest.raises(VersionConflict, match=r"version 5 is served with other weights.*leave `version` out") as raised:
        manager.update(source(6), 5)
    assert raised.value.replica == rig.replica and holds(rig, 5)
    assert [(r.status, r.version) for r in manager.update(source(5), 5).replicas] == [("committed", 5)]
    assert holds(rig, 5)
    with pytest.raises(VersionConflict, match="version 4 is not newer than the installed 5") as raised:
        manager.update(source(4), 4)
    assert (raised.value.replica, raised.value.group, raised.value.phase) == (rig.replica, "policy", "agree")
    with pytest.raises(VersionConflict, match="non-negative"):
        manager.update(source(4), -1)
    assert holds(rig, 5)
    manager.update(source(6), 6)
    assert holds(rig, 6)


def test_a_replica_that_starts_anew_is_a_new_one_and_the_old_one_is_forgotten(
    start: Start, manager: SyncManager
) -> None:
    first = start()
    manager.update(source(1), 1)
    first.end()
    second = start()
    report = manager.update(source(2), 2)
    assert [(r.replica, r.status) for r in report.replicas] == [(second.replica, "committed")]
    assert holds(second, 2)


def test_another_manager_goes_on_where_the_first_one_ended(start: Start, manager: SyncManager) -> None:
    rig = start(tp=2)
    manager.update(source(1), 1)
    manager.close()
    with SyncManager(timeout_s=60) as other:
        with pytest.raises(VersionConflict):
            other.update(source(0), 0)
        assert other.update(source(2), 2).failed == ()
    assert holds(rig, 2)


def test_two_groups_never_write_the_same_parameters(start: Start, manager: SyncManager) -> None:
    rig = start(tp=2)
    manager.update(source(9), 9)
    taken = r"parameters that group 'policy' writes already: embed\.weight"
    with SyncManager("critic", timeout_s=60) as critic, pytest.raises(ManifestMismatch, match=taken):
        critic.update(source(1), 1)
    assert holds(rig, 9)
    manager.update(source(10), 10)
    assert holds(rig, 10)


def test_an_update_in_the_background_gives_its_report_to_future_and_callback(
    start: Start, manager: SyncManager
) -> None:
    rig = start()
    called: concurrent.futures.Future[tuple[str, UpdateReport]] = concurrent.futures.Future()
    rig.ask("hold")
    future = manager.update_async(
        source(1), 1, lambda done: called.set_result((threading.current_thread().name, done.result()))
    )
    eventually(lambda: waiting(rig), "the commit at the held step boundary")
    assert not future.done() and not called.done()
    rig.ask("go on")
    report = future.result(600)
    thread, told = called.result(600)
    assert report == told and report.version == 1 and thread.startswith("weightwire-manager")
    assert holds(rig, 1)


def test_a_failed_update_in_the_background_is_in_future_and_callback(manager: SyncManager) -> None:
    called: concurrent.futures.Future[BaseException | None] = concurrent.futures.Future()
    future = manager.update_async(source(1), 1, lambda done: called.set_result(done.exception()))
    assert isinstance(future.exception(60), PeerLost)
    assert called.result(600) is future.exception()


def test_a_callback_that_is_no_function_is_refused_before_the_update_begins(start: Start, manager: SyncManager) -> None:
    rig = start()
    with pytest.raises(ArgumentError, match="callback=5 is a int"):
        manager.update_async(source(1), 1, callback=5)  # type: ignore[arg-type]
    assert manager.update(source(2), 2).version == 2 and holds(rig, 2)


def test_without_a_replica_it_says_where_it_looked_and_what_to_do(manager: SyncManager, directory: Path) -> None:
    with pytest.raises(PeerLost, match=f"no replica of job 'default' runs; looked in {directory}/default") as raised:
        manager.update(source(1), 1)
    assert (raised.value.phase, raised.value.side, raised.value.group) == ("agree", "manager", "policy")
    assert "WEIGHTWIRE_JOB" in raised.value.hint and "weightwire doctor" in raised.value.hint
    diagnosis.note_start("vllm", "model m")
    with pytest.raises(PeerLost, match=f"; starting: vllm process {os.getpid()}: model m") as raised:
        manager.update(source(1), 1)
    assert "wait_for_replicas()" in raised.value.hint


def test_where_only_other_jobs_have_replicas_it_names_these_jobs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    monkeypatch.setenv("WEIGHTWIRE_JOB", "misspelt")
    with SyncManager(timeout_s=60) as manager:
        with pytest.raises(PeerLost, match=r"job 'misspelt' runs; .*; replicas of other jobs run here: 'default'"):
            manager.update(source(1), 1)
        with pytest.raises(SyncTimeout, match=r"0 of 1 .*; replicas of other jobs run here: 'default'") as raised:
            manager.wait_for_replicas(1, timeout_s=0.1)
        assert "says in its log why" in raised.value.hint


def test_an_engine_of_another_model_ends_the_update_for_all_unless_the_manager_leaves_it_out(start: Start) -> None:
    ours, other = start(), start(layers=1, RIG_MODEL="another")
    before = other.peek()
    with SyncManager(timeout_s=60) as manager:
        with pytest.raises(ManifestMismatch) as raised:
            manager.update(source(1), 1)
        assert raised.value.replica == other.replica and "in all" in str(raised.value)
        assert holds(ours, 0) and other.peek() == before
    with SyncManager(timeout_s=60, replicas="plain") as manager:
        manager.update(source(1), 1)
    assert holds(ours, 1) and other.peek() == before


def test_a_manager_for_some_replicas_of_the_job_leaves_the_others_alone(start: Start) -> None:
    policy, judge = start(), start(RIG_MODEL="a-reward-model")
    before = judge.peek()
    with SyncManager(timeout_s=60, replicas=lambda card: "reward" not in card.model) as manager:
        assert [card.replica for card in manager.wait_for_replicas(1, timeout_s=60)] == [policy.replica]
        report = manager.update(source(1), 5)
        assert [replica.replica for replica in report.replicas] == [policy.replica]
        assert [replica.replica for replica in manager.pause().replicas] == [policy.replica]
        manager.resume()
        assert [status.replica for status in manager.replicas()] == [policy.replica]
        assert manager.versions() == {policy.replica: 5}
    with SyncManager(timeout_s=60, replicas="plain") as manager:
        assert [card.replica for card in manager.discover()] == [policy.replica]
    assert policy.peek() == digests_expected(checkpoint(1), 1) and judge.peek() == before


def test_a_function_that_chooses_no_replica_or_raises_is_told_apart_from_a_job_without_any(start: Start) -> None:
    start()
    with SyncManager(timeout_s=60, replicas=lambda card: False) as manager:
        with pytest.raises(PeerLost, match=r"replicas= leaves out every replica of job 'default' \(1 in all\)"):
            manager.update(source(1))
        with pytest.raises(PeerLost, match="leaves out every replica"):
            manager.pause()
    with (
        SyncManager(timeout_s=60, replicas=lambda card: card.name == "m") as manager,  # type: ignore[attr-defined]
        pytest.raises(ConfigError, match=r"replicas= raised .*no attribute 'name'"),
    ):
        manager.update(source(1))
    with pytest.raises(ConfigError, match="neither the name of a model nor a function"):
        SyncManager(replicas=7)  # type: ignore[arg-type]


def test_a_function_that_chooses_replicas_by_asking_its_manager_is_told_so(start: Start) -> None:
    start()
    with SyncManager(timeout_s=60, replicas=lambda card: len(manager.replicas()) > 0) as manager:
        for ask in (manager.replicas, lambda: manager.update(source(1))):
            with pytest.raises(ConfigError, match="asked its manager") as raised:
                ask()
            assert "decide by the card alone" in raised.value.hint


def test_arguments_that_cannot_be_meant_are_refused_at_once(directory: Path) -> None:
    for options in (
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"timeout_s": float("nan")},
        {"lease_s": 0},
        {"install": "x"},
        {"in_flight": "x"},
        {"catch_up": "x"},
    ):
        with pytest.raises(ValueError, match=r"seconds above 0|is none of"):
            SyncManager(**options)  # type: ignore[arg-type]
    for unknown in ("pigeon", ["shm"]):
        with pytest.raises(TransportUnavailable, match=r"no transport is named \[?'(pigeon|shm)'"):
            SyncManager(transport=unknown)  # type: ignore[arg-type]


def mapped() -> set[str]:
    """The segments that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:weightwire" in line}


def test_closing_twice_is_harmless_and_leaves_no_segment(start: Start) -> None:
    start()
    before = mapped()  # what earlier tests left to the garbage collector may end meanwhile
    manager = SyncManager(timeout_s=60)
    manager.update(source(1), 1)
    assert mapped() - before
    manager.close()
    manager.close()
    assert mapped() <= before


def test_a_part_of_a_manager_that_fails_to_close_leaves_no_other_one_open(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A plug-in's transport, say, or the replicas' sockets: segments as large as the model stayed."""

    def fails(_: object) -> None:
        raise OSError("it can't be closed")

    start()
    before = mapped()
    manager = SyncManager(timeout_s=60)
    manager.update(source(1), 1)
    monkeypatch.setattr(Fleet, "release", fails)
    monkeypatch.setattr(ZmqSender, "close", fails)
    manager.close()
    assert mapped() <= before and "it can't be closed" in caplog.text


# --- what can go wrong on the engine's side ---------------------------------------------------------------------------


def test_names_shapes_and_dtypes_that_differ_are_refused_before_a_byte_changes(
    start: Start, manager: SyncManager
) -> None:
    rig = start(tp=2)
    good = checkpoint(1)
    wrong = {
        "can't take: extra.weight [2] float32": good | {"extra.weight": torch.zeros(2)},
        "layers.0.qkv.weight": {n: t for n, t in good.items() if n != "layers.0.k.weight"},
        "dtypes differ: norm.weight": good | {"norm.weight": good["norm.weight"].bfloat16()},
        "can't take: embed.weight [47, 16]": good | {"embed.weight": torch.zeros(47, 16, dtype=torch.bfloat16)},
    }
    for text, tensors in wrong.items():
        with pytest.raises(ManifestMismatch) as raised:
            manager.update(ShardSource(tensors), 1)
        assert text in str(raised.value)
        assert raised.value.replica == rig.replica
    assert holds(rig, 0)
    manager.update(source(1), 1)
    assert holds(rig, 1)


def test_a_trainer_in_float32_sends_each_tensor_in_the_engines_dtype_where_it_is_told_to(
    start: Start, manager: SyncManager
) -> None:
    rig = start(tp=2)
    for seed in (1, 2):
        floats = {name: tensor.float() for name, tensor in checkpoint(seed).items()}
        tensors = floats | {tied: floats[name] for tied, name in TIED.items()}
        if seed == 1:
            with pytest.raises(ManifestMismatch, match="dtypes differ") as refused:
                manager.update(tensors, seed)
            assert 'dtype="engine"' in refused.value.hint
        report = manager.update(tensors, seed, dtype="engine")
        assert report.version == seed
        assert report.engine_dtypes == {"layers.*.norm.weight": "float32", "norm.weight": "float32", "*": "bfloat16"}
        assert holds(rig, seed)
    assert manager.update(source(3), 3).engine_dtypes == {}


def test_a_verification_by_another_mapping_or_another_manager_compares_in_the_engines_dtypes(
    start: Start, manager: SyncManager
) -> None:
    start(tp=2)

    def tensors(seed: int) -> dict[str, torch.Tensor]:
        floats = {name: tensor.float() for name, tensor in checkpoint(seed).items()}
        return floats | {tied: floats[name] for tied, name in TIED.items()}

    manager.update(tensors(1), 1, dtype="engine")
    assert manager.verify(tensors(1), dtype="engine").ok
    assert not manager.verify(tensors(2), dtype="engine").ok
    with SyncManager() as other:
        assert other.verify(tensors(1), dtype="engine").ok
        (as_it_is,) = other.verify(tensors(1)).replicas
        assert "bfloat16 in the engine and torch.float32 in the source" in as_it_is.differ[0]


def test_a_verification_whose_dtype_rules_do_not_travel_to_the_other_ranks_fails_on_rank_0_too(
    start: Start, manager: SyncManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 would verify once more by itself, and wait for the others, which have raised."""
    start()
    manager.update(source(1), 1)
    floats = {name: tensor.float() for name, tensor in checkpoint(1).items()}
    monkeypatch.setattr(errors, "MAX_DTYPE_RULES", 0)
    with SyncManager() as other, pytest.raises(ManifestMismatch, match="dtypes differ"):
        other.verify(floats, dtype="engine")


def test_an_update_that_takes_the_engines_dtypes_skips_no_version(start: Start, manager: SyncManager) -> None:
    rig = start()
    for seed in (1, 2):
        floats = {name: tensor.float() for name, tensor in checkpoint(seed).items()}
        tensors = floats | {tied: floats[name] for tied, name in TIED.items()}
        assert manager.update(tensors, dtype="engine").version == seed
        assert holds(rig, seed)


def test_a_source_that_changed_since_the_last_update_is_agreed_anew(start: Start, manager: SyncManager) -> None:
    rig = start()
    manager.update(source(1), 1)
    untied = source(2)
    untied.tied = {}
    untied.tensors = dict(reversed(untied.tensors.items()))  # another order is another manifest
    manager.update(untied, 2)
    assert holds(rig, 2)
    manager.update(source(3), 3)
    assert holds(rig, 3)


@pytest.mark.parametrize("install", ["copy", "standby"])
def test_an_installation_that_fails_on_one_rank_is_undone_on_all(start: Start, install: Any) -> None:
    rig = start(tp=2)
    with SyncManager(install=install, timeout_s=60) as manager:
        manager.update(source(1), 1)
        rig.ask("fault", rank=1, step="install")
        with pytest.raises(CommitFailed, match="lets 'install' fail; undone on all ranks") as raised:
            manager.update(source(2), 2)
        eventually(lambda: rig.ask("state")["log"][-1] == "resume", "the engine going on")
        assert (raised.value.replica, raised.value.phase, raised.value.version) == (rig.replica, "commit", 2)
        assert holds(rig, 1)
        manager.update(source(3), 3)
        assert holds(rig, 3)


def test_a_way_back_that_fails_too_tears_the_replica_until_the_next_full_update(
    start: Start, manager: SyncManager
) -> None:
    rig = start(tp=2)
    manager.update(source(1), 1)
    rig.ask("fault", rank=1, step="install")
    rig.ask("fault", rank=0, step="undo")
    with pytest.raises(TornReplica) as caught:
        manager.update(source(2), 2)
    assert str(caught.value).count("the test lets 'install' fail") == 1
    assert "the roll-back failed" in rig.ask("state")["refusal"]
    (card,) = manager.discover()
    assert card.state == "torn"
    manager.update(source(2), 2)
    assert rig.ask("state")["refusal"] is None
    assert holds(rig, 2)
    assert manager.discover()[0].state == "serving"


@pytest.mark.parametrize("victim", ["worker", "coordinator"])
def test_a_replica_killed_while_it_is_sealed_fails_alone_and_the_report_says_which(
    start: Start, manager: SyncManager, victim: str
) -> None:
    doomed, other = start(tp=2), start(tp=1)
    manager.update(source(1), 1)
    doomed.ask("hold")
    future = manager.update_async(source(2), 2)
    eventually(lambda: waiting(doomed), "the commit at the held step boundary")
    if victim == "coordinator":
        kill(doomed.pid)
    else:
        kill(doomed.worker_pid(1))
        doomed.ask("go on")
    report = future.result(600)
    statuses = {r.replica: (r.status, r.version) for r in report.replicas}
    assert statuses == {doomed.replica: ("failed", None), other.replica: ("committed", 2)}
    (failed,) = report.failed
    assert failed.error is not None and failed.error.kind == "PeerLost"
    with pytest.raises(PeerLost):
        report.raise_failed()
    assert holds(other, 2)
    doomed.end()
    assert [r.status for r in manager.update(source(3), 3).replicas] == ["committed"]
    assert holds(other, 3)


def test_a_replica_killed_before_the_update_is_not_asked(start: Start, manager: SyncManager) -> None:
    doomed, other = start(), start()
    manager.update(source(1), 1)
    doomed.end()
    report = manager.update(source(2), 2)
    assert [(r.replica, r.status) for r in report.replicas] == [(other.replica, "committed")]


def test_a_step_boundary_that_does_not_come_is_a_timeout_and_the_old_version_is_served(
    start: Start, manager: SyncManager
) -> None:
    rig = start(tp=2)
    manager.update(source(1), 1)
    rig.ask("hold")
    manager.settings.timeout_s = 6
    with pytest.raises(SyncTimeout) as raised:
        manager.update(source(2), 2)
    assert (raised.value.replica, raised.value.version) == (rig.replica, 2)
    rig.ask("go on")
    eventually(lambda: waiting(rig) == 0, "the loop going on")
    assert holds(rig, 1)
    manager.settings.timeout_s = 60
    manager.update(source(3), 3)
    assert holds(rig, 3)


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort", "drain"])
def test_the_engine_is_told_the_callers_policy_for_requests_in_flight(start: Start, in_flight: Any) -> None:
    rig = start()
    with SyncManager(in_flight=in_flight, timeout_s=60) as manager:
        future = manager.update_async(source(1), 1)
        if in_flight == "drain":
            eventually(lambda: "pause:drain" in rig.ask("state")["log"], "the pause")
            assert holds(rig, 0) and not future.done()
            rig.ask("drained")
        future.result(600)
    expected = [f"pause:{in_flight}", "installed:policy:1", "resume"]
    eventually(lambda: rig.ask("state")["log"] == expected, f"the log {expected}")
    assert holds(rig, 1)


def test_a_commit_asked_for_again_while_it_waits_is_one_commit_and_every_asker_is_answered(
    start: Start, manager: SyncManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The asking side sends a request again after a while: the second one must not look like a conflict."""
    monkeypatch.setattr(channel, "RESEND_S", 0.2)
    rig = start()
    manager.settings.in_flight = "drain"
    rig.ask("hold")
    future = manager.update_async(source(1), 1)
    eventually(lambda: waiting(rig) == 1, "the commit at the held step boundary")
    with Channel(rig.card.address) as again, Channel(rig.card.workers[0].address) as worker:
        txn = worker.request(Describe(), WorkerCard, timeout_s=60).groups[0].txn
        again.send(Commit("policy", txn, 1, "drain", timeout_s=60))
        assert again.request(Describe(), ReplicaCard, timeout_s=60).replica == rig.replica  # it has seen both
        again.send(Commit("policy", txn, 1, "drain", timeout_s=60))
        assert waiting(rig) == 1
        rig.ask("go on")
        eventually(lambda: "pause:drain" in rig.ask("state")["log"], "the pause")
        rig.ask("drained")
        assert again.receive(Committed, timeout_s=60).version == 1
    assert [r.status for r in future.result(600).replicas] == ["committed"]
    log = rig.ask("state")["log"]
    assert log.count("pause:drain") == 1 and log.count("installed:policy:1") == 1
    assert holds(rig, 1)


# --- bytes that are not what the trainer meant ------------------------------------------------------------------------


class CorruptingSender(shm.ShmSender):
    """Writes as `shm` does, and lets one bit flip in the segment afterwards."""

    flips = True

    def write(self, *arguments: Any, **options: Any) -> Any:
        result = super().write(*arguments, **options)
        if self.flips:
            for segment in self.owned.values():
                segment.tensor[0] ^= 1
        return result


def test_a_bit_that_flips_on_the_way_is_found_before_the_commit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = start(tp=2)
    with SyncManager(transport="shm", timeout_s=60) as manager:
        manager.update(source(1), 1)
        corrupting = dataclasses.replace(shm.TRANSPORT, sender=CorruptingSender)
        manager.settings.transports = [corrupting]
        manager.context.writer.senders.pop("shm").close()
        monkeypatch.setattr("trainer_adapters.update.writer.transport_named", lambda _name: corrupting)
        with pytest.raises(DigestMismatch, match=r"embed.weight\[0:48, 0:16\] is not what the trainer sent") as raised:
            manager.update(source(2), 2)
        assert (raised.value.phase, raised.value.replica, raised.value.version) == ("seal", rig.replica, 2)
        assert holds(rig, 1)
        monkeypatch.setattr(CorruptingSender, "flips", False)
        manager.update(source(2), 2)
        assert holds(rig, 2)


# --- several trainer ranks --------------------------------------------------------------------------------------------


def test_two_ranks_under_torchrun_write_what_each_holds_and_fail_together(start: Start, directory: Path) -> None:
    """All cases in one launch. After each failure the old version is served and the next update works."""
    rigs = [start(tp=2), start(tp=1)]
    faults = {
        "raise": ("WeightwireError", "RuntimeError: out of memory, says rank 1"),
        "another manifest": ("ManifestMismatch", "trainer rank 1 has another model than rank 0"),
        "manifest raises": ("WeightwireError", "RuntimeError: this rank has lost its model"),
        "skip": ("ManifestMismatch", "written by nobody: layers.0.q.weight[0:16, 0:16] (128 elements)"),
        "double": ("ManifestMismatch", "written more than once: layers.0.q.weight[0:8, 0:16] by rank 0 and rank 1"),
        "another version": ("VersionConflict", "trainer rank 1 is in its operation"),
    }
    steps: list[dict[str, Any]] = [{"version": 1}]
    for i, fault in enumerate(faults):
        steps += [{"version": 2 * i + 2, "fault": fault}, {"version": 2 * i + 3}]
    steps += [{"version": 49, "engine_dtypes": True}, {"version": 49, "engine_dtypes": True, "verify": [0, 1]}]
    steps += [{"version": 50, "fault": "raise", "at": 0}, {"version": 51}, {"version": 51, "verify": [0, 1]}]
    run_ranks(ROOT / "tests/manager/ranks.py", 2, directory, str(directory), json.dumps(steps))
    seen = [[json.loads((directory / f"rank{r}.step{n}").read_text()) for n in range(len(steps))] for r in (0, 1)]
    for number, step in enumerate(steps):
        on_each = [seen[rank][number] for rank in (0, 1)]
        for result in on_each:
            result.pop("seconds")
        if "fault" not in step:
            assert all("ok" in result for result in on_each), on_each
            assert on_each[0] == on_each[1]
            if "verify" in step:
                assert all(not replica["differ"] for replica in on_each[0]["ok"]["replicas"]), on_each
            else:
                assert bool(on_each[0]["ok"].get("engine_dtypes")) == ("engine_dtypes" in step)
            continue
        kind, text = faults[step["fault"]]
        assert {result["error"] for result in on_each} == {kind}, on_each
        assert {result["group"] for result in on_each} == {"policy"}
        if step.get("at", 1) == 1:
            assert all(text in result["text"] for result in on_each), (text, on_each)
    assert all(holds(rig, 51) for rig in rigs)
    for rank in (0, 1):
        verified = seen[rank][-1]["ok"]["replicas"]
        assert [(r["version"], r["differ"], r["unreadable"]) for r in verified] == [(51, [], [])] * 2


@pytest.mark.parametrize("transport", ["shm", "zmq", "delta", "nixl"])
def test_a_rank_killed_while_it_writes_ends_the_update_at_once_and_the_old_version_is_served(
    start: Start, trainer: Callable[..., Trainer], transport: str
) -> None:
    rig = start(tp=2)
    ranks = trainer(2, [{"version": 1}, {"version": 2, "fault": "kill"}], timeout_s=600, transport=transport)
    seen = ranks.step(0, 1)
    assert (seen["error"], seen["side"], seen["rank"], seen["phase"]) == ("PeerLost", "trainer", 1, "stage")
    assert "trainer rank 1's process ended" in seen["text"]
    assert holds(rig, 1)
    with SyncManager(transport=transport, timeout_s=60) as successor:
        successor.update(source(3), 3)
    assert holds(rig, 3)


def test_the_manager_rank_killed_while_it_writes_is_noticed_by_ranks_and_workers(
    start: Start, trainer: Callable[..., Trainer]
) -> None:
    rig = start(tp=2)
    ranks = trainer(2, [{"version": 1}, {"version": 2, "fault": "kill", "at": 0}], timeout_s=600, lease_s=600)
    seen = ranks.step(1, 1)
    assert (seen["error"], seen["side"], seen["rank"]) == ("PeerLost", "manager", 0)
    assert holds(rig, 1)
    with SyncManager(timeout_s=60) as successor:
        eventually(lambda: successor.versions() == {rig.replica: 1}, "the workers' groups")
        successor.update(source(3), 3)
    assert holds(rig, 3)


def test_a_silent_rank_is_a_timeout_on_rank_0_and_the_next_update_works(
    start: Start, trainer: Callable[..., Trainer]
) -> None:
    rig = start(tp=2)
    steps = [{"version": 1}, {"version": 2, "fault": "stop", "timeout_s": 3}, {"version": 3}, {"version": 4}]
    ranks = trainer(2, steps, timeout_s=60)
    seen = ranks.step(0, 1)
    assert "error" in seen, seen
    assert (seen["error"], seen["side"], seen["rank"]) == ("SyncTimeout", "trainer", 1)
    assert "trainer ranks [1] were not heard of in time" in seen["text"]
    assert holds(rig, 1)
    late = ranks.woken(1, 1)
    assert "error" in late, late
    for number in (2, 3):
        assert all("ok" in ranks.step(rank, number) for rank in (0, 1)), [ranks.step(r, number) for r in (0, 1)]
    assert holds(rig, 4)


def test_a_rank_waits_for_as_long_as_the_others_need_without_losing_its_answer(
    start: Start, trainer: Callable[..., Trainer]
) -> None:
    """A commit that drains may take longer than the time after which requests to workers are sent again."""
    rig = start(tp=2)
    rig.ask("hold")
    ranks = trainer(2, [{"version": 1}, {"version": 2}], timeout_s=60, resend_s=0.05)
    eventually(lambda: waiting(rig), "the commit at the held step boundary")
    eventually(lambda: (ranks.out / "rank1.pid").exists(), "rank 1")
    time.sleep(0.3)  # six times the time to send again; whether it was enough decides nothing
    rig.ask("go on")
    for number in (0, 1):
        on_each = [ranks.step(rank, number) for rank in (0, 1)]
        assert all("ok" in seen for seen in on_each), on_each
    assert holds(rig, 2)


def test_a_rank_that_has_no_model_any_more_is_told_apart_from_one_that_is_late(
    start: Start, trainer: Callable[..., Trainer]
) -> None:
    start()
    ranks = trainer(2, [{"version": 1, "fault": "manifest raises", "at": 0}, {"version": 2}], timeout_s=60)
    on_each = [ranks.step(rank, 0) for rank in (0, 1)]
    assert all("this rank has lost its model" in seen["text"] for seen in on_each), on_each
    assert all("ok" in ranks.step(rank, 1) for rank in (0, 1))


class Unfinished(ShardSource):
    """A source with a mistake in it."""

    def manifest(self) -> Manifest:
        raise AttributeError("it has no model yet")


def test_every_error_that_a_manager_raises_is_of_the_tree(manager: SyncManager) -> None:
    with pytest.raises(WeightwireError) as raised:
        manager.update(Unfinished(checkpoint(1)), 1)
    assert "AttributeError" in str(raised.value)
    assert raised.value.side == "manager"
