"""The device table, and groups that end when there is nothing more to wait for."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from inference_plugin.transports.backends import (
    BACKENDS,
    VARIABLE,
    Group,
    backend_for,
    backend_named,
    chosen_backend,
    current_device,
    use_device,
)
from inference_plugin.wire.errors import PeerLost, SyncTimeout, TransportUnavailable
from tests.support.rig import fork, kill

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
def test_what_the_user_names_wins_over_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert chosen_backend() == "gloo"
    monkeypatch.setenv(VARIABLE, "hccl")
    assert chosen_backend() == "hccl"


@without_accelerator
def test_a_backend_that_is_not_there_says_what_it_needs_and_what_there_is() -> None:
    assert BACKENDS["gloo"].why_not() is None
    with pytest.raises(TransportUnavailable, match=r"hccl needs torch_npu.*usable here: gloo, known: gloo, nccl, hccl"):
        backend_named("hccl")


@without_accelerator
def test_threads_of_a_process_without_an_accelerator_are_given_none() -> None:
    assert current_device() is None
    use_device(None)


def group(directory: Path, peers: dict[int, str], seconds: float) -> Group:
    store = dist.FileStore(str(directory / "store"), 2)
    return Group(BACKENDS["gloo"], store, 0, 2, peers=peers, deadline_s=time.monotonic() + seconds)


def test_a_rank_that_does_not_come_is_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(SyncTimeout, match="did not come together in time"):
        group(tmp_path, {os.getpid(): "nobody"}, 0.2)


def test_a_rank_that_dies_before_it_comes_is_lost_long_before_the_deadline(tmp_path: Path) -> None:
    pid = fork("signal:pause")
    kill(pid)
    with pytest.raises(PeerLost, match="rank 3 of replica x ended"):
        group(tmp_path, {pid: "rank 3 of replica x"}, 600)
