"""What is the same for the live models of all engines."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Iterator

import psutil  # type: ignore[import-untyped]
import torch
from torch import nn

__all__ = ["LiveModel"]

DECODING_S = 0.1
"""An engine whose last step ended no longer ago is decoding."""


class LiveModel:
    """One worker's model: the part of `install.contract.EngineModel` that needs nothing of the engine."""

    def __init__(self, live: nn.Module, device: torch.device) -> None:
        self.live = live
        self.device = device
        self.lock = threading.Lock()
        self._stepping = False
        self._stepped_at_s = -math.inf

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        return model.load_weights(tensors)  # type: ignore[operator]

    def free_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return int(psutil.virtual_memory().available)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around each of the engine's steps, on its own thread."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepped_at_s = time.monotonic()
            self._stepping = False

    def decoding(self) -> bool:
        """Whether a step runs, however long, or ended within `DECODING_S`. Any thread."""
        return self._stepping or time.monotonic() - self._stepped_at_s < DECODING_S
