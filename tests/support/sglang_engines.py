"""Real SGLang engines in processes of their own, in SGLang's own environment, for tests."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.engines import ROOT, START_TIMEOUT_S, Driver, HttpEngine

__all__ = ["PYTHON", "SglangDriver", "SglangServer"]

PYTHON = Path(os.environ.get("WEIGHTWIRE_TEST_SGLANG_PYTHON", ROOT / ".venvs" / "sglang" / "bin" / "python"))
"""Of an environment with SGLang; `make versions` names those of other versions."""

PRELOADED = (
    "sglang",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",  # where the plug-in patches it, it imports it
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",  # all models of SGLang
    "sglang.srt.dllm.algorithm.base",
    *(f"inference_plugin.engines.sglang.{module}" for module in ("hooks", "api", "lora")),
    "tests.support.poison",
)

ENGINE_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
    "random_seed": 0,
    "log_level": "warning",
}


def environment(ranks: int = 1) -> dict[str, str]:
    """One core per rank, else ranks wait for each other's threads. More ranks than cores take turns."""
    cores = os.cpu_count() or 1
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(ranks)),
        "TRANSFORMERS_OFFLINE": "1",
    }


def _port_of_a_block() -> int:
    """The first of 20 ports of this engine's own: data-parallel attention counts its ports from it. They are not of those that
    the system gives to whoever names none (32768 and above), any of which may be taken by the time that SGLang asks for it."""
    return 10_000 + 20 * secrets.randbelow(1000)


class SglangDriver(Driver):
    """An `sgl.Engine` held by `sglang_driver.py`."""

    python = str(PYTHON)
    module = "tests.support.sglang_driver"
    preloads = PRELOADED
    constants = (*Driver.constants, "SGLANG_USE_CPU_ENGINE", "TRANSFORMERS_OFFLINE")

    def __init__(
        self, runtime: Path, *, tp: int = 1, pp: int = 1, job: str = "", ends_itself: bool = False, **variables: str
    ) -> None:
        super().__init__(runtime, job=job, **{**environment(tp * pp), **variables})
        self.tp, self.pp, self.ends_itself = tp, pp, ends_itself

    def stop(self) -> None:
        """`ends_itself`: a part of it was killed, and SGLang ends the rest, or leaves it hanging."""
        if self.ends_itself:
            self.kill()
        else:
            super().stop()

    def open(self, model: Path, *, explicit: bool = False, **kwargs: Any) -> list[dict[str, Any]]:  # type: ignore[override]
        """`explicit`: by `inference_plugin.engines.sglang.make_engine`."""
        own = {
            "model_path": str(model),
            "tp_size": self.tp,
            "pp_size": self.pp,
            "port": _port_of_a_block(),
        }
        arguments = {**own, **ENGINE_ARGUMENTS, **kwargs}
        variables = {"WEIGHTWIRE_TEST_EXPLICIT": "1"} if explicit else {}
        self.call("open", timeout_s=START_TIMEOUT_S, kwargs=arguments, env=variables)
        self.family()
        return []


class SglangServer(HttpEngine):
    """SGLang's HTTP server on a port of its own; `explicit` starts it by our launcher, each process anew."""

    python = str(PYTHON)
    preloads = PRELOADED
    constants = SglangDriver.constants

    def __init__(
        self,
        runtime: Path,
        model: Path,
        *,
        tp: int = 1,
        pp: int = 1,
        explicit: bool = False,
        log_level: str = "warning",
        options: Mapping[str, Any] | None = None,
        **variables: str,
    ) -> None:
        super().__init__(runtime, **{**environment(tp * pp), **variables})
        self.model, self.explicit, self.log_level = model, explicit, log_level
        self.options = {"tp_size": tp, "pp_size": pp, **(options or {})}
        if explicit:
            self.preloads = ()

    def start(self) -> None:
        module = "inference_plugin.engines.sglang" if self.explicit else "sglang.launch_server"
        arguments = ["--model-path", str(self.model), "--skip-server-warmup"]
        options = {**ENGINE_ARGUMENTS, **self.options, "log_level": self.log_level}
        for last in (False, False, True):
            try:
                return self.serve(module, arguments, options)
            except (
                AssertionError
            ):  # SGLang gives a request to itself 10 s, and ends where the machine is too slow for that
                if last or self.process is None or self.process.poll() is None:
                    raise
        return None

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)

    def generate(self, prompt: Sequence[int], max_tokens: int = 16) -> tuple[int, dict[str, Any]]:
        """HTTP status and answer of `/generate`."""
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        return self.request("POST", "/generate", {"input_ids": list(prompt), "sampling_params": sampling})

    def tokens(self, prompts: Sequence[Sequence[int]], max_tokens: int = 16) -> list[list[int]]:
        answers = [self.generate(prompt, max_tokens) for prompt in prompts]
        assert all(status == 200 for status, _ in answers), answers
        return [answer["output_ids"] for _, answer in answers]
