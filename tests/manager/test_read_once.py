"""Updates from generators that can be read once, as frameworks hand them over."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from inference_plugin.wire import host_memory
from inference_plugin.wire.errors import ManifestMismatch, TransportUnavailable, WeightwireError
from tests.manager.conftest import Start
from tests.manager.test_manager import holds
from tests.support.plain_engine import checkpoint
from tests.support.rig import eventually, fork
from trainer_adapters import ExportAdapter, SyncManager
from trainer_adapters.integrations.read_once import GeneratorUpdates


def test_an_update_over_two_transports_reads_a_generator_once(start: Start) -> None:
    rig = start()
    with SyncManager(transport="zmq", catch_up="always", timeout_s=60) as manager:
        updates = GeneratorUpdates(manager, None)
        for version in (1, 2, 3):
            updates.update(iter(checkpoint(version).items()), version)
            assert holds(rig, version)


def test_an_update_that_a_second_transport_joins_succeeds_at_once(start: Start) -> None:
    rig = start()
    with SyncManager(transport="zmq", timeout_s=60) as manager:
        updates = GeneratorUpdates(manager, None)
        for version, policy in enumerate(("never", "never", "always", "never", "always"), 1):
            manager.settings.catch_up = policy  # "always" keeps each version over shm too, for hosts that join
            updates.update(iter(checkpoint(version).items()), version)
            assert holds(rig, version)


def test_a_model_that_does_not_fit_beside_itself_is_refused_and_no_other_rank_waits(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update keeps what the generator yields; other ranks gather with it to its end."""
    rig = start()
    free = host_memory.free_host_bytes
    with SyncManager(timeout_s=60) as manager:
        updates = GeneratorUpdates(manager, None)
        monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 1 << 20)
        weights = iter(checkpoint(1).items())
        with pytest.raises(TransportUnavailable, match="copy of the model of 64 MiB does not fit: 1 MiB are free"):
            updates.update(weights)
        assert next(weights, None) is None
        monkeypatch.setattr(host_memory, "free_host_bytes", free)
        updates.update(iter(checkpoint(1).items()))
    assert holds(rig, 1)


def test_no_generator_has_to_switch_gradients_off_by_itself(start: Start) -> None:
    """NeMo-RL does so around the whole update, which reads the generator in another thread."""
    rig = start()
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in checkpoint(1).items()}

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights.items():
            yield name, weight.mul_(1)  # in place: refused where gradients are on

    with SyncManager(timeout_s=60) as manager, torch.no_grad():
        updates = GeneratorUpdates(manager, None)
        for version in (1, 2):
            updates.update(export(), version)
    assert holds(rig, 1)


def test_a_tied_weight_that_a_generator_yields_under_both_names_is_checked_and_travels_once(start: Start) -> None:
    """Frameworks yield a state dict, gathered: copies, which share no memory."""
    rig = start()

    def yielded(version: int, *, tied: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        weights = checkpoint(version)
        yield from weights.items()
        yield "head.weight", weights["embed.weight"].clone() if tied else -weights["embed.weight"]

    with SyncManager(timeout_s=60) as manager:
        updates = GeneratorUpdates(manager, None)
        with pytest.raises(ManifestMismatch, match=r"no place for: head\.weight"):
            updates.update(yielded(1, tied=False))
        for version in (1, 2):
            updates.update(yielded(version))
            assert holds(rig, version)
        with pytest.raises(ManifestMismatch, match=r"head\.weight differs from embed\.weight"):
            updates.update(yielded(3, tied=False))
        assert holds(rig, 2)
        updates.update(yielded(4))
        assert holds(rig, 4)


def gathering_rank(rank: int, directory: str, fails_at: int, generators: bool) -> None:
    """One of two ranks that gather each tensor; rank 0's generator of version `fails_at` fails while the other rank gathers.
    `generators`: they are given one by one; else the update asks an export for them."""
    torch.set_num_threads(1)
    out = Path(directory)
    dist.init_process_group("gloo", store=dist.FileStore(str(out / "store"), 2), rank=rank, world_size=2)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))

    def gathered(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for position, (name, weight) in enumerate(checkpoint(version).items()):
            if version == fails_at and rank == 0 and position == 2:
                raise RuntimeError("of the test")
            parts = [torch.empty_like(half) for half in weight.chunk(2)]
            dist.all_gather(parts, weight.chunk(2)[rank].contiguous(), group=group)
            yield name, torch.cat(parts)

    manager = SyncManager(timeout_s=1.5)
    updates, export = GeneratorUpdates(manager, None), None
    for version in (1, 2, 3):
        try:
            if generators:
                updates.update(gathered(version), version)
            else:
                export = export or ExportAdapter(lambda: gathered(version), process_group=group)  # noqa: B023
                manager.update(export, version)
            seen = "served"
        except (WeightwireError, RuntimeError) as error:
            seen = str(error)
        note = out / f"rank{rank}.{version}"
        note.with_suffix(".new").write_text(json.dumps(seen))
        note.with_suffix(".new").rename(out / f"version{version}.rank{rank}")
    eventually(lambda: (out / f"version3.rank{1 - rank}").exists(), "the other rank's end")
    os._exit(0)


def start_gathering(directory: Path, **how: object) -> Callable[[int, int], str]:
    """Returns what says what became of an update on a rank."""
    out = directory / "ranks"
    out.mkdir()
    for rank in (0, 1):
        environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}
        fork("tests.manager.test_read_once:gathering_rank", environment, rank=rank, directory=str(out), **how)

    def seen(version: int, rank: int) -> str:
        path = out / f"version{version}.rank{rank}"
        told: str = json.loads(eventually(lambda: path.exists() and path.read_text(), path.name))
        return told

    return seen


@pytest.mark.parametrize("generators", [False, True], ids=["export", "generators"])
def test_no_update_begins_while_a_rank_still_gathers_for_one_that_failed(
    start: Start, directory: Path, generators: bool
) -> None:
    """Their collectives would meet: tensors of both updates in one, or a process that gloo aborts."""
    rig = start()
    seen = start_gathering(directory, fails_at=2, generators=generators)
    assert [seen(1, rank) for rank in (0, 1)] == ["served"] * 2
    assert "of the test" in seen(2, 0) and seen(2, 1) != "served"
    assert all("ranks [1] are still in the export" in seen(3, rank) for rank in (0, 1))
    assert holds(rig, 1)


def test_a_rank_whose_first_export_fails_says_so_while_another_still_gathers(start: Start, directory: Path) -> None:
    """It joins no collective of ours: that would meet the one in which the other rank waits."""
    start()
    began_s = time.monotonic()
    assert "of the test" in start_gathering(directory, fails_at=1, generators=False)(1, 0)
    assert time.monotonic() - began_s < 30, "it does not wait for the other rank's time limit"


def lone_rank(rank: int, directory: str) -> None:
    """Rank 0 of two updates alone, as TRL's asynchronous trainer does."""
    out = Path(directory)
    dist.init_process_group("gloo", store=dist.FileStore(str(out / "store"), 2), rank=rank, world_size=2)
    if rank == 0:
        alone = dist.new_group([0], backend="gloo", use_local_synchronization=True)
        manager = SyncManager(process_group=alone, timeout_s=60)
        GeneratorUpdates(manager, None, alone).update(iter(checkpoint(1).items()))
        (out / "done").touch()
    eventually(lambda: (out / "done").exists(), "rank 0's update")
    os._exit(0)


def test_a_rank_that_updates_alone_waits_for_no_other(start: Start, directory: Path) -> None:
    rig = start()
    out = directory / "ranks"
    out.mkdir()
    for rank in (0, 1):
        environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}
        fork("tests.manager.test_read_once:lone_rank", environment, rank=rank, directory=str(out))
    eventually(lambda: (out / "done").exists(), "rank 0's update")
    assert holds(rig, 1)
