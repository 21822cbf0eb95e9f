"""Real SGLang engines in processes of their own, in SGLang's own environment, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.engines import ROOT, START_TIMEOUT_S, Driver, HttpEngine, free_port

__all__ = ["PYTHON", "SglangDriver", "SglangServer"]

PYTHON = ROOT / ".venvs" / "sglang" / "bin" / "python"

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


def environment(tp: int = 1) -> dict[str, str]:
    """One core per rank, else ranks wait for each other's threads."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(tp)),
        "TRANSFORMERS_OFFLINE": "1",
    }


class SglangDriver(Driver):
    """An `sgl.Engine` held by `sglang_driver.py`."""

    python = str(PYTHON)
    module = "tests.support.sglang_driver"

    def __init__(
        self, runtime: Path, *, tp: int = 1, job: str = "", ends_itself: bool = False, **variables: str
    ) -> None:
        super().__init__(runtime, job=job, **{**environment(tp), **variables})
        self.tp, self.ends_itself = tp, ends_itself

    def stop(self) -> None:
        """`ends_itself`: a part of it was killed, and SGLang ends the rest, or leaves it hanging."""
        if self.ends_itself:
            self._kill()
        else:
            super().stop()

    def open(self, model: Path, *, explicit: bool = False, **kwargs: Any) -> list[dict[str, Any]]:  # type: ignore[override]
        """`explicit`: by `inference_plugin.engines.sglang.make_engine`."""
        own = {
            "model_path": str(model),
            "tp_size": self.tp,
            "port": free_port(),
        }  # data-parallel attention counts its ports from it
        arguments = {**own, **ENGINE_ARGUMENTS, **kwargs}
        variables = {"WEIGHTWIRE_TEST_EXPLICIT": "1"} if explicit else {}
        self.call("open", timeout_s=START_TIMEOUT_S, kwargs=arguments, env=variables)
        self.family()
        return []


class SglangServer(HttpEngine):
    """SGLang's HTTP server on a port of its own; `explicit` starts it by our launcher."""

    def __init__(self, runtime: Path, model: Path, *, tp: int = 1, explicit: bool = False, **variables: str) -> None:
        super().__init__(runtime, **{**environment(tp), **variables})
        self.model, self.tp, self.explicit = model, tp, explicit

    def start(self) -> None:
        module = "inference_plugin.engines.sglang" if self.explicit else "sglang.launch_server"
        command = [str(PYTHON), "-m", module, "--model-path", str(self.model), "--tp-size", str(self.tp)]
        self.serve([*command, "--skip-server-warmup"], ENGINE_ARGUMENTS)

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
