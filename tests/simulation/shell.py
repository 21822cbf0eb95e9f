"""Puts simulated time, ids, channels and leases in the place of what the product's shells of rank 0 use."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from inference_plugin.net import channel
from tests.simulation.network import Network, SimulatedChannel, take_ready
from tests.simulation.transaction import SimulatedLeases, SimulatedTransaction
from tests.simulation.world import HOST, STARTED, World
from trainer_adapters import settings
from trainer_adapters.fleet import asking
from trainer_adapters.fleet import fleet as fleet_module
from trainer_adapters.update import leases, transaction

__all__ = ["enter", "simulated"]

JOBS_PER_COLLECTION = 20
"""What a job leaves, mostly the frames of errors, is garbage only at its end (`Job.let_go`)."""


class _Now:
    """The world that runs, and how many ran since the last collection of garbage."""

    world: World
    jobs = 0


def enter(world: World, network: Network) -> None:
    """From now on this world runs."""
    _Now.world = world
    _Now.jobs += 1
    if _Now.jobs % JOBS_PER_COLLECTION == 0:
        gc.collect()
    SimulatedChannel.network = network
    SimulatedLeases.world = SimulatedTransaction.world = world


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """While this lasts, the product's shells of rank 0 have simulated time, ids and channels; and Python collects garbage
    between jobs only."""
    clock = SimpleNamespace(monotonic=lambda: _Now.world.now_s, perf_counter=lambda: _Now.world.now_s)
    with contextlib.ExitStack() as stack:
        for module in (asking, fleet_module, transaction, leases):
            stack.enter_context(mock.patch.object(module, "time", clock))
        replaced: dict[tuple[Any, str], Any] = {
            (asking, "take_ready"): take_ready,
            (channel, "Channel"): SimulatedChannel,
            (transaction, "Leases"): SimulatedLeases,
            (transaction, "secrets"): SimpleNamespace(token_hex=lambda _n: _Now.world.unique("t")),
            (transaction, "os"): SimpleNamespace(getpid=lambda: getattr(_Now.world.current, "pid", 0)),
            (transaction, "addresses"): SimpleNamespace(boot_id=lambda: HOST),
            (transaction, "start_ticks"): lambda: STARTED,
            (settings, "misspelt_variables"): lambda: (),
        }
        for (module, name), value in replaced.items():
            stack.enter_context(mock.patch.object(module, name, value))
        gc.disable()
        stack.callback(gc.enable)
        gc.freeze()
        stack.callback(gc.unfreeze)
        yield
