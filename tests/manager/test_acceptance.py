"""Items of the acceptance checklists that no other test shows (docs/acceptance.md says which), and the page itself."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from inference_plugin.devices import DEVICES
from inference_plugin.net.channel import Channel
from inference_plugin.transports.backends import BACKENDS, Group, chosen_backend
from inference_plugin.transports.base import Receiver, Sender, Staging
from inference_plugin.transports.nixl import NixlSender
from inference_plugin.transports.shm import ShmSender
from inference_plugin.transports.zmq import ZmqSender
from inference_plugin.wire import codec
from inference_plugin.wire.errors import CommitFailed, PeerLost, ProtocolError, TransportUnavailable, WeightwireError
from inference_plugin.wire.messages import Describe, WorkerCard
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source, waiting
from tests.support.devices import LateDevice
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import ROOT, eventually, fork, kill
from trainer_adapters import LocalSlice, WeightSource

NAMED = re.compile(r"`([a-z_0-9/]+\.py)::(test_\w+)`")


@pytest.mark.parametrize("page", ["acceptance.md", "assurance.md"])
def test_every_test_that_a_page_names_exists_and_none_is_named_without_its_file(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = set(NAMED.findall(text))
    assert len(named) > 50
    missing = [
        f"{file}::{test}"
        for file, test in sorted(named)
        if not (path := ROOT / "tests" / file).exists() or not re.search(rf"\b{test}\b", path.read_text())
    ]
    assert missing == []
    assert re.findall(r"\btest_\w+\b(?!\.py)", NAMED.sub("", text)) == []


# --- packed streaming -------------------------------------------------------------------------------------------------


def test_free_bytes_are_a_whole_number_on_a_live_worker_and_nothing_else_is_taken(start: Start) -> None:
    rig = start()
    with Channel(rig.card.workers[0].address) as asking:
        card = asking.request(Describe(), WorkerCard, timeout_s=60)
    assert type(card.free_bytes) is int and card.free_bytes > 0
    for wrong in (1.5, "1", None):
        with pytest.raises(ProtocolError, match="free_bytes"):
            codec.decode(codec.encode(msgspec.structs.replace(card, free_bytes=wrong)))


def senders_memory(manager: SyncManager) -> Iterator[Any]:
    """All memory from which this trainer sent."""
    for sender in manager.context.writer.senders.values():
        if isinstance(sender, ShmSender):
            yield from (segment.tensor.numpy() for segment in sender.owned.values())
        elif isinstance(sender, NixlSender):
            yield sender.ring.memory.numpy()
        elif isinstance(sender, ZmqSender):
            yield from (buffer.memory for lane in sender.lanes.values() for buffer in lane.buffers)


WAYS = [*itertools.product(("shm", "zmq", "delta", "nixl"), ("copy", "standby")), ("stream", "streaming")]


@pytest.mark.parametrize(("transport", "install"), WAYS)
def test_memory_that_the_sender_writes_over_after_the_commit_is_not_what_the_engine_serves(
    start: Start, transport: str, install: Any
) -> None:
    rig = start(tp=2)
    with SyncManager(transport=transport, install=install, timeout_s=60) as manager:
        for version in (1, 2, 3):
            manager.update(source(version), version)
            scribbled = [memory.fill(255) for memory in senders_memory(manager)]
            assert scribbled
            assert holds(rig, version)


@pytest.mark.parametrize(("transport", "install"), [("zmq", "copy"), ("zmq", "standby"), ("nixl", "standby")])
def test_a_bucket_that_was_answered_is_not_read_again_even_before_the_commit(
    start: Start, transport: str, install: Any
) -> None:
    rig = start(tp=2)
    with SyncManager(transport=transport, install=install, timeout_s=60) as manager:
        rig.ask("hold")
        pending = manager.update_async(source(1), 1)
        eventually(lambda: waiting(rig), "the commit at the held step boundary")
        assert [memory.fill(255) for memory in senders_memory(manager)]
        rig.ask("go on")
        assert pending.result(600).failed == ()
    assert holds(rig, 1)


def test_an_update_that_is_waited_for_and_one_that_is_not_are_the_same(start: Start) -> None:
    rig = start(tp=2)
    reports, failures = [], []
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(0), 1)  # the first one agrees on the terms as well
        for version, run in (
            (2, lambda version: manager.update(source(5), version)),
            (3, lambda version: manager.update_async(source(5), version).result(600)),
        ):
            reports.append(run(version))
            assert holds(rig, 5)
            with pytest.raises(WeightwireError) as raised:
                run(version - 1)
            failures.append((type(raised.value), raised.value.phase, raised.value.replica, raised.value.hint))
    one, other = ((r.bytes, r.messages, sorted(r.phases), r.replicas[0].status, r.replicas[0].digest) for r in reports)
    assert one == other
    assert failures[0] == failures[1]


def test_no_method_of_a_contract_may_be_left_out() -> None:
    """The other tests of this kind ask the classes what is abstract: one that lost its mark would go unnoticed."""
    assert Sender.__abstractmethods__ == {"probe", "allocate", "write", "close"}
    assert Receiver.__abstractmethods__ == {"check_probe", "open", "close"}
    assert Staging.__abstractmethods__ == {"close"}
    assert WeightSource.__abstractmethods__ == {"manifest", "slices"}


# --- groups -----------------------------------------------------------------------------------------------------------


def join_and_wait(directory: str) -> None:
    """A worker that takes part in a group and never in its broadcasts."""
    store = dist.FileStore(f"{directory}/store", 2)
    group = Group(BACKENDS["gloo"], lambda _: store, 1, 2, peers={}, deadline_s=time.monotonic() + 600)
    Path(directory, "joined").touch()
    threading.Event().wait()
    del group


def test_a_worker_killed_while_the_trainer_is_inside_a_broadcast_ends_it_long_before_the_deadline(
    directory: Path,
) -> None:
    pid = fork("tests.manager.test_acceptance:join_and_wait", directory=str(directory))
    store = dist.FileStore(f"{directory}/store", 2)
    group = Group(
        BACKENDS["gloo"], lambda _: store, 0, 2, peers={pid: "rank 0 of replica x"}, deadline_s=time.monotonic() + 600
    )
    eventually((directory / "joined").exists, "the worker in the group")
    found: list[BaseException] = []
    large = torch.zeros(256 << 20, dtype=torch.uint8)  # more than sockets hold: the sender waits for its receiver

    def send() -> None:
        try:
            group.broadcast(large)()
        except Exception as error:  # noqa: BLE001 -- looked at below
            found.append(error)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    eventually(lambda: group.pending, "the broadcast")
    assert sending.is_alive() and not group.pending[0].is_completed()
    kill(pid)
    sending.join(600)
    assert isinstance(found[0], PeerLost | RuntimeError), found


def test_a_version_is_set_on_the_replicas_that_took_it_and_before_they_go_on(start: Start) -> None:
    fine, failing = start(tp=2), start(tp=2)
    with SyncManager(timeout_s=60, catch_up="never") as manager:
        manager.update(source(1), 1)
        failing.ask("fault", rank=1, step="install")
        (failed,) = manager.update(source(2), 2).failed
        assert (failed.replica, failed.version) == (failing.replica, None)
        assert manager.versions() == {fine.replica: 2, failing.replica: 1}
        assert holds(fine, 2) and holds(failing, 1)
    logs = {rig.replica: [each for each in rig.ask("state")["log"] if each != "pause:keep"] for rig in (fine, failing)}
    assert logs[fine.replica] == ["installed:policy:1", "resume", "installed:policy:2", "resume"]
    assert logs[failing.replica] == ["installed:policy:1", "resume", "resume"]
    assert isinstance(WeightwireError.of(failed.error), CommitFailed)  # type: ignore[arg-type]


# --- several backends, asynchronous update ----------------------------------------------------------------------------


def test_an_explicit_backend_wins_on_a_device_that_the_table_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    device.type = "xpu"
    monkeypatch.setitem(DEVICES, "xpu", device)
    assert chosen_backend("gloo") == "gloo"
    with pytest.raises(TransportUnavailable, match=r"'xpu'; known: cpu \(gloo\), cuda \(nccl\), npu \(hccl\)"):
        chosen_backend(None)


class Stalling(ShardSource):
    """Stops before its second slice until it is told to go on."""

    def __init__(self, seed: int) -> None:
        super().__init__(checkpoint(seed))
        self.stalled, self.go_on = threading.Event(), threading.Event()

    def slices(self) -> Iterator[LocalSlice]:
        for i, item in enumerate(super().slices()):
            if i == 1:
                self.stalled.set()
                self.go_on.wait(600)
            yield item


def test_an_event_loop_ticks_while_the_source_is_read_and_while_the_commit_waits(start: Start) -> None:
    rig = start()
    rig.ask("hold")
    stalling = Stalling(1)

    async def ticks_during(state: Any) -> None:
        """A thousand turns of the loop from the moment that the state is seen, and the state still stands."""
        while not state():
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert state()

    async def train(manager: SyncManager) -> int:
        update = asyncio.wrap_future(manager.update_async(stalling, 1))
        await ticks_during(lambda: stalling.stalled.is_set() and not update.done())
        stalling.go_on.set()
        await ticks_during(lambda: waiting(rig) == 1 and not update.done())
        rig.ask("go on")
        return (await update).version

    with SyncManager(timeout_s=60) as manager:
        assert asyncio.run(train(manager)) == 1
    assert holds(rig, 1)
