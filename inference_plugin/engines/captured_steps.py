"""Decode steps of a `transformers` model that a CUDA graph replays.

A request gets a slot: a `StaticCache` of one size and one tensor each for the token that goes in and the token that comes
out. The graph of a slot is captured once, when the slot is made, and replayed for every token of every request that the slot
ever has; prompts are computed without a graph. A replay reads the weights where they lay at the capture, so the model
has to keep their addresses (`LiveModel.fixed_addresses`). Where there is no CUDA the same step runs without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inference_plugin.wire.errors import EngineUnsupported

__all__ = ["CapturedSteps", "Slot"]

WARM_UP_STEPS = 3
"""Steps before a capture, so that libraries have allocated their workspaces (torch's notes on CUDA graphs ask for some)."""


class CapturedSteps:
    """The slots of one model: as many as there ever were requests at a time.

    `length`: the most tokens of a request, prompt and answer together. Raises `EngineUnsupported` for a model whose cache
    counts its tokens on the host (sliding windows, `transformers` before 5), where a replay would not count.
    """

    def __init__(self, model: Any, length: int) -> None:
        self.length = length
        self._model = model
        self._free: list[Slot] = []
        self._check(self._new_cache())

    def _check(self, cache: Any) -> None:
        for layer in cache.layers:
            if layer.is_sliding or not isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
                raise EngineUnsupported(
                    f"the decode step of {type(self._model).__name__} can't be captured: its {type(layer).__name__} "
                    "counts tokens on the host",
                    hint="leave captured_length out",
                    phase="start",
                )

    def _new_cache(self) -> Any:
        from transformers import StaticCache

        cache: Any = StaticCache
        return cache(config=self._model.config, max_cache_len=self.length)

    def take(self) -> Slot:
        """A slot for a request, its cache empty."""
        return self._free.pop() if self._free else Slot(self._model, self._new_cache())

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)


class Slot:
    """The cache and the captured decode step of one request at a time."""

    def __init__(self, model: Any, cache: Any) -> None:
        self._model = model
        self._cache = cache
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        self._next = torch.zeros((), dtype=torch.int64, device=model.device)
        self._replay: Callable[[], None] = self._compute
        self.prefill([0])  # allocates the cache
        if model.device.type == "cuda":
            self._replay = self._capture()

    def prefill(self, tokens: Sequence[int]) -> int:
        """Empties the cache and computes `tokens`. Returns the token that follows."""
        self._cache.reset()
        self._run(torch.tensor([tokens], device=self._model.device))
        return int(self._next)

    def decode(self, token: int) -> int:
        """Appends `token` to what the cache holds. Returns the token that follows."""
        self._token.fill_(token)
        self._replay()
        return int(self._next)

    def _compute(self) -> None:
        self._run(self._token)

    def _run(self, tokens: torch.Tensor) -> None:
        output = self._model(input_ids=tokens, past_key_values=self._cache, use_cache=True)
        self._next.copy_(output.logits[0, -1].argmax())

    def _capture(self) -> Callable[[], None]:
        device = self._model.device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._compute()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread of this worker may prepare an update on the device meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._compute()
        return graph.replay
