"""Runs in a process of its own, in SGLang's environment: `sglang_driver.py` with log-probabilities and pooled vectors."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.scheduler import Scheduler  # type: ignore[import-not-found]

from tests.support import sglang_driver, sglang_latent
from tests.support.reachable import reachable

UNUSED = ("embeddings.position_ids", "_name_or_path")
"""SGLang's BERT leaves the first as it got their memory, and reads them nowhere. The other is the checkpoint's directory."""


def _write_state(scheduler: Any, *, directory: str) -> None:
    """Writes all that the served model reaches, as a file of this rank."""
    found = reachable(scheduler.tp_worker.model_runner.model)
    path = Path(directory, f"state-{torch.distributed.get_rank()}.json")
    path.write_text(json.dumps({name: value for name, value in found.items() if not name.endswith(UNUSED)}))


# In the schedulers as well, which are spawned from this module.
sglang_latent.give()
Scheduler.write_state = _write_state


class Driver(sglang_driver.Driver):
    def do_say(self, prompts: list[list[int]], count: int, logprobs: int) -> list[dict[str, Any]]:
        """Greedy tokens of each prompt, and the log-probabilities of the likeliest at each position. One prompt after another:
        how prompts are joined in a batch depends on the time, and numbers depend on the batch."""
        return [self._say(prompt, count, logprobs) for prompt in prompts]

    def _say(self, prompt: list[int], count: int, logprobs: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        one = self.llm.generate(
            input_ids=prompt, sampling_params=sampling, return_logprob=True, top_logprobs_num=logprobs
        )
        meta = one["meta_info"]
        return {
            "tokens": list(one["output_ids"]),
            "logprobs": repr(meta["output_top_logprobs"]),
            "end": meta["finish_reason"]["type"],
        }

    def do_state(self, directory: str) -> dict[str, str]:
        """All that the model of the only rank reaches."""
        self.llm.collective_rpc("write_state", directory=directory)
        state: dict[str, str] = json.loads(Path(directory, "state-0.json").read_text())
        return state

    def do_pool(self, texts: list[str]) -> list[str]:
        """The vector of each text, in words."""
        return [repr(self.llm.encode(text)["embedding"]) for text in texts]


if __name__ == "__main__":
    Driver(socket.socket(fileno=int(sys.argv[1]))).run()
    sys.stdout.flush()
    os._exit(0)
