"""The Ray example: trainer ranks and vLLM replicas as actors of a real Ray, and what happens when Ray ends one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from inference_plugin.net import addresses
from inference_plugin.net.processes import has_ended
from inference_plugin.wire.errors import PeerLost
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import PROMPTS
from tests.support.engines import ENVIRONMENT, ROOT, eventually
from tests.support.greedy import greedy_batch

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RANKS, REPLICAS = 2, 2


class Job:
    """The example's actors in a Ray of their own."""

    def __init__(self, example: ModuleType, model: Path) -> None:
        self.example, self.model = example, model
        self.version = 0
        self.replicas = example.start_replicas(REPLICAS, model)
        self.trainers = example.start_trainers(RANKS, model)
        self.wait_for_replicas()

    def wait_for_replicas(self) -> None:
        self.example.wait_for_replicas(self.trainers, self.replicas)

    def tokens(self) -> list[list[list[int]]]:
        """What each replica says, greedily."""
        asked = [replica.generate.remote(PROMPTS) for replica in self.replicas]
        return [[answers[0] for answers in ray.get(each, timeout=300)] for each in asked]

    def expected(self, model: Path) -> list[list[list[int]]]:
        return [greedy_batch(model, PROMPTS, 16)] * REPLICAS

    def served(self) -> list[int | None]:
        versions: list[int | None] = ray.get(self.trainers[0].served.remote(), timeout=600)
        return versions

    def update(self) -> dict[str, float]:
        self.version += 1
        figures: dict[str, float] = self.example.Weightwire(self.trainers).update_weights(self.version)
        return figures


@pytest.fixture(scope="module")
def job(runtime: Path, checkpoint: Checkpoint) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(runtime))
        patch.setenv("WEIGHTWIRE_JOB", f"ray-{os.getpid()}")
        patch.syspath_prepend(str(ROOT / "examples" / "ray_rl"))
        import run as example

        patch.setattr(example, "START_S", 900)  # on a machine that does much else

        example.start_ray()
        try:
            yield Job(example, checkpoint("llama", tied=False, seed=1))
            cards = addresses.discover()
        finally:
            ray.shutdown()
            for name in ("run", "actors"):
                sys.modules.pop(name, None)
        pids = [pid for card in cards for pid in (card.pid, *(worker.pid for worker in card.workers))]
        eventually(lambda: all(map(has_ended, pids)), what="the end of the replicas' processes")
        assert addresses.discover() == []


def test_the_replicas_say_what_the_trained_model_says(job: Job, tmp_path: Path, capfd: Any) -> None:
    before = job.tokens()
    assert before == job.expected(job.model)
    job.example.train(job.trainers, job.replicas, job.example.Weightwire(job.trainers), 512, range(1, 3))
    job.version = 2
    steps = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [(step["step"], step["version"], step["replicas"]) for step in steps] == [(1, 1, 2), (2, 2, 2)]
    exported = tmp_path / "exported"
    ray.get([trainer.export.remote(str(job.model), str(exported)) for trainer in job.trainers], timeout=300)
    assert job.tokens() == job.expected(exported) != before
    assert job.served() == [2, 2]


def test_a_replica_that_cannot_start_ends_the_example_at_once_and_says_why(job: Job, tmp_path: Path) -> None:
    with pytest.raises(ray.exceptions.ActorDiedError, match=r"(?s)raised in its creation task.*/nothing'"):
        job.example.wait_for_replicas(job.trainers, job.example.start_replicas(1, tmp_path / "nothing"))


def test_a_killed_trainer_actor_is_a_typed_error_and_new_ones_take_over(job: Job) -> None:
    before = job.tokens()
    ray.kill(job.trainers[1])
    with pytest.raises(PeerLost, match="trainer rank 1's process ended") as caught:
        job.update()
    assert (caught.value.side, caught.value.rank, caught.value.version) == ("trainer", 1, job.version)
    assert job.tokens() == before
    ray.kill(job.trainers[0])
    job.trainers = job.example.start_trainers(RANKS, job.model)
    assert job.update()["replicas"] == REPLICAS
    assert job.tokens() == job.expected(job.model)


def test_a_replica_actor_that_ray_restarts_is_brought_up_by_itself(job: Job) -> None:
    cards = addresses.discover()
    assert len(cards) == REPLICAS
    ray.kill(job.replicas[0], no_restart=False)
    eventually(lambda: len(addresses.discover()) < REPLICAS, what="the end of the killed actor's engine")
    assert job.update()["replicas"] >= 1
    eventually(
        lambda: job.served() == [job.version] * REPLICAS,
        timeout_s=300,
        what="the restarted replica with the last version",
    )
    assert {card.replica for card in addresses.discover()} != {card.replica for card in cards}
    assert job.tokens() == job.expected(job.model)
    assert job.update()["replicas"] == REPLICAS
    assert job.served() == [job.version] * REPLICAS
