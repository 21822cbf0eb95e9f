"""vLLM's second model runner on a CPU. It needs Triton, which vLLM's environment for a CPU lacks.

Importing this module before vLLM lends it Triton from SGLang's environment and has Triton's own interpreter run the kernels: a
step of a tiny model takes about 0.1 s. vLLM takes the interpreter for a compiler for CPUs.

`WEIGHTWIRE_TEST_SECOND_RUNNER=1 pytest -m "" tests/engines/test_vllm_tokens.py` runs tests of vLLM with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import SimpleNamespace

__all__ = ["PRELOADS", "VARIABLES"]

SWITCH = "WEIGHTWIRE_TEST_SECOND_RUNNER"
PRELOADS: tuple[str, ...] = (__name__,) if os.environ.get(SWITCH) else ()
"""What an engine's processes import first."""
VARIABLES: dict[str, str] = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"} if PRELOADS else {}

ROOT = Path(__file__).parents[2]


class _OfSglang(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        found = sorted((ROOT / ".venvs" / "sglang" / "lib").glob("python3*/site-packages"))
        return PathFinder.find_spec(name, list(map(str, found))) if name == "triton" else None


def give() -> None:
    sys.meta_path.append(_OfSglang())
    from triton.backends import backends

    from tests.support import triton_interpreter

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False), compiler=None)
    triton_interpreter.mend()


if os.environ.get("TRITON_INTERPRET") and PRELOADS:
    give()
