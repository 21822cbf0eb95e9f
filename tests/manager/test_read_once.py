"""Updates from generators that can be read once, as frameworks hand them over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from inference_plugin.wire.errors import ManifestMismatch
from tests.manager.conftest import Start
from tests.manager.test_manager import holds
from tests.support.plain_engine import checkpoint
from trainer_adapters import SyncManager
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
