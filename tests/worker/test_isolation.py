"""One group's trouble, one peer's trouble, one listener's trouble: nobody else's."""

from __future__ import annotations

import errno
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from inference_plugin.install.contract import Throttle
from inference_plugin.net import reply_server
from inference_plugin.net.channel import take_ready
from inference_plugin.plugins import hookimpl, plugin_manager
from inference_plugin.wire import codec
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ManifestMismatch, ProtocolError, SyncTimeout, VersionConflict
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.messages import (
    Abort,
    Begin,
    Begun,
    CloseGroup,
    Describe,
    Done,
    GroupOpened,
    OpenGroup,
    Renew,
    Seal,
    Sealed,
    Sender,
    WorkerCard,
)
from inference_plugin.worker import groups, server
from inference_plugin.worker.group import FINISHED_KEPT
from tests.support.rig import eventually
from tests.support.worker import KeepingInstaller, Worker
from tests.transports.cases import assert_equal_bytes
from tests.worker.driver import MANIFEST, Driver, weights

OTHER = Manifest((TensorSpec("head", "int8", (3,)),))


class Stubborn(KeepingInstaller):
    """Its preparation ends when the test says so, whether it is cancelled or not; so does its clean-up."""

    discard_gate: threading.Event

    def __post_init__(self) -> None:
        super().__post_init__()
        self.discard_gate = threading.Event()
        self.discard_gate.set()

    def prepare(self, segment: torch.Tensor, brake: Throttle) -> int:
        self._note("prepare")
        assert self.gate.wait(600)
        brake()
        return 0

    def discard(self) -> None:
        self._note("discard")
        assert self.discard_gate.wait(600)


@pytest.fixture
def stubborn(directory: Path) -> Iterator[Worker]:
    one = Worker(f"ipc://{directory}/stubborn", lambda _: Stubborn())
    yield one
    for installer in one.installers.values():
        for gate in (installer.gate, installer.open_gate, installer.discard_gate):  # type: ignore[attr-defined]
            gate.set()
    one.close()


@pytest.fixture
def critic(worker: Worker) -> Iterator[Driver]:
    driver = Driver(worker.address, "critic", OTHER)
    yield driver
    driver.close()


def opening(driver: Driver, **options: Any) -> OpenGroup:
    return OpenGroup(driver.group, driver.manifest, "shm", driver.shm.probe(), **options)


def held_open(worker: Worker, group: str) -> threading.Event:
    """Lets the group's first opening begin and not end until the event is set."""
    gated = KeepingInstaller()
    gated.open_gate.clear()
    first = [gated]
    worker.make = lambda name: first.pop() if name == group and first else KeepingInstaller()
    return gated.open_gate


# --- opening ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease_s", [3.0, pytest.param(Config().lease_s, marks=pytest.mark.slow)])
def test_opening_a_group_for_longer_than_anothers_lease_ends_nothing_of_it(
    worker: Worker, trainer: Driver, critic: Driver, lease_s: float
) -> None:
    trainer.open()
    trainer.begin("t1", 1, lease_s=lease_s)
    gate = held_open(worker, "critic")
    critic.channel.send(opening(critic))
    until_s = time.monotonic() + 1.2 * lease_s
    took_s: list[float] = []
    while (asked_s := time.monotonic()) < until_s:
        assert trainer.renew("t1") == Done()
        took_s.append(time.monotonic() - asked_s)
        assert trainer.describe().groups[0].txn == "t1"
        time.sleep(lease_s / 10)
    # A manager renews this often: so long may one renewal take. A machine that stands still for a moment prolongs one of them.
    assert statistics.median(took_s) < lease_s / 3
    assert not critic.channel.has_news()
    trainer.write(weights(1))
    trainer.seal_fully("t1")
    worker.commit("t1", 1)
    assert_equal_bytes(worker.installer.installed, weights(1))
    gate.set()
    assert critic.channel.receive(GroupOpened, timeout_s=60).needs == (OTHER.whole(0),)


def test_the_same_opening_again_waits_for_the_first_and_other_terms_take_their_turn(
    worker: Worker, trainer: Driver
) -> None:
    gate = held_open(worker, "policy")
    with worker.channel() as again, worker.channel() as other:
        trainer.channel.send(opening(trainer))
        eventually(lambda: len(worker.server.server.unanswered) == 1, "the first opening")
        again.send(opening(trainer))
        eventually(lambda: len(worker.server.server.unanswered) == 2, "the same again")
        other.send(OpenGroup("policy", OTHER, "shm", trainer.shm.probe()))
        eventually(lambda: len(worker.server.server.unanswered) == 3, "other terms")
        for channel in (trainer.channel, again, other):
            assert take_ready([channel], GroupOpened, timeout_s=0) == []
        gate.set()
        first = trainer.channel.receive(GroupOpened, timeout_s=60)
        assert again.receive(GroupOpened, timeout_s=60) == first
        assert other.receive(GroupOpened, timeout_s=60).needs == (OTHER.whole(0),)
    assert worker.installer.calls.count("open") == 2
    with pytest.raises(ManifestMismatch, match="the manifest changed"):
        trainer.begin("t1", 1)
    assert trainer.open() == first
    trainer.update("t1", 1, weights(1))
    assert worker.commit("t1", 1).version == 1


def test_a_group_that_is_being_opened_by_other_terms_begins_nothing_until_it_is(
    worker: Worker, trainer: Driver
) -> None:
    trainer.open()
    trainer.begin("t1", 1)
    worker.installer.open_gate.clear()
    with worker.channel() as other:
        other.send(OpenGroup("policy", OTHER, "shm", trainer.shm.probe()))
        eventually(lambda: worker.installer.calls.count("open") == 2, "the second opening")
        with pytest.raises(VersionConflict, match=r"opened anew.*another SyncManager"):
            trainer.renew("t1")
        with pytest.raises(ProtocolError, match="is being opened by other terms") as raised:
            trainer.begin("t2", 2)
        assert raised.value.hint == "open the group again"
        worker.installer.open_gate.set()
        other.receive(GroupOpened, timeout_s=60)


def test_a_group_that_is_closed_while_it_is_opened_is_not_there_and_can_be_opened_again(
    worker: Worker, trainer: Driver
) -> None:
    gate = held_open(worker, "policy")
    trainer.channel.send(opening(trainer))
    eventually(lambda: worker.installers, "the opening")
    first = worker.installer
    with worker.channel() as closing:
        closing.send(CloseGroup("policy"))
        with worker.channel() as asking:
            assert asking.request(Describe(), WorkerCard, timeout_s=60).groups == ()
        gate.set()
        with pytest.raises(VersionConflict, match="closed while it was being opened"):
            trainer.channel.receive(GroupOpened, timeout_s=60)
        assert closing.receive(Done, timeout_s=60) == Done()
    assert first.calls[-1] == "close"
    assert worker.table.statuses() == ()
    trainer.open()
    assert worker.installer is not first
    trainer.update("t1", 1, weights(1))
    assert worker.commit("t1", 1).version == 1


def test_two_groups_that_are_opened_at_once_cannot_both_write_one_parameter(directory: Path) -> None:
    worker = Worker(f"ipc://{directory}/w2", lambda _: KeepingInstaller(claims_by_name=True))
    drivers = [Driver(worker.address, name) for name in ("one", "two")]
    for driver in drivers:
        driver.channel.send(opening(driver))
    refused = []
    for driver in drivers:
        try:
            driver.channel.receive(GroupOpened, timeout_s=60)
        except ManifestMismatch as error:
            refused.append(error.message)
        driver.close()
    (message,) = refused
    assert "writes already: a, b (2 in all)" in message and len(worker.table.statuses()) == 1
    worker.close()


def test_what_could_not_return_to_its_terms_must_be_opened_again(worker: Worker, trainer: Driver) -> None:
    trainer.open()
    worker.installer.fail["open"] = ManifestMismatch("the engine's model can't take anything")
    with pytest.raises(ManifestMismatch, match="can't take anything"), worker.channel() as other:
        other.request(OpenGroup("policy", OTHER, "shm", trainer.shm.probe()), GroupOpened, timeout_s=60)
    worker.installer.fail.clear()
    with pytest.raises(ProtocolError, match="the group is not open"):
        trainer.begin("t1", 1)
    trainer.open()
    trainer.update("t1", 1, weights(1))
    assert worker.commit("t1", 1).version == 1


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_renewal_that_waits_to_be_read_counts(worker: Worker, trainer: Driver) -> None:
    """The thread is held up for longer than the lease; the renewal came in time."""
    trainer.open()
    held_up, go_on, card = threading.Event(), threading.Event(), worker.card

    def slow_card() -> WorkerCard:
        held_up.set()
        assert go_on.wait(600)
        return card()

    lease_s = 8.0
    trainer.begin("t1", 1, lease_s=lease_s)
    worker.server.card = slow_card
    with worker.channel() as asking:
        asking.send(Describe())
        assert held_up.wait(600)
        trainer.channel.send(Renew("policy", "t1"))
        time.sleep(2 * lease_s)
        go_on.set()
        assert trainer.channel.receive(Done, timeout_s=60) == Done()
        asking.receive(WorkerCard, timeout_s=60)
    assert worker.status().txn == "t1"


def test_under_a_flood_renewals_are_read_and_silent_transactions_end(worker: Worker, trainer: Driver) -> None:
    silent = Driver(worker.address, "silent")
    trainer.open(), silent.open()
    trainer.begin("t1", 1)
    silent.begin("s1", 1, lease_s=0.3)
    context = zmq.Context()
    flooding = context.socket(zmq.DEALER)
    flooding.connect(worker.address)
    stop = threading.Event()
    request = codec.encode(Describe())

    def flood() -> None:
        while not stop.is_set():
            try:
                flooding.send_multipart([b"", request], zmq.DONTWAIT)
            except zmq.Again:
                stop.wait(0.001)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            assert trainer.renew("t1") == Done()
        eventually(lambda: worker.status("silent").state == "idle", "the end of the silent one's lease")
        assert worker.status().txn == "t1"
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)
        silent.close()


# --- the lock, the lane, listeners ------------------------------------------------------------------------------------


def test_cleaning_up_after_one_group_keeps_no_other_waiting_and_the_next_update_of_it_waits(
    stubborn: Worker,
) -> None:
    policy, critic = Driver(stubborn.address), Driver(stubborn.address, "critic")
    policy.open(), critic.open()
    installer: Any = stubborn.installer
    installer.discard_gate.clear()
    policy.begin("t1", 1), critic.begin("c1", 1)
    policy.channel.send(Abort("policy", "t1"))
    eventually(lambda: "discard" in installer.calls, "the clean-up")
    assert stubborn.status().state == "idle"
    critic.write(weights(1))
    critic.seal_fully("c1")
    stubborn.commit("c1", 1, "critic")
    assert not policy.channel.has_news()
    with stubborn.channel() as other:
        begin = Begin(
            "policy", "t2", 2, Sender("s"), 60.0, MANIFEST.fingerprint, policy.shm.allocate(MANIFEST, frozenset())
        )
        other.send(begin)
        eventually(lambda: stubborn.status().txn == "t2", "the next transaction")
        assert take_ready([other], Begun, timeout_s=0) == []
        installer.discard_gate.set()
        assert other.receive(Begun, timeout_s=60) == Begun()
    assert policy.channel.receive(Done, timeout_s=60) == Done()
    policy.close(), critic.close()


def test_a_listener_that_never_returns_keeps_no_update_from_being_installed(worker: Worker, trainer: Driver) -> None:
    release = threading.Event()

    class Hanging:
        @hookimpl
        def weightwire_state_changed(self) -> None:
            release.wait(600)

    hanging = Hanging()
    plugin_manager().register(hanging)
    try:
        trainer.open()
        trainer.update("t1", 1, weights(1))
        worker.commit("t1", 1)
        assert trainer.describe().groups[0].version == 1
    finally:
        release.set()
        plugin_manager().unregister(hanging)


def test_listeners_hear_every_state_in_order(worker: Worker) -> None:
    heard: list[str] = []

    class Listening:
        @hookimpl
        def weightwire_state_changed(self, group: str, state: str) -> None:
            if group == "listened":  # a worker of an earlier test may still tell of its own
                heard.append(state)
            raise RuntimeError("listeners may fail")

    listening = Listening()
    listened = Driver(worker.address, "listened")
    plugin_manager().register(listening)
    try:
        listened.open()
        listened.update("t1", 1, weights(1))
        worker.commit("t1", 1, "listened")
        eventually(lambda: len(heard) == 4, "four states")
    finally:
        plugin_manager().unregister(listening)
        listened.close()
    assert heard == ["receiving", "sealed", "committing", "idle"]


def test_a_replica_does_not_fall_asleep_while_a_dropped_update_is_still_being_prepared(stubborn: Worker) -> None:
    """The preparation may read the live weights, and their memory would go."""
    trainer = Driver(stubborn.address)
    trainer.open()
    stubborn.installer.gate.clear()
    trainer.begin("t1", 1)
    trainer.write(weights(1))
    assert not trainer.seal("t1", wait_s=0).done
    eventually(lambda: "prepare" in stubborn.installer.calls, "the preparation")
    trainer.channel.send(Abort("policy", "t1"))
    eventually(lambda: stubborn.status().state == "idle", "the drop")
    with pytest.raises(VersionConflict, match="an update of policy is on its way"):
        stubborn.table.may_sleep(discard=False)
    stubborn.installer.gate.set()
    assert trainer.channel.receive(Done, timeout_s=60) == Done()
    stubborn.table.may_sleep(discard=False)
    trainer.close()


def test_a_commit_that_comes_while_the_update_is_being_checked_changes_nothing(stubborn: Worker) -> None:
    trainer = Driver(stubborn.address)
    trainer.open()
    stubborn.installer.gate.clear()
    trainer.begin("t1", 1)
    trainer.write(weights(1))
    assert not trainer.seal("t1", wait_s=0).done
    with pytest.raises(ProtocolError, match="t1 is not sealed"):
        stubborn.commit("t1", 1)
    assert stubborn.status().state == "receiving"
    stubborn.installer.gate.set()
    trainer.seal_fully("t1")
    assert stubborn.commit("t1", 1).version == 1
    trainer.close()


def test_a_group_that_is_being_committed_is_not_closed(worker: Worker, trainer: Driver) -> None:
    trainer.open()
    trainer.update("t1", 1, weights(1))
    group = worker.table.named("policy")
    assert group.check_sealed("t1", 1) is None
    with pytest.raises(VersionConflict, match="is being committed"):
        trainer.ask(CloseGroup("policy"), Done)
    group.install("t1")
    assert group.finish("t1", 0.0).version == 1
    assert trainer.ask(CloseGroup("policy"), Done) == Done()


def test_two_managers_begin_at_once_and_one_version_comes_out(stubborn: Worker) -> None:
    """The first one's check still runs when the second one begins: it is told, and none of its bytes stay."""
    first, second = Driver(stubborn.address), Driver(stubborn.address)
    second.shm.close()
    second.shm = first.shm  # one probe: the same terms
    first.open(), second.open()
    stubborn.installer.gate.clear()
    first.begin("t1", 1)
    first.write(weights(1))
    first.channel.send(Seal("policy", "t1", first.digest(first.pieces), first.pieces, 5))
    eventually(lambda: "prepare" in stubborn.installer.calls, "the preparation")
    segment = second.shm.allocate(MANIFEST, frozenset(second.shm.owned))
    second.channel.send(Begin("policy", "t2", 2, Sender("s"), 60.0, MANIFEST.fingerprint, segment))
    with pytest.raises(VersionConflict, match="another transaction overtook it"):
        first.channel.receive(Sealed, timeout_s=60)
    stubborn.installer.gate.set()
    assert second.channel.receive(Begun, timeout_s=60) == Begun()
    second.segment = segment
    second.write(weights(2))
    second.seal_fully("t2")
    with pytest.raises(VersionConflict, match="overtook"):
        stubborn.commit("t1", 1)
    stubborn.commit("t2", 2)
    assert_equal_bytes(stubborn.installer.installed, weights(2))
    first.close(), second.channel.close()


def test_aborts_are_forgotten_in_the_end_and_the_served_version_is_not(worker: Worker, trainer: Driver) -> None:
    trainer.open()
    trainer.update("t1", 1, weights(1))
    committed = worker.commit("t1", 1)
    for i in range(3 * FINISHED_KEPT):
        trainer.begin(f"dropped{i}", 2)
        trainer.abort(f"dropped{i}")
    assert len(worker.table.named("policy").group.finished) <= FINISHED_KEPT + 1
    assert worker.commit("t1", 1) == committed


# --- seals ------------------------------------------------------------------------------------------------------------


def test_a_list_of_pieces_is_named_after_it_was_sent_and_never_before(worker: Worker, trainer: Driver) -> None:
    trainer.open()
    trainer.begin("t1", 1)
    trainer.write(weights(1))
    digest = trainer.digest(trainer.pieces)
    worker.installer.gate.clear()
    with pytest.raises(ProtocolError, match="named that this worker was never sent") as raised:
        trainer.ask(Seal("policy", "t1", digest, wait_s=0), Sealed)
    assert raised.value.hint == "send the list with the first Seal"
    with pytest.raises(ProtocolError, match="not the one that its digest names"):
        trainer.ask(Seal("policy", "t1", "another", trainer.pieces, 5), Sealed)
    assert not trainer.seal("t1", wait_s=0).done
    assert not trainer.ask(Seal("policy", "t1", digest, wait_s=0), Sealed).done
    worker.installer.gate.set()
    while not (sealed := trainer.ask(Seal("policy", "t1", digest, wait_s=5), Sealed)).done:
        pass
    assert sealed.digest == digest
    assert worker.installer.calls.count("prepare") == 1


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pid", [-1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])
def test_a_process_id_that_no_process_can_have_is_refused_and_ends_no_thread(
    worker: Worker, trainer: Driver, pid: int
) -> None:
    trainer.open()
    trainer.pid = pid
    with pytest.raises(ProtocolError, match=r"not a message of this protocol: .*pid"):
        trainer.begin("t1", 1)
    assert trainer.describe().groups[0].state == "idle"


def test_a_process_that_cannot_be_watched_is_served_by_its_lease(
    worker: Worker, trainer: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left, say. What the loop itself runs into must not end it either."""

    def none_left(*_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    trainer.open()
    with monkeypatch.context() as short:
        short.setattr(os, "pidfd_open", none_left)
        trainer.begin("t1", 1)
        assert trainer.renew("t1") == Done()
        trainer.begin("t2", 2, lease_s=0.3)
        eventually(lambda: worker.status().state == "idle", "the end of the lease")
        with pytest.raises(SyncTimeout):
            trainer.renew("t2")
    assert trainer.describe() == worker.card()


def test_one_peer_has_its_own_work_done_a_few_times_at_once_and_no_more(worker: Worker, trainer: Driver) -> None:
    gate = held_open(worker, "critic")
    context = zmq.Context()
    greedy = context.socket(zmq.DEALER)
    greedy.connect(worker.address)
    for i in range(2 * server.MAX_OPEN):
        request = OpenGroup("critic", Manifest((TensorSpec(f"t{i}", "int8", (3,)),)), "zmq")
        greedy.send_multipart([b"", codec.encode(request, i)])
    refused = [codec.decode(greedy.recv_multipart()[1]) for _ in range(server.MAX_OPEN)]
    assert {envelope.body.error.message for envelope in refused} == {  # type: ignore[union-attr]
        f"{server.MAX_OPEN} requests of this peer are not answered yet"
    }
    trainer.open()
    gate.set()
    context.destroy(linger=0)


# --- closing ----------------------------------------------------------------------------------------------------------


def test_a_server_is_closed_in_time_whatever_hangs(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (reply_server, groups):
        monkeypatch.setattr(module, "CLOSE_S", 0.2)
    worker = Worker(f"ipc://{directory}/hanging")
    gate = held_open(worker, "policy")
    go_on = threading.Event()
    card = worker.card

    def hanging_card() -> WorkerCard:
        go_on.wait(600)
        return card()

    worker.server.card = hanging_card
    trainer = Driver(worker.address)
    trainer.channel.send(opening(trainer))
    eventually(lambda: worker.installers, "the opening")
    with worker.channel() as asking:
        asking.send(Describe())
        started_s = time.monotonic()
        worker.close()
        assert time.monotonic() - started_s < 300
    assert "did not end within 0.2 s of closing: policy" in caplog.text
    gate.set(), go_on.set()
    worker.server.server.thread.join(600)
    with pytest.raises(OSError, match=r"refused|No such file"), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(worker.address.removeprefix("ipc://"))
    trainer.close()
