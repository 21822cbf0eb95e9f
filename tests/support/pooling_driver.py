"""Runs in a process of its own: `engine_driver.py` for models that answer with a vector per prompt."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from tests.support import engine_driver


class Driver(engine_driver.Driver):
    def do_pool(self, prompts: list[list[int]], task: str) -> list[str]:
        """The vector of each prompt, in words; `task` is "embed" or "classify"."""
        from vllm import PoolingParams

        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = self.llm.encode(inputs, PoolingParams(), pooling_task=task, use_tqdm=False)
        return [repr(one.outputs.data.tolist()) for one in done]


if __name__ == "__main__":
    Driver(socket.socket(fileno=int(sys.argv[1]))).run()
    sys.stdout.flush()
    os._exit(0)
