"""Fully asynchronous RL: rollouts, training and weight updates go on at the same time.

    python examples/async_rl/run.py --model .models/smollm2-135m-instruct [--engine sglang] [--max-staleness 2]

- Rollout threads ask the engine for one batch of answers after the other; they never wait for the trainer, but for a
  full queue. Each sample carries the versions that it may have been made with.
- The trainer learns from what is in the queue. A sample whose oldest version is more than `--max-staleness` behind the
  weights that learn from it is dropped, and counted.
- An update travels while the next batch is being computed: the trainer waits for `wait_released` only, before it changes
  the weights again. Requests in flight go on over it (`in_flight="keep"`).

`--max-staleness 0` is synchronous RL by the same code, 1 is one step off. The reward asks for no tokenizer: the share of an
answer's tokens in the lower half of the vocabulary. One process trains here; sharded trainers differ in the source only
(../trainers).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rl_smollm2"))
from server import Server, running_server

from trainer_adapters import ModuleAdapter, PendingUpdate, SyncManager

PROMPTS, SAMPLES, PROMPT_TOKENS, ANSWER_TOKENS = 4, 4, 8, 16
BATCH = PROMPTS * SAMPLES
ROLLOUT_THREADS = 2


@dataclass(frozen=True)
class Sample:
    """One answer; `oldest` and `newest` bound the versions that its tokens were made with."""

    prompt: list[int]
    answer: list[int]
    advantage: float
    reward: float
    oldest: int
    newest: int


class Versions:
    """Which version the engine serves, as far as the trainer knows: at least `served`, at most `sent`."""

    def __init__(self) -> None:
        self.served = self.sent = 0

    def committed(self, report: Any) -> None:
        self.served = report.version


class Rollouts:
    """Threads that keep the queue full."""

    def __init__(self, server: Server, versions: Versions, vocabulary: int, staleness: int) -> None:
        self.samples: queue.Queue[list[Sample]] = queue.Queue(maxsize=max(1, staleness))
        self.failure: BaseException | None = None
        self._server, self._versions, self._vocabulary = server, versions, vocabulary
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(ROLLOUT_THREADS)]
        for thread in self._threads:
            thread.start()

    def take(self) -> list[Sample]:
        """The next batch. Raises what ended the rollouts."""
        while self.failure is None:
            try:
                return self.samples.get(timeout=1.0)
            except queue.Empty:
                continue
        raise self.failure

    def stop(self) -> None:
        self._ending.set()
        while any(thread.is_alive() for thread in self._threads):
            try:
                self.samples.get(timeout=0.1)  # a thread may wait for room
            except queue.Empty:
                continue

    def _run(self, seed: int) -> None:
        choose = random.Random(seed)
        try:
            while not self._ending.is_set():
                prompts = [
                    [choose.randrange(3, self._vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)
                ]
                self.samples.put(self._draw(prompts))
        except BaseException as error:  # noqa: BLE001 -- the trainer raises it
            self.failure = error

    def _draw(self, prompts: Sequence[list[int]]) -> list[Sample]:
        oldest = self._versions.served
        groups = self._server.complete(prompts, max_tokens=ANSWER_TOKENS, samples=SAMPLES, temperature=1.0)
        newest = self._versions.sent
        drawn: list[Sample] = []
        for prompt, answers in zip(prompts, groups, strict=True):
            rewards = [
                sum(t < self._vocabulary // 2 for t in answer.token_ids) / max(1, len(answer.token_ids))
                for answer in answers
            ]
            mean = sum(rewards) / len(rewards)
            drawn += [
                Sample(prompt, answer.token_ids, reward - mean, reward, oldest, newest)
                for answer, reward in zip(answers, rewards, strict=True)
            ]
        return drawn


def learn(model: Any, samples: Sequence[Sample]) -> torch.Tensor:
    """The policy gradient's loss of a batch, with a baseline per prompt."""
    longest = max(len(sample.answer) for sample in samples)
    ids = torch.zeros(len(samples), PROMPT_TOKENS + longest, dtype=torch.long)
    mask = torch.zeros(len(samples), longest)
    for row, sample in enumerate(samples):
        ids[row, : PROMPT_TOKENS + len(sample.answer)] = torch.tensor(sample.prompt + sample.answer)
        mask[row, : len(sample.answer)] = 1
    logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1].float()
    chosen = logits.log_softmax(-1).gather(2, ids[:, PROMPT_TOKENS:, None]).squeeze(2)
    advantages = torch.tensor([sample.advantage for sample in samples])
    return -(chosen * mask * advantages[:, None]).sum() / mask.sum()


def train(server: Server, arguments: argparse.Namespace) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.0)
    source = ModuleAdapter(model, dtype_rules={"*": torch.bfloat16})
    versions = Versions()
    with SyncManager(in_flight="keep", timeout_s=300) as manager:
        manager.on("committed", versions.committed)
        rollouts = Rollouts(server, versions, model.config.vocab_size, arguments.max_staleness)
        try:
            pending: PendingUpdate | None = None
            dropped = 0
            version = 0
            while version < arguments.steps:
                drawn = rollouts.take()
                samples = [s for s in drawn if version - s.oldest <= arguments.max_staleness]
                dropped += len(drawn) - len(samples)
                if not samples:
                    continue
                learn(model, samples).backward()
                overlapped = pending is not None and not pending.done()
                if pending is not None:
                    pending.wait_released()  # the last update has read the weights: they may change
                optimizer.step()
                optimizer.zero_grad()
                if pending is not None:
                    pending.result().raise_failed()
                version += 1
                versions.sent = version
                pending = manager.update_async(source, version)
                if arguments.max_staleness == 0:
                    pending.result()
                tell(version, samples, dropped, overlapped)
            assert pending is not None
            pending.result().raise_failed()
            print(json.dumps({"verified": manager.verify(source).ok, "served": list(manager.versions().values())}))
        finally:
            rollouts.stop()


def tell(version: int, samples: Sequence[Sample], dropped: int, overlapped: bool) -> None:
    print(
        json.dumps(
            {
                "version": version,
                "reward": round(sum(s.reward for s in samples) / len(samples), 4),
                "spans": sorted({(s.oldest, s.newest) for s in samples}),
                "staleness": max(version - 1 - s.oldest for s in samples),
                "dropped": dropped,
                "learned while the last update travelled": overlapped,
            }
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--lr", type=float, default=5e-5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ww-async-") as directory:
        os.environ["WEIGHTWIRE_RUNTIME_DIR"] = directory
        environment = {"WEIGHTWIRE_RUNTIME_DIR": directory}
        with running_server(arguments.engine, arguments.model, Path(directory) / "engine.log", environment) as server:
            train(server, arguments)


if __name__ == "__main__":
    main()
