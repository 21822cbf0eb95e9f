"""In the place of the package `torch_memory_saver`, which needs a GPU: SGLang's `--enable-memory-saver` on a CPU, for tests that
have this directory on PYTHONPATH.

As with the package, all memory goes that was allocated in a region of the tag. Here it is overwritten, with 0xFF. What was
allocated with a backup comes back as it was. `WEIGHTWIRE_TEST_MEMORY` names a file that gets a line for each move.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["configure_subprocess", "torch_memory_saver"]

VARIABLE = "WEIGHTWIRE_TEST_MEMORY"


class _Region(TorchDispatchMode):
    """Notes the memory of what is made in it. It refers weakly: what is freed again is not noted."""

    def __init__(self, saver: Saver, tag: str, backed_up: bool) -> None:
        super().__init__()
        self.saver, self.tag, self.backed_up = saver, tag, backed_up

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self.saver.note(tensor.untyped_storage(), self.tag, self.backed_up)
        return result


class Saver:
    enabled = True

    def __init__(self) -> None:
        self._noted: dict[str, dict[int, bool]] = defaultdict(dict)
        """By tag: weak pointers to storages, and whether they are backed up."""
        self._kept: dict[str, list[tuple[torch.UntypedStorage, torch.UntypedStorage]]] = {}

    def note(self, storage: torch.UntypedStorage, tag: str, backed_up: bool) -> None:
        self._noted[tag].setdefault(storage._weak_ref(), backed_up)

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        with _Region(self, tag, enable_cpu_backup):
            yield

    def pause(self, tag: str) -> None:
        assert tag not in self._kept, f"{tag} is released already"
        self._tell(f"release {tag}")
        found = [(torch.UntypedStorage._new_with_weak_ptr(one), kept) for one, kept in self._noted[tag].items()]
        held = [(storage, kept) for storage, kept in found if storage is not None and storage.nbytes()]
        assert held, f"no memory of {tag} was allocated"
        self._kept[tag] = [(storage, storage.clone()) for storage, kept in held if kept]
        for storage, _ in held:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)

    def resume(self, tag: str) -> None:
        self._tell(f"resume {tag}")
        for storage, value in self._kept.pop(tag):
            storage.copy_(value)

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def cuda_graph(self, **_: Any) -> Iterator[None]:
        yield

    def _tell(self, line: str) -> None:
        if VARIABLE in os.environ:
            with Path(os.environ[VARIABLE]).open("a") as file:
                file.write(line + "\n")


torch_memory_saver = Saver()


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    yield
