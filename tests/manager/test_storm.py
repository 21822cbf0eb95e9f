"""Troubles of every kind, drawn from a seed, beside updates with the default limits; and updates without end beside quiet ones.

`WEIGHTWIRE_TEST_STORM=200` runs that many troubles for each seed (`WEIGHTWIRE_TEST_SEEDS=1,2`), `WEIGHTWIRE_TEST_SOAK=2000`
that many updates; both print what they saw.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from inference_plugin.wire.config import Config
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source
from tests.support.soak import Soak
from tests.support.storm import Storm

EVENTS = int(os.environ.get("WEIGHTWIRE_TEST_STORM", "0"))
SEEDS = [int(seed) for seed in os.environ.get("WEIGHTWIRE_TEST_SEEDS", "4").split(",")]
UPDATES = int(os.environ.get("WEIGHTWIRE_TEST_SOAK", "50"))


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_each_replica_serves_one_version_or_refuses_and_reports_say_which(
    directory: Path, seed: int
) -> None:
    with Storm(directory, seed, long_stops=bool(EVENTS), say=lambda line: print(line, flush=True)) as storm:
        storm.run(EVENTS or len(Storm.kinds))
    print(f"seed {seed}: {dict(storm.seen)}; the longest waits: {storm.said_of_waits()}", flush=True)
    assert storm.violations == []
    assert max(waited_s for waited_s, _ in storm.longest.values()) < Config().timeout_s, storm.said_of_waits()


def test_updates_without_end_take_no_more_memory_and_no_more_descriptors(start: Start) -> None:
    gc.collect()  # what earlier tests left to the collector is not of these updates
    rigs = [start(tp=1), start(tp=2)]
    processes = {"coordinator 1": rigs[0].pid, "coordinator 2": rigs[1].pid}
    processes |= {f"worker {rig.tp}.{rank}": rig.worker_pid(rank) for rig in rigs for rank in range(rig.tp)}
    soak = Soak([rig.card for rig in rigs], source, processes)
    soak.run(UPDATES)
    assert all(holds(rig, UPDATES) for rig in rigs)
    soak.assert_flat()
