"""RL on Ray: trainer ranks and vLLM replicas are actors; Weightwire stands where the framework's own synchronizer stood.

    pip install '.[ray]'
    python examples/ray_rl/run.py MODEL [--steps 4] [--replicas 2] [--export DIR]

Ray places actors, gives them GPUs, restarts them. Weightwire needs nothing of it: replicas announce themselves, and
the trainer's ranks find them (../../docs/ray.md).
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
from actors import PROMPT_TOKENS, SAMPLES, Replica, Sample, Trainer

PROMPTS = 4
START_S, STEP_S = 300, 300
JOB = ("WEIGHTWIRE_JOB", "WEIGHTWIRE_RUNTIME_DIR")


class WeightSynchronizer(Protocol):
    """What a framework has between training and generation: verl's `CheckpointEngineManager.update_weights`, NeMo-RL's refit."""

    def update_weights(self, global_step: int) -> dict[str, float]:
        """Afterwards all replicas serve the trainer's weights. Returns figures for the log."""


class Weightwire:
    """The whole of it. It knows no replica, pauses nothing and frees nothing: between two decoding steps, on all ranks of a
    replica or none, the weights are the new ones."""

    def __init__(self, trainers: Sequence[Any]) -> None:
        self.trainers = trainers

    def update_weights(self, global_step: int) -> dict[str, float]:
        updates = [trainer.update_weights.remote(global_step) for trainer in self.trainers]
        # Rank 0 first: its error says what happened to the others.
        figures: list[dict[str, float]] = [ray.get(update, timeout=STEP_S) for update in updates]
        return figures[0]


def start_ray() -> None:
    """Actors have the environment of their node's raylet, not of this process: what decides who belongs together is sent
    along. A job of its own keeps apart what else runs on these hosts."""
    job = {"WEIGHTWIRE_JOB": f"ray-{os.getpid()}"} | {name: os.environ[name] for name in JOB if name in os.environ}
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    ray.init(runtime_env={"env_vars": job | {"PYTHONPATH": path}}, include_dashboard=False, log_to_driver=False)


def start_trainers(ranks: int, model: Path, **options: Any) -> list[Any]:
    """All ranks of a trainer, which found each other."""
    trainers = [Trainer.remote(rank, ranks) for rank in range(ranks)]  # type: ignore[attr-defined]
    meeting = ray.get(trainers[0].meeting.remote(), timeout=START_S)
    ray.get([trainer.begin.remote(meeting, str(model), **options) for trainer in trainers], timeout=START_S)
    return trainers


def start_replicas(count: int, model: Path) -> list[Any]:
    """Replicas that are starting; `wait_for_replicas` tells when they are there."""
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
    return [Replica.remote(str(model), **options) for _ in range(count)]  # type: ignore[attr-defined]


def wait_for_replicas(trainers: Sequence[Any], replicas: Sequence[Any]) -> None:
    """Raises why an actor died. One whose constructor failed never announces itself."""
    ray.get([replica.__ray_ready__.remote() for replica in replicas], timeout=START_S)
    ray.get(trainers[0].wait_for_replicas.remote(len(replicas), START_S), timeout=START_S + STEP_S)


def draw(replicas: Sequence[Any], vocabulary: int, seed: int) -> tuple[list[Sample], float]:
    """A batch from all replicas, and its mean reward: the share of an answer's tokens in the lower half of the vocabulary."""
    choose = random.Random(seed)
    asked = []
    for replica in replicas:
        prompts = [[choose.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
        asked.append((prompts, replica.generate.remote(prompts, samples=SAMPLES, temperature=1.0)))
    samples, everything = [], []
    for prompts, answer in asked:
        for prompt, answers in zip(prompts, ray.get(answer, timeout=STEP_S), strict=True):
            rewards = [sum(token < vocabulary // 2 for token in tokens) / len(tokens) for tokens in answers]
            mean = sum(rewards) / len(rewards)
            samples += [Sample(prompt, tokens, r - mean) for tokens, r in zip(answers, rewards, strict=True)]
            everything += rewards
    return samples, sum(everything) / len(everything)


def train(
    trainers: Sequence[Any], replicas: Sequence[Any], synchronizer: WeightSynchronizer, vocabulary: int, steps: range
) -> None:
    """The framework's loop."""
    for step in steps:
        samples, reward = draw(replicas, vocabulary, seed=step)
        parts = [samples[rank :: len(trainers)] for rank in range(len(trainers))]
        learning = [trainer.learn.remote(part) for trainer, part in zip(trainers, parts, strict=True)]
        ray.get(learning, timeout=STEP_S)
        print(json.dumps({"step": step, "reward": round(reward, 3), **synchronizer.update_weights(step)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2, help="of the trainer")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--export", type=Path, help="write the trained model there")
    arguments = parser.parse_args()
    start_ray()
    try:
        model = arguments.model.resolve()
        replicas = start_replicas(arguments.replicas, model)
        trainers = start_trainers(arguments.ranks, model)
        wait_for_replicas(trainers, replicas)
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        train(trainers, replicas, Weightwire(trainers), vocabulary, range(1, arguments.steps + 1))
        if arguments.export is not None:
            exported = str(arguments.export.resolve())
            ray.get([trainer.export.remote(str(model), exported) for trainer in trainers], timeout=STEP_S)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
