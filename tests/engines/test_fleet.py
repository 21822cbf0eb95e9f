"""Two vLLM replicas and one of SGLang under load while they are updated; one is killed, one is added."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.engines.conftest import Checkpoint
from tests.engines.test_sglang_life import Stalling
from tests.engines.test_vllm_one_version import TOKENS, Loaded, Replay
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, weights
from tests.support.engines import Driver, eventually
from tests.support.managers import SyncManager
from tests.support.sglang_engines import SglangDriver
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

UPDATES, KILLED_IN, ADDED_FROM, ADDED_BY = 30, 10, 12, 22
REPLAYED = 6
"""Requests of each replica that are computed anew."""


class Doomed(Driver):
    """Is killed by its test."""

    def stop(self) -> None:
        pass


@pytest.mark.timeout(900)
def test_a_replica_killed_and_one_added_in_30_updates_under_load_cost_the_others_nothing(
    runtime: Path, checkpoint: Checkpoint
) -> None:
    models = checkpoint("llama", tied=False, seed=1), checkpoint("llama", tied=False, seed=2)
    with (
        ThreadPoolExecutor(3) as starting,
        Driver(runtime) as first,
        Doomed(runtime, job=first.job) as doomed,
        SglangDriver(runtime, job=first.job) as sglang,
        Driver(runtime, job=first.job) as added,
    ):
        for opened in [
            starting.submit(first.open, models[0], max_model_len=1024),
            starting.submit(doomed.open, models[0]),
            starting.submit(sglang.open, models[0]),
        ]:
            opened.result()
        loads = {"vllm": Loaded("vllm", first, models), "sglang": Loaded("sglang", sglang, models)}
        names: dict[str, list[str]] = {name: [] for name in loads}
        sources = [ModuleAdapter(load_file(model / "model.safetensors")) for model in models]
        joining = None
        with SyncManager(timeout_s=180, lease_s=180) as manager:
            for version in range(1, UPDATES + 1):
                for name, load in loads.items():
                    load.top_up(names[name])
                if version == KILLED_IN:
                    stalling = Stalling(weights(models[version % 2]))
                    update = manager.update_async(stalling, version)
                    assert stalling.stalled.wait(600)
                    doomed.kill()
                    stalling.go_on.set()
                    outcome = sorted((r.engine, r.status) for r in update.result(600).replicas)
                    assert outcome == [("sglang", "committed"), ("vllm", "committed"), ("vllm", "failed")]
                    continue
                if version == ADDED_FROM:
                    joining = starting.submit(added.open, models[0])
                if version == ADDED_BY and joining is not None:
                    joining.result()
                    caught_up = [("current", version - 1)] * 3
                    eventually(
                        lambda: [(s.state, s.version) for s in manager.replicas() if s.state != "lost"] == caught_up,  # noqa: B023
                        timeout_s=180,
                        what="the added one caught up, or a replica since the last update",
                    )
                report = manager.update(sources[version % 2], version)
                assert {r.status for r in report.replicas} == {"committed"}
                assert len({r.digest for r in report.replicas if r.digest}) == 1
                if version < KILLED_IN or version >= ADDED_BY:
                    assert len(report.replicas) == 3
            assert set(manager.versions().values()) == {UPDATES} and len(manager.versions()) == 3
            assert manager.verify(sources[UPDATES % 2]).ok
        done = {name: load.driver.wait(names[name]) for name, load in loads.items()}
        for driver in (first, sglang, added):
            assert driver.tokens(PROMPTS, COUNT) == reference(models[UPDATES % 2])
    for name, load in loads.items():
        assert {(r["finish_reason"], len(r["tokens"])) for r in done[name]} == {("length", TOKENS)}
        crossing = [r for r in done[name] if len(set(r["versions"])) > 1]
        assert crossing, "no request ran across an update"
        replay = Replay(models, "keep")
        for request in crossing[:REPLAYED]:
            replay.check(load.prompts[request["name"]], request["tokens"], request["versions"])
        assert replay.unexplained == 0
