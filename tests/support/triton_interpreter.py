"""Triton's own interpreter, mended so far that engines' kernels run on it. Whoever imports this has set `TRITON_INTERPRET=1`."""

from __future__ import annotations

from typing import Any

from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpreterBuilder

__all__ = ["mend"]


def mend() -> None:
    """Its masks may be of integers. Nothing is to be measured: of a kernel's configurations the first one will do."""
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def masked_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *more)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return store(self, pointers, value, mask, *more)

    InterpreterBuilder.create_masked_load = masked_load
    InterpreterBuilder.create_masked_store = masked_store
    Autotuner._bench = lambda *_, **__: [1.0]
