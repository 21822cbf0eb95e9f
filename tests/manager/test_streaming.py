"""`install="streaming"`: replicas stand before the bytes come, each by itself; who is silent costs the others nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from inference_plugin.install.storages import held_tensors
from inference_plugin.net.channel import Channel
from inference_plugin.transports.segment import SegmentAddress
from inference_plugin.transports.stream import StreamSender
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import (
    ConfigError,
    ManifestMismatch,
    NotFinite,
    TornReplica,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.messages import (
    AskStands,
    Begin,
    Body,
    Bucket,
    Commit,
    Describe,
    GroupStatus,
    OpenGroup,
    Seal,
    WorkerCard,
)
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source, waiting
from tests.manager.test_silence import LEASE_S, SILENCE_S, TIMEOUT_S, WAIT_S, stops
from tests.support.managers import SyncManager
from tests.support.phases import AtPhase
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import Rig, eventually
from trainer_adapters import ModuleAdapter, Quorum
from trainer_adapters.fleet import session
from trainer_adapters.sources.base import LocalSlice

__all__ = ["stops"]


def statuses(rig: Rig) -> list[GroupStatus]:
    """Where each worker stands with the group."""
    found = []
    for worker in rig.card.workers:
        with Channel(worker.address) as channel:
            answer: WorkerCard = channel.request(Describe(), WorkerCard, timeout_s=60)
            found += answer.groups
    return found


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"install": "streaming", "transport": "zmq"}, "does not go over transport 'zmq'"),
        ({"install": "standby", "transport": "stream"}, "does not go over transport 'stream'"),
        ({"install": "streaming", "stragglers": "all"}, "holds the new version before the others are ready"),
        ({"install": "streaming", "stragglers": Quorum(1)}, "holds the new version before the others are ready"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_anything_is_asked(
    start: Start, settings: dict[str, Any], words: str
) -> None:
    rig = start()
    with SyncManager(timeout_s=60, **settings) as manager, pytest.raises(ConfigError, match=words):
        manager.update(source(1), 1)
    assert holds(rig, 0)


def test_a_worker_that_cannot_map_the_trainer_s_memory_is_sent_the_bytes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = msgspec.msgpack.encode(SegmentAddress("nobody", "another host", 1, 1, 4096, 0))
    monkeypatch.setattr(StreamSender, "probe", lambda self: nowhere)
    rig = start(tp=2)
    with SyncManager(install="streaming", timeout_s=60) as manager:
        for version in (1, 2, 3):
            report = manager.update(source(version), version)
            assert holds(rig, version) and report.egress_bytes >= report.bytes
            assert manager.verify(source(version)).ok


def test_nothing_is_sent_in_messages_on_one_host(start: Start) -> None:
    rig = start(tp=2)
    with SyncManager(install="streaming", timeout_s=60) as manager:
        assert manager.update(source(1), 1).egress_bytes == 0
    assert holds(rig, 1)


def test_a_number_that_is_served_is_refused_before_a_byte_of_it_is_written(start: Start) -> None:
    """What is streamed can't be compared with what it writes over."""
    rig = start(tp=2)
    with SyncManager(install="streaming", timeout_s=60) as manager:
        manager.update(source(1), 1)
        with pytest.raises(VersionConflict, match="version 1 is served already, and streaming would write"):
            manager.update(source(2), 1)
        assert holds(rig, 1) and {status.state for status in statuses(rig)} == {"idle"}
        manager.update(source(2), 2)
    assert holds(rig, 2)


@pytest.mark.parametrize(
    ("way", "held", "extra"),
    [
        ({"transport": "zone"}, "nothing", "second set"),
        ({"transport": "shm", "install": "standby"}, "one segment", "second set"),
        ({"transport": "shm", "install": "copy"}, "two segments", "nothing"),
        ({"install": "streaming"}, "buckets", "nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_report_says_what_each_way_holds(start: Start, way: dict[str, Any], held: str, extra: str) -> None:
    start()
    with SyncManager(timeout_s=60, **way) as manager:
        for version in (1, 2):
            report = manager.update(source(version), version)
        config = manager.settings.config
    segment = -(-report.bytes // 4096) * 4096
    sizes = {"nothing": (0, 0), "one segment": (segment, 1), "two segments": (segment, 2)}
    size, count = sizes.get(held, (config.bucket_bytes, config.buffers))
    assert count * size <= report.held_bytes <= count * (size + 4096 * bool(size))
    assert (report.replicas[0].extra_bytes > 0) == (extra != "nothing")
    taken = report.replicas[0]
    assert report.memory == {
        "trainer": report.held_bytes,
        f"{taken.transport}/{taken.install}": taken.extra_bytes,
    }


def test_bytes_wait_until_the_engine_stands(start: Start) -> None:
    rig = start(tp=2)
    with SyncManager(install="streaming", timeout_s=60) as manager:
        rig.ask("hold")
        pending = manager.update_async(source(1), 1)
        eventually(lambda: waiting(rig) > 0, "the commit at the held step boundary")
        assert {worker.state for worker in statuses(rig)} == {"receiving"}
        rig.ask("go on")
        assert pending.result(600).failed == ()
    assert holds(rig, 1)


def test_auto_streams_into_replicas_that_stand_and_lack_the_memory_and_into_no_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs = [start(tp=2), start()]
    free_bytes = [0]
    monkeypatch.setattr(session, "free_host_bytes", lambda: free_bytes[0])
    with SyncManager(timeout_s=60) as manager:

        def installs(version: int) -> set[tuple[str, str]]:
            report = manager.update(source(version), version)
            assert report.failed == () and all(holds(rig, version) for rig in rigs)
            return {(replica.install, replica.transport) for replica in report.replicas}

        assert installs(1) == {("standby", "shm")}
        manager.pause()
        assert installs(2) == {("streaming", "stream")}
        free_bytes[0] = 1 << 30
        assert installs(3) == {("standby", "shm")}
        manager.resume()
        assert installs(4) == {("standby", "shm")}


def test_trainers_that_update_in_turn_each_in_its_own_way_agree_on_it_anew(start: Start) -> None:
    rigs = [start(tp=2), start()]
    ways: list[dict[str, Any]] = [
        {"install": "streaming"},
        {"install": "standby", "transport": "zmq"},
        {"install": "copy", "transport": "shm"},
    ]
    with contextlib.ExitStack() as stack:
        managers = [stack.enter_context(SyncManager(timeout_s=60, **way)) for way in ways]
        for version, (way, manager) in enumerate(
            itertools.islice(itertools.cycle(zip(ways, managers, strict=True)), 9), 1
        ):
            report = manager.update(source(version), version)
            assert {r.install for r in report.replicas} == {way["install"]} and report.failed == ()
            assert all(holds(rig, version) for rig in rigs)


@pytest.mark.parametrize(
    ("way", "outcomes"), [("streaming", ["committed", "SyncTimeout"]), ("copy", ["VersionConflict", "committed"])]
)
def test_of_two_managers_of_one_group_at_a_time_the_loser_s_error_names_the_process_of_the_other(
    start: Start, way: Any, outcomes: list[str]
) -> None:
    """What is streamed is being committed from its first byte on; any other update is overtaken by the later one."""
    rig, found, words = start(tp=2), ["", ""], ["", ""]

    def updates(number: int, manager: SyncManager, seed: int, weights: ShardSource) -> None:
        try:
            manager.update(weights, seed)
            found[number] = "committed"
        except WeightwireError as error:
            found[number], words[number] = type(error).__name__, str(error)

    class Met(ShardSource):
        def slices(self) -> Iterator[LocalSlice]:
            for number, each in enumerate(super().slices()):
                if number == 3:
                    updates(1, later, 3, source(3))
                yield each

    with (
        SyncManager(install=way, timeout_s=60, on_failure="raise") as first,
        SyncManager(install="copy", transport="zmq", timeout_s=60, on_failure="raise") as later,
    ):
        first.update(source(1), 1)
        updates(0, first, 2, Met(checkpoint(2)))
        assert found == outcomes and holds(rig, 2 + outcomes.index("committed"))
        assert f"another SyncManager {socket.gethostname()}/{os.getpid()}/" in max(words)
        for version, manager in ((4, later), (5, first)):
            manager.update(source(version), version)
            assert holds(rig, version)


@pytest.mark.parametrize("kind", [OpenGroup, Begin, Commit, AskStands, Bucket, Seal])
def test_one_that_falls_silent_at_any_step_costs_the_other_nothing_and_the_next_update_heals_it(
    start: Start, stops: Any, kind: type[Body]
) -> None:
    healthy, doomed = start(), start(tp=2)
    config = Config(timeout_s=TIMEOUT_S, lease_s=LEASE_S, control_timeout_s=SILENCE_S)
    with SyncManager(install="streaming", config=config) as manager:
        if kind is not OpenGroup:
            manager.update(source(1), 1)
        stops(doomed, "replica", kind)
        began_s = time.monotonic()
        report = manager.update(source(2), 2)
        assert time.monotonic() - began_s < WAIT_S
        assert {r.replica: r.status for r in report.replicas} == {
            healthy.replica: "committed", doomed.replica: "failed"
        }  # fmt: skip
        assert holds(healthy, 2)
        stops.over()

        versions = itertools.count(3)

        def takes_the_next_one() -> bool:
            version = next(versions)
            took = manager.update(source(version), version).failed == ()
            return took and holds(doomed, version) and holds(healthy, version)

        eventually(takes_the_next_one, "the one that was silent took an update")


def test_an_error_after_the_first_byte_says_what_became_of_the_replica(start: Start) -> None:
    rig = start(tp=2)
    with SyncManager(install="streaming", timeout_s=60, on_failure="raise") as manager:
        manager.update(source(1), 1)

        def fails() -> None:
            raise RuntimeError("the trainer's own")

        with AtPhase("seal", fails).registered(), pytest.raises(WeightwireError, match="the trainer's own") as raised:
            manager.update(source(2), 2)
        assert "refuses to generate (torn) until the next update" in str(raised.value)
        eventually(lambda: {status.state for status in statuses(rig)} == {"torn"}, "all ranks are torn")
        manager.update(source(3), 3)
    assert holds(rig, 3)


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        part = module
        for step in path:
            if not hasattr(part, step):
                part.add_module(step, nn.Module())
            part = getattr(part, step)
        part.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return module


class Replaced(ModuleAdapter):
    """A model whose last parameter is replaced by one of another shape after the ranks have agreed."""

    def slices(self) -> Iterator[LocalSlice]:
        assert self._module is not None
        *_, (_, holder, name, parameter) = held_tensors(self._module)
        holder[name] = nn.Parameter(torch.cat([parameter, parameter]), requires_grad=False)
        return super().slices()


def test_a_model_that_changed_after_the_ranks_agreed_leaves_the_replica_as_it_was(start: Start) -> None:
    """Bytes are installed as they come, so that all of the model is compared before the first of them."""
    rig = start()
    with SyncManager(install="streaming", timeout_s=60) as manager:
        msgspec.structs.force_setattr(
            manager.settings.config, "bucket_bytes", 1600
        )  # the first are full before the last tensor
        manager.update(ModuleAdapter(module_of(checkpoint(1))), 1)
        assert holds(rig, 1)
        with pytest.raises(ManifestMismatch, match="the model changed after its manifest was made"):
            manager.update(Replaced(module_of(checkpoint(2))), 2)
        assert holds(rig, 1)
        assert not any(status.state == "torn" for status in statuses(rig))
        assert manager.verify(ModuleAdapter(module_of(checkpoint(1)))).ok
        manager.update(ModuleAdapter(module_of(checkpoint(3))), 3)
        assert holds(rig, 3)


def test_weights_that_are_not_finite_are_not_served(start: Start) -> None:
    rig = start(tp=2)
    poisoned = checkpoint(2)
    poisoned["norm.weight"][0] = float("nan")
    with SyncManager(install="streaming", timeout_s=60, check_finite=True) as manager:
        manager.update(source(1), 1)
        with pytest.raises(NotFinite) as raised:
            manager.update(ShardSource(poisoned), 2)
        assert "is torn" in raised.value.hint and "nothing was applied" not in raised.value.hint
        eventually(lambda: {status.state for status in statuses(rig)} == {"torn"}, "all ranks are torn")
        manager.update(source(3), 3)
    assert holds(rig, 3)


def test_an_installation_that_fails_on_one_rank_where_the_other_wrote_tears_the_replica(start: Start) -> None:
    rig = start(tp=2)
    with SyncManager(install="streaming", timeout_s=60) as manager:
        manager.update(source(1), 1)
        rig.ask("fault", step="install", rank=1)
        with pytest.raises(TornReplica):
            manager.update(source(2), 2)
        manager.update(source(3), 3)
    assert holds(rig, 3)
