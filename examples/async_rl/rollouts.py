"""A rollout worker: one process beside the engine. Run by `run.py`.

It draws a group of answers to each prompt through the engine's ordinary HTTP server, rewards them, and keeps the rows in its
own store, in shared memory, until the trainer has learned from them. The controller hears of each finished task, as metadata.
It says when it is ready. At its end (SIGTERM) it prints what its store holds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from typing import Any

import httpx
import torch

from trainer_adapters.batch.engine_clients import from_sglang, from_vllm
from trainer_adapters.batch.rollouts.worker import Generated, RolloutWorker
from trainer_adapters.batch.store import Store

KEYS = ["prompt_ids", "token_ids", "logprobs"]
"""What the trainer reads of an answer."""
STORE_BYTES, SLOTS, ENGINE_TIMEOUT_S = 256 << 20, 8, 300.0


async def from_engine(http: httpx.AsyncClient, engine: str, task: dict[str, Any]) -> Generated:
    """A group of answers to one prompt, from vLLM or SGLang."""
    sampling = {"n": task["samples"], "temperature": 1.0}
    if engine == "vllm":
        sampling |= {"max_tokens": task["max_tokens"], "logprobs": 0}
        body = {"token_ids": task["prompt"], "sampling_params": sampling, "return_token_ids": True}
        return from_vllm((await http.post("/inference/v1/generate", json=body)).raise_for_status().json())
    sampling |= {"max_new_tokens": task["max_tokens"]}
    body = {"input_ids": task["prompt"], "sampling_params": sampling, "return_logprob": True}
    answer = await http.post("/generate", json=body | {"return_prompt_token_ids": True})
    return from_sglang(answer.raise_for_status().json())


def main() -> None:
    engine, server = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in every thread: only `sigwait` takes it
    http = httpx.AsyncClient(base_url=server, timeout=ENGINE_TIMEOUT_S, trust_env=False)  # past any `http_proxy`

    async def generate(task_id: str, task: dict[str, Any]) -> Generated:
        made = await from_engine(http, engine, task)
        answers = made.data["token_ids"].unbind()
        rewards = torch.stack([(answer < task["vocabulary"] // 2).float().mean() for answer in answers])
        return made._replace(data={key: made.data[key] for key in KEYS} | {"rewards": rewards})

    with Store(budget_bytes=STORE_BYTES) as store, RolloutWorker(generate, slots=SLOTS, store=store):
        print("ready", flush=True)
        signal.sigwait({signal.SIGTERM})
        print(json.dumps({"rollout_worker": os.getpid(), "store": dataclasses.asdict(store.stats())}), flush=True)


if __name__ == "__main__":
    main()
