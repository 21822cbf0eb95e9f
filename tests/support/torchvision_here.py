"""What vLLM's models that read images need of torchvision, which their environment lacks: the pinned torch has no CPU build.

Importing this module does one of two things:

- With `WEIGHTWIRE_TEST_TORCHVISION=1` torchvision comes from SGLang's environment, which has the same Python and torch. Its
  compiled operators do not load there either (see `tests/stand_ins`); the processors of images are Python.
- Else the image processor of Pixtral, which all of vLLM's models with a vision tower import, is an empty module: other models
  never call it. Those whose processors need torchvision do not start.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VARIABLE = "WEIGHTWIRE_TEST_TORCHVISION"
PIXTRAL = "transformers.models.pixtral.image_processing_pixtral"


class _Missing(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


class _OfSglang(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        found = sorted((ROOT / ".venvs" / "sglang" / "lib").glob("python3*/site-packages"))
        return PathFinder.find_spec(name, list(map(str, found))) if name == "torchvision" else None


def give() -> None:
    sys.path.append(str(ROOT / "tests" / "stand_ins"))
    importlib.import_module("weightwire_test_stand_ins")
    sys.meta_path.append(_OfSglang())
    from vllm.model_executor.models import registry

    # vLLM looks at a model's class in an interpreter of its own, which would be without this.
    registry._run_in_subprocess = lambda look: look()  # type: ignore[attr-defined]
    known: Any = vars(registry)["_LazyRegisteredModel"]
    load = known.load_model_cls
    known.load_model_cls = lambda self: _that_starts(load(self))
    _give_what_a_cpu_lacks()


def _that_starts(model: Any) -> Any:
    """The class of InternS1-Pro in vLLM 0.32 reads an attribute that it never gets, and its router numbers experts by integers of
    64 bits, which no kernel on a CPU takes."""
    if model.__name__ == "InternS1ProForConditionalGeneration" and "model_config" not in vars(model):
        block: Any = vars(sys.modules[model.__module__])["InternS1ProMoeSparseMoeBlock"]
        make, router = model.__init__, "_custom_routing_function"
        route = getattr(block, router)

        def init(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
            model.model_config = vllm_config.model_config
            make(self, vllm_config=vllm_config, prefix=prefix)

        def routed(*given: Any, **named: Any) -> Any:
            weights, experts = route(*given, **named)
            return weights, experts.int()

        model.__init__, model.model_config = init, None
        setattr(block, router, routed)
    return model


def _give_what_a_cpu_lacks() -> None:
    """MiniCPM-V's resampler asks a GPU. Kimi-K2.5's processor imports numba, and vLLM 0.32 on a CPU then looks for kernels in all
    that modules hold: llvmlite's library takes `__dict__` for the name of a function."""
    import torch

    torch.cuda.is_current_stream_capturing = lambda: False
    if importlib.util.find_spec("llvmlite") is not None:
        from llvmlite.binding import ffi

        kind = type(ffi.lib)
        ffi.lib.__class__ = type("Library", (kind,), {"__slots__": (), "__dict__": property(lambda _: {})})


if os.environ.get(VARIABLE):
    give()
elif importlib.util.find_spec("torchvision") is None:
    sys.modules.setdefault(PIXTRAL, _Missing(PIXTRAL))
