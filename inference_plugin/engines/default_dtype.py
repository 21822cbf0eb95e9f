"""torch's default dtype on one thread.

An engine post-processes its modules with the model's dtype as the default, and a kernel may read it: vLLM's int8 kernel on a
CPU takes it for the dtype of its results. With another default it would write twice as many bytes as fit.
`torch.set_default_dtype` is one setting for the whole process, in which the engine computes meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

__all__ = ["default_dtype_here"]

_lock = threading.Lock()
_asked = torch.get_default_dtype
_here = threading.local()
_users = 0


def _default_dtype() -> torch.dtype:
    dtype: torch.dtype = getattr(_here, "dtype", None) or _asked()
    return dtype


@contextlib.contextmanager
def default_dtype_here(dtype: torch.dtype) -> Iterator[None]:
    """`torch.get_default_dtype()` returns `dtype` on this thread, and is unchanged on all others. Tensors that torch makes
    without a dtype still get the process's default."""
    global _users
    before = getattr(_here, "dtype", None)
    with _lock:
        _users += 1
        torch.get_default_dtype = _default_dtype
    _here.dtype = dtype
    try:
        yield
    finally:
        _here.dtype = before
        with _lock:
            _users -= 1
            if not _users:
                torch.get_default_dtype = _asked
