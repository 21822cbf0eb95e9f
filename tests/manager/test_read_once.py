"""Updates from generators that can be read once, as frameworks hand them over."""

from __future__ import annotations

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
