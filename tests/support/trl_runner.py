"""Runs a program of TRL's with a vLLM in the same process: `python trl_runner.py TRL_SITE_PACKAGES PROGRAM [arguments]`.

The engine's environment runs it and lends TRL from the other one. Where TRL wants an engine that sleeps, it gets one with a
stand-in for the allocator that a CPU lacks. Afterwards the engine that the trainer has started answers, and its parameters are
compared with the trainer's: the last line of the output is `{"tokens": ..., "verified": ..., "slept": how often}`.
"""

from __future__ import annotations

import json
import runpy
import site
import sys
from typing import Any

PROMPTS = [[1, 5, 9], [11, 23, 42, 99, 100, 7, 8, 250, 251, 300]]


def main() -> None:
    site.addsitedir(sys.argv[1])
    sys.argv[:] = sys.argv[2:]
    import vllm
    from vllm import SamplingParams

    from trainer_adapters import SyncManager

    slept = []

    class SleepyLLM(vllm.LLM):  # type: ignore[misc]
        def __init__(self, *args: Any, enable_sleep_mode: bool = False, **kwargs: Any) -> None:
            super().__init__(*args, worker_extension_cls="tests.support.vllm_extension.Extension", **kwargs)
            if enable_sleep_mode:
                self.collective_rpc("ext_give_allocator", args=(True,))

        def sleep(self, *args: Any, **kwargs: Any) -> None:
            super().sleep(*args, **kwargs)
            slept.append(args or kwargs)

    vllm.LLM = SleepyLLM
    trainer = runpy.run_path(sys.argv[0])["main"]()
    llm = trainer.vllm_generation.llm
    if slept:
        llm.wake_up(tags=["kv_cache"])  # TRL does it before it generates
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    with SyncManager() as manager:
        verified = manager.verify(trainer.model, dtype=llm.llm_engine.model_config.dtype).ok
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    print(json.dumps({"tokens": tokens, "verified": verified, "slept": len(slept)}))


if __name__ == "__main__":
    main()
