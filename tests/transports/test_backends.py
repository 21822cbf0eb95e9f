"""The device table, and groups that end when there is nothing more to wait for."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from inference_plugin.devices import in_use
from inference_plugin.transports.backends import (
    BACKENDS,
    VARIABLE,
    Group,
    backend_for,
    backend_named,
    chosen_backend,
)
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ConfigError, PeerLost, SyncTimeout, TransportUnavailable
from tests.support.nccl import ProcessGroupNCCL
from tests.support.rig import eventually, fork, kill

without_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="is about a machine without one")


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("npu", "hccl")])
def test_each_device_has_its_backend(device: str, backend: str) -> None:
    assert backend_for(device) == backend


@pytest.mark.parametrize("device", ["xpu", "mps", "privateuse1", ""])
def test_an_unknown_device_is_an_error_that_lists_the_known_ones_and_the_way_out(device: str) -> None:
    with pytest.raises(
        TransportUnavailable, match=rf"{device!r}; known: cpu \(gloo\), cuda \(nccl\), npu \(hccl\)"
    ) as error:
        backend_for(device)
    assert f"{VARIABLE}=gloo" in error.value.hint


@without_accelerator
def test_what_the_user_names_wins_over_the_device() -> None:
    assert chosen_backend(None) == "gloo"
    assert chosen_backend("hccl") == "hccl"


def test_the_setting_knows_the_backends_of_the_table() -> None:
    assert [Config(collective_backend=name).collective_backend for name in BACKENDS] == list(BACKENDS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{VARIABLE}.*gloo, nccl, hccl are allowed"):
        Config(collective_backend="mpi")  # type: ignore[arg-type]


@without_accelerator
def test_a_backend_that_is_not_there_says_what_it_needs_and_what_there_is() -> None:
    assert BACKENDS["gloo"].why_not() is None
    with pytest.raises(TransportUnavailable, match=r"hccl needs torch_npu.*usable here: gloo, known: gloo, nccl, hccl"):
        backend_named("hccl")


@without_accelerator
def test_threads_of_a_process_without_an_accelerator_are_given_none() -> None:
    assert in_use().type == "cpu" and in_use().current() is None
    in_use().use(None)


def group(directory: Path, seconds: float, rank: int = 0, backend: str = "gloo", size: int = 2, **peers: int) -> Group:
    named = {pid: f"rank 3 of replica {name}" for name, pid in peers.items()}

    def meet(limit: timedelta) -> dist.Store:
        return dist.FileStore(str(directory / "store"), size)

    return Group(BACKENDS[backend], meet, rank, size, peers=named, deadline_s=time.monotonic() + seconds)


def pair(directory: Path, seconds: float, backend: str = "gloo") -> tuple[Group, Group]:
    """Sender and receiver, both in this process."""
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(group, directory, seconds, rank, backend) for rank in range(2)]
        return ends[0].result(600), ends[1].result(600)


@pytest.fixture(params=["gloo", "queuing"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """gloo as it is, and used as NCCL is: with copies beside the tensors, polled, ended from outside."""
    queuing = dataclasses.replace(BACKENDS["nccl"], device="cpu", module="tests.support.nccl")
    monkeypatch.setitem(BACKENDS, "queuing", queuing)
    name: str = request.param
    return name


def test_what_the_sender_broadcasts_is_what_the_receiver_holds(tmp_path: Path, backend: str) -> None:
    sender, receiver = pair(tmp_path, 60, backend)
    for sent in (torch.arange(7), torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)):
        sending, held = sender.broadcast(sent.clone()), torch.zeros_like(sent)
        receiver.broadcast(held)()
        sending()
        assert torch.equal(held, sent)
    sender.close()
    receiver.close()


def test_no_watchdog_of_nccls_watches_a_group_and_those_of_other_groups_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queuing = dataclasses.replace(BACKENDS["nccl"], device="cpu", module="tests.support.nccl")
    monkeypatch.setitem(BACKENDS, "queuing", queuing)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    monkeypatch.setattr(ProcessGroupNCCL, "watchdogs", 0)
    for each in pair(tmp_path, 60, "queuing"):
        each.close()
    assert ProcessGroupNCCL.watchdogs == 0 and os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    ProcessGroupNCCL(dist.HashStore(), 0, 1, ProcessGroupNCCL.Options())
    assert ProcessGroupNCCL.watchdogs == 1


def test_who_waits_for_a_broadcast_of_gloos_sleeps_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    sender, receiver = pair(tmp_path, 60)
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds))
    with ThreadPoolExecutor() as pool:
        held = torch.zeros(1)
        waiting = pool.submit(receiver.broadcast(held))
        sleep(0.05)  # long enough to look a hundred times; whether it does decides the test only where it would
        sender.broadcast(torch.ones(1))()
        waiting.result(600)
    assert held.item() == 1 and slept == []


def test_a_broadcast_that_nobody_sends_ends_by_the_deadline(tmp_path: Path, backend: str) -> None:
    _sender, receiver = pair(tmp_path, 6, backend)
    with pytest.raises((SyncTimeout, RuntimeError), match=r"did not come together in time|Timed out"):
        receiver.broadcast(torch.zeros(1))()


def test_who_waits_for_a_broadcast_can_be_ended_from_another_thread(tmp_path: Path, backend: str) -> None:
    _sender, receiver = pair(tmp_path, 600, backend)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(receiver.broadcast(torch.zeros(1)))
        receiver.abort()
        with pytest.raises(PeerLost, match="the transaction was dropped"):
            waiting.result(600)


@pytest.mark.parametrize("aborted", ["before it began", "after it began"])
def test_who_lets_go_of_a_group_does_not_wait_for_what_is_under_way_in_it(
    tmp_path: Path, backend: str, aborted: str
) -> None:
    sender, receiver = pair(tmp_path, 60, backend)
    if aborted == "before it began":
        receiver.abort()
    wait = receiver.broadcast(torch.zeros(1))
    (work,) = receiver.pending
    if aborted == "after it began":
        receiver.abort()
    kept = weakref.ref(receiver)
    del wait, receiver
    gc.collect()
    assert not work.is_completed(), "the interpreter stood still until the time limit"
    sender.broadcast(torch.ones(1))()
    eventually(lambda: (gc.collect(), kept() is None)[1], "the end of what was kept")
    eventually(work.is_completed, "the end of the work: gloo ends its future first")


def test_a_rank_that_does_not_come_is_a_timeout(tmp_path: Path, backend: str) -> None:
    with pytest.raises(SyncTimeout, match="did not come together in time"):
        group(tmp_path, 0.2, backend=backend, x=os.getpid())


class Connected:
    """A group that has connected, and whose first broadcast nobody else joins: on a GPU its kernel runs until it is aborted."""

    Options = ProcessGroupNCCL.Options
    ended = threading.Event()

    def __init__(self, *_: object) -> None:
        pass

    def broadcast(self, *_: object) -> Connected:
        return self

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        self.ended.set()


def test_who_gives_up_a_group_while_it_is_made_ends_what_it_has_begun_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = dataclasses.replace(BACKENDS["nccl"], device="cpu", module=__name__, group_class="Connected")
    monkeypatch.setitem(BACKENDS, "connected", connected)
    with pytest.raises(SyncTimeout) as kept:  # with its traceback, and so with the group
        group(tmp_path, 0.5, backend="connected", size=1)
    assert Connected.ended.wait(600)
    del kept


def test_a_rank_that_dies_before_it_comes_is_lost_long_before_the_deadline(tmp_path: Path, backend: str) -> None:
    pid = fork("signal:pause")
    kill(pid)
    with pytest.raises(PeerLost, match="rank 3 of replica x ended"):
        group(tmp_path, 600, backend=backend, x=pid)
