"""Runs a program of TRL's with a vLLM in the same process: `python trl_runner.py TRL_SITE_PACKAGES PROGRAM [arguments]`.

The engine's environment runs it and lends TRL from the other one. Afterwards the engine that the trainer has started answers, and
its parameters are compared with the trainer's: the last line of the output is `{"tokens": ..., "verified": ...}`.
"""

from __future__ import annotations

import json
import runpy
import site
import sys

PROMPTS = [[1, 5, 9], [11, 23, 42, 99, 100, 7, 8, 250, 251, 300]]


def main() -> None:
    site.addsitedir(sys.argv[1])
    sys.argv[:] = sys.argv[2:]
    from vllm import SamplingParams

    from trainer_adapters import SyncManager

    trainer = runpy.run_path(sys.argv[0])["main"]()
    llm = trainer.vllm_generation.llm
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    with SyncManager() as manager:
        verified = manager.verify(trainer.model, dtype=llm.llm_engine.model_config.dtype).ok
    print(json.dumps({"tokens": [list(answer.outputs[0].token_ids) for answer in answers], "verified": verified}))


if __name__ == "__main__":
    main()
