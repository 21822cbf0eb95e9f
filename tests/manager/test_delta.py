"""Updates over `delta` into running replicas: what changed travels, and each serves exactly what the trainer has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.manager.conftest import Start
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected, manifest_of
from tests.support.rig import Rig, eventually, kill

Weights = dict[str, torch.Tensor]

NBYTES = manifest_of(checkpoint(0)).nbytes


def stepped(weights: Weights, seed: int) -> Weights:
    """Two elements of each tensor with other values."""
    chance = torch.Generator().manual_seed(seed)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in weights.values():
        flat = tensor.view(-1)
        flat[torch.randint(flat.numel(), (2,), generator=chance)] += 1
    return weights


def holds(rig: Rig, weights: Weights) -> bool:
    return rig.peek() == digests_expected(weights, rig.tp, rig.layers)


@pytest.mark.parametrize("install", ["copy", "standby"])
def test_replicas_that_have_the_last_version_are_sent_what_changed_and_others_everything(
    start: Start, install: Any
) -> None:
    first, second = start(tp=2), start(tp=2)
    weights = checkpoint(1)
    with SyncManager(transport="delta", install=install, timeout_s=60) as manager:
        whole = manager.update(ShardSource(weights)).egress_bytes
        assert whole > 2 * NBYTES, "each rank needs the norms"
        for seed in (1, 2, 3):
            weights = stepped(weights, seed)
            assert manager.update(ShardSource(weights)).egress_bytes < 0.1 * whole
            assert holds(first, weights) and holds(second, weights)
        assert manager.update(ShardSource(weights)).egress_bytes == 0, "nothing changed"
        assert holds(first, weights) and manager.verify(ShardSource(weights)).ok

        second.ask("fault", rank=1, step="install")  # undone; what it staged was compared all the same
        before, weights = weights, stepped(weights, 4)
        (failed,) = manager.update(ShardSource(weights)).failed
        assert failed.replica == second.replica and holds(second, before) and holds(first, weights)
        weights = stepped(weights, 5)
        assert manager.update(ShardSource(weights)).egress_bytes < 0.1 * whole
        assert holds(first, weights) and holds(second, weights)

        kill(second.pid)
        third = start(tp=1)
        weights = stepped(weights, 6)
        eventually(lambda: third.replica in manager.versions(), "the new replica")
        report = manager.update(ShardSource(weights))
        assert NBYTES < report.egress_bytes < NBYTES + 0.1 * whole
        assert holds(first, weights) and holds(third, weights)

        weights = checkpoint(2)
        assert manager.update(ShardSource(weights)).egress_bytes == whole / 2 + NBYTES, "all of it changed"
        assert holds(first, weights) and holds(third, weights) and manager.verify(ShardSource(weights)).ok
