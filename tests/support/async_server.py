"""vLLM's API server with asynchronous scheduling on a CPU (see `async_scheduling`)."""

from __future__ import annotations

import runpy

from tests.support import async_scheduling

if __name__ == "__main__":
    async_scheduling.keep_if_asked()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
