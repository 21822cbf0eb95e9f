"""The engine process of a benchmark: a real vLLM that takes JSON commands on a ZMQ socket."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import zmq


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--quantization", help="made by the engine of a checkpoint in bf16")
    parser.add_argument("--address", required=True)
    arguments = parser.parse_args()

    from vllm import LLM

    llm = LLM(
        model=arguments.model,
        tensor_parallel_size=arguments.tp,
        quantization=arguments.quantization,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        kv_cache_memory_bytes=256 << 20,
        worker_extension_cls="benchmarks.engines.vllm_worker.BaselineExtension",
        enable_prefix_caching=False,
    )
    socket: Any = zmq.Context.instance().socket(zmq.REP)
    socket.bind(arguments.address)
    while True:
        command = json.loads(socket.recv())
        if command["do"] == "stop":
            socket.send(b"{}")
            return
        started_s = time.monotonic()
        if command["do"] == "decode":
            result: Any = decode(llm, **command["args"])
        elif command["do"] == "generate":
            result = generate(llm, **command["args"])
        else:
            result = llm.collective_rpc(command["do"], kwargs=command["args"])
        now_s = time.monotonic()
        socket.send(json.dumps({"result": result, "seconds": now_s - started_s, "end_s": now_s}).encode())


def generate(llm: Any, tokens: int) -> list[list[int]]:
    """Greedy tokens for some prompts."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [1 + i, 5, 9, 7, 3, 40 + i]} for i in range(2)]
    how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, how, use_tqdm=False)]


def decode(llm: Any, tokens: int, requests: int) -> list[float]:
    """Decodes some requests; the time of the end of each step, on `time.monotonic()`'s clock (shared by all processes)."""
    from vllm import SamplingParams

    for i in range(requests):
        prompt = {"prompt_token_ids": [1 + i, 5, 9, 7, 3]}
        llm.llm_engine.add_request(
            f"bench-{time.monotonic()}-{i}",
            prompt,
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        )
    ends = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        ends.append(time.monotonic())
    return ends


if __name__ == "__main__":
    main()
