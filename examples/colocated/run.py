"""Trainer and engine on the same devices: the engine's memory is the trainer's while it trains.

    python examples/colocated/run.py --model .models/smollm2-135m-instruct [--engine sglang] [--level 1]

Each step: serve (samples) -> sleep -> train -> wake the weights -> update -> wake the rest -> serve. Level 2 is for engines
that needn't keep a copy of weights that are replaced anyway. Where the engine can't sleep (a CPU, or started without sleep
mode) it is paused instead: the same order, and no memory is released.

Whatever fails in between, the engine goes on at the end of the `with`, or with the end of this process. On a GPU start the
engine with `--enable-sleep-mode` (vLLM) or `--enable-memory-saver` (SGLang; level 1 also wants
`--enable-weights-cpu-backup`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rl_smollm2"))
from server import DemoError, Server, job_directory, running_server

from inference_plugin.wire.errors import EngineUnsupported
from weightwire import ModuleAdapter, SyncManager

PROMPTS = [[5, 17, 80, 3], [9, 2, 41]]
ANSWER_TOKENS = 12


@contextmanager
def memory_of_the_engine(manager: SyncManager, level: Literal[1, 2]) -> Iterator[bool]:
    """The engines stand still inside; whether they sleep. At the end they generate again."""
    try:
        manager.sleep(level)
    except EngineUnsupported as error:
        print(f"paused instead of put to sleep: {error.message}", file=sys.stderr)
        with manager.paused():
            yield False
        return
    try:
        yield True
    finally:
        manager.wake_up().raise_failed()


def learn(model: Any, optimizer: torch.optim.Optimizer, answers: list[list[int]]) -> None:
    """One step on the engine's own answers: any loss does here."""
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(server: Server, arguments: argparse.Namespace) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
    source = ModuleAdapter(model, dtype_rules="engine")
    with SyncManager(in_flight="recompute", timeout_s=300) as manager:
        for version in range(1, arguments.steps + 1):
            groups = server.complete(PROMPTS, max_tokens=ANSWER_TOKENS)
            with memory_of_the_engine(manager, arguments.level) as asleep:
                stands = [card.state for card in manager.discover()]
                learn(model, optimizer, [answers[0].token_ids for answers in groups])
                if asleep:
                    manager.wake_up(["weights"])  # the KV cache can wait until the trainer's memory is free
                manager.update(source, version)
            print(json.dumps({"version": version, "while training": stands}), flush=True)
        after = server.complete(PROMPTS, max_tokens=ANSWER_TOKENS)
        verified = manager.verify(source).ok
        print(json.dumps({"verified": verified, "answers": len(after)}), flush=True)
        if not verified:
            raise DemoError("the engine does not hold the trainer's weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--level", type=int, choices=[1, 2], default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    with job_directory("ww-colocated-") as directory:
        environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}
        os.environ |= environment
        with running_server(arguments.engine, arguments.model, directory / "engine.log", environment) as server:
            train(server, arguments)


if __name__ == "__main__":
    main()
