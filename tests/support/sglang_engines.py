"""Real SGLang engines in processes of their own, in SGLang's own environment, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.engines import ROOT, START_TIMEOUT_S, Driver

__all__ = ["PYTHON", "SglangDriver"]

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

    def __init__(self, runtime: Path, *, tp: int = 1, job: str = "", **variables: str) -> None:
        super().__init__(runtime, job=job, **{**environment(tp), **variables})
        self.tp = tp

    def open(self, model: Path, **kwargs: Any) -> list[dict[str, Any]]:  # type: ignore[override]
        arguments = {"model_path": str(model), "tp_size": self.tp, **ENGINE_ARGUMENTS, **kwargs}
        self.call("open", timeout_s=START_TIMEOUT_S, kwargs=arguments, env={})
        self.family()
        return []
