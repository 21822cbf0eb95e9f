"""In the place of verl's inference server: a Ray actor that asks a stock vLLM server, which the test has started. And what a
test asks verl's own."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput

ANSWER_TOKENS, ASK_S = 12, 120


@ray.remote
class Server:
    """Where verl's agent loop asks for tokens, and its manager for memory. `get_calls`: what it was told, in order."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.calls: list[list[Any]] = []
        self.threads = ThreadPoolExecutor(256)  # one for each request of a step, and more for commands
        self.gate = asyncio.Event()  # as verl's server has one: what comes after an abort waits here, not in the engine
        self.gate.set()

    def get_calls(self) -> list[list[Any]]:
        return self.calls

    def set_global_steps(self, global_steps: int) -> None:
        self.calls.append(["set_global_steps", global_steps])

    async def sleep(self) -> None:
        self.calls.append(["sleep"])
        await self.ask("/sleep?level=2")

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(["wake_up", *tags])
        await self.ask("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.calls.append(["abort_all_requests"])
        self.gate.clear()
        await self.ask("/pause?mode=abort")

    async def resume_generation(self) -> None:
        self.calls.append(["resume_generation"])
        await self.ask("/resume")
        self.gate.set()

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        body = {"model": self.model, "prompt": list(prompt_ids), "max_tokens": ANSWER_TOKENS, "logprobs": 0}
        body |= {"return_token_ids": True, "temperature": sampling_params["temperature"]}
        await self.gate.wait()
        choice = json.loads(await self.ask("/v1/completions", body))["choices"][0]
        steps = [call[1] for call in self.calls if call[0] == "set_global_steps"]
        return TokenOutput(
            token_ids=choice["token_ids"],
            log_probs=choice["logprobs"]["token_logprobs"],
            stop_reason="aborted" if choice["finish_reason"] == "abort" else "completed",
            extra_fields={"global_steps": steps[-1]},
        )

    async def ask(self, path: str, body: Any = None) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self.threads, self.post, path, body)

    def post(self, path: str, body: Any = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method="POST")
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            text: bytes = answer.read()
        return text


def tokens_of(replica: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What verl's own server for SGLang generates, asked as verl's agent loop asks it."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    answers = [
        replica.server_handle.generate.remote(
            prompt_ids=list(prompt), sampling_params=dict(sampling), request_id=f"test-{number}"
        )
        for number, prompt in enumerate(prompts)
    ]
    return [list(answer.token_ids) for answer in ray.get(answers, timeout=ASK_S)]
