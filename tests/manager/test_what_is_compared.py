"""What a source yields is what its boxes say, and what a verification calls equal was compared whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from inference_plugin.engines.coordinator import open_coordinator
from inference_plugin.engines.operations import RankOperation, RankReply
from inference_plugin.net import addresses
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.messages import BoxDigest, RankVerify, WorkerCard
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source
from tests.support.plain_engine import ShardSource, checkpoint
from tests.worker.test_coordinator import Control
from trainer_adapters import SyncManager
from trainer_adapters.sources.base import LocalSlice


class Wrong(ShardSource):
    """A source of somebody's own that yields something else than its manifest says for the embedding."""

    def __init__(self, seed: int, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(checkpoint(seed))
        self.make = make

    def slices(self) -> Iterator[LocalSlice]:
        for item in super().slices():
            yield LocalSlice(item.box, self.make(item.tensor)) if item.box.tensor == 0 else item


@pytest.mark.parametrize("shape", [(8, 16), (16, 16, 1), (256,)])
def test_a_tensor_whose_shape_is_another_one_than_the_engines_differs(start: Start, shape: tuple[int, ...]) -> None:
    start()
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)
        name = "layers.0.out.weight"
        report = manager.verify(ShardSource(checkpoint(1) | {name: torch.zeros(shape, dtype=torch.bfloat16)}))
    assert not report.ok and f"shape {list(shape)}" in report.replicas[0].differ[0]
    assert report.replicas[0].differ[1] == f"held by no rank: {name} (1 in all)"


@pytest.mark.parametrize("transport", ["shm", "zmq", "delta", "nixl"])
def test_a_slice_of_another_shape_or_kind_than_its_box_is_refused_before_it_travels(
    start: Start, transport: str
) -> None:
    rig = start()
    with SyncManager(transport=transport, timeout_s=60) as manager:
        manager.update(source(1), 1)
        for make in (
            lambda tensor: tensor.T.contiguous(),  # as many bytes, in other places
            lambda tensor: tensor.T,
            lambda tensor: tensor[:2],
            lambda tensor: tensor.to(torch.int32),
        ):
            with pytest.raises(ManifestMismatch, match=r"the source gave .* for embed\.weight\[0:48, 0:16\]"):
                manager.update(Wrong(2, make), 2)
            assert holds(rig, 1)
        manager.update(source(2), 2)
        assert holds(rig, 2)


@pytest.mark.parametrize("rows", [2, 4])
def test_a_tensor_of_which_no_rank_reads_a_part_back_is_not_equal(directory: Path, rows: int) -> None:
    """A name that one rank reports must not stand for the rows of the ranks that report nothing."""
    tensor = torch.arange(8, dtype=torch.float32).view(4, 2)
    held = BoxDigest("a", (0, 0), (rows, 2), "float32", digest_bytes(tensor[:rows].numpy()))

    def answers(operation: RankOperation) -> list[RankReply]:
        found = [RankVerify(0, 1, (held,)), RankVerify(1, 1, ())]
        return [RankReply(operation.nonce, rank, verify=found[rank]) for rank in range(2)]

    replica_id = addresses.new_replica_id("plain")
    nowhere = addresses.ipc_address(replica_id, "x")  # no worker is asked: the coordinator reads back
    cards = [
        WorkerCard(replica_id, rank, rank, 0, os.getpid(), addresses.boot_id(), nowhere, "cpu", 0) for rank in range(2)
    ]
    coordinator = open_coordinator(
        Control(answers), replica_id, cards, engine="plain", engine_version="0", model="m", tp=2
    )
    try:
        with SyncManager(timeout_s=60) as manager:
            (replica,) = manager.verify(ShardSource({"a": tensor})).replicas
    finally:
        coordinator.close()
    assert replica.differ == (() if rows == 4 else ("held by no rank: a[2:4, 0:2] (1 in all)",))
    assert replica.ok == (rows == 4)
