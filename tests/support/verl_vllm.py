"""verl's own extension of vLLM's workers, with a stand-in for the allocator that a CPU lacks: what vLLM releases is overwritten.

verl's server loads it where `engine_kwargs.vllm.worker_extension_cls` names it. `WEIGHTWIRE_TEST_MEMORY` names a file that gets a
line for each move; a file `scarce` beside it has the cache's memory refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from tests.support.vllm_extension import Extension as Engines

__all__ = ["Extension"]

MEMORY = Path(os.environ["WEIGHTWIRE_TEST_MEMORY"])


class Extension(vLLMColocateWorkerExtension, Engines):  # type: ignore[misc]
    def monkey_patch_model(self, *args: Any, **kwargs: Any) -> None:
        """The first thing that verl's server asks of a worker."""
        super().monkey_patch_model(*args, **kwargs)
        self.ext_give_allocator(True)
        sleep, wake_up = self.ext_sleeps_by

        def noted_sleep(level: int) -> None:
            tell(f"sleep {level}")
            sleep(level)

        def noted_wake_up(tags: list[str] | None) -> None:
            tell("wake_up " + " ".join(tags or ["all"]))
            if tags == ["kv_cache"] and MEMORY.with_name("scarce").exists():
                raise MemoryError("out of memory for the test")
            wake_up(tags)

        self.ext_sleeps_by = noted_sleep, noted_wake_up


def tell(line: str) -> None:
    with MEMORY.open("a") as file:
        file.write(line + "\n")
