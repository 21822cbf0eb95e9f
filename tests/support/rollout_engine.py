"""Runs in a process of its own: an engine's client, and the rollout worker that uses it, in that one process.

Usage: rollout_engine.py ENGINE TOLD OPTIONS. The file TOLD appears when the worker is there. After SIGTERM it holds the store's
stats at that moment, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from trainer_adapters.batch.engine_clients import from_sglang, from_vllm
from trainer_adapters.batch.rollouts.worker import Generate, Generated, RolloutWorker
from trainer_adapters.batch.store import Store

SLOTS = 4


def vllm_client(options: dict[str, Any]) -> tuple[Generate, Any]:
    """A worker's function, and the engine that it asks."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    async def generate(task_id: str, payload: dict[str, Any]) -> Generated:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=payload["tokens"],
            ignore_eos=True,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        outputs = engine.generate({"prompt_token_ids": payload["prompt"]}, sampling, task_id)
        return from_vllm([output async for output in outputs][-1])

    return generate, engine


def sglang_client(options: dict[str, Any]) -> tuple[Generate, Any]:
    import sglang

    engine = sglang.Engine(**options)

    async def generate(task_id: str, payload: dict[str, Any]) -> Generated:
        sampling = {"temperature": 0, "max_new_tokens": payload["tokens"], "ignore_eos": True}
        answer = engine.async_generate(input_ids=payload["prompt"], sampling_params=sampling, return_logprob=True)
        return from_sglang(await answer)

    return generate, engine


def main() -> None:
    kind, told, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    generate, engine = {"vllm": vllm_client, "sglang": sglang_client}[kind](options)
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    with Store(budget_bytes=16 << 20) as store, RolloutWorker(generate, slots=SLOTS, store=store):
        told.touch()
        end.wait()
        told.write_text(json.dumps(dataclasses.asdict(store.stats())))
    engine.shutdown()


if __name__ == "__main__":
    main()
