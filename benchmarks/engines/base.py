"""The interface of an engine under measurement, and the sample that one update gives."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.processes import Remote


@dataclass(frozen=True)
class Weights:
    """What the trainer sends: name, dtype and shape of every tensor, all bf16."""

    metas: list[tuple[str, str, list[int]]]

    @cached_property
    def nbytes(self) -> int:
        return sum(2 * math.prod(shape) for _, _, shape in self.metas)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(2 * math.prod(shape) for _, _, shape in self.metas)


@dataclass(frozen=True)
class Sample:
    """One update, measured."""

    seconds: float
    """From the trainer's call, after a training step, until the engine has confirmed the last byte."""
    stopped_s: float
    """How long no decoding step could run."""
    messages: int
    """Control messages and collective operations."""
    copies_per_byte: int
    """How often a byte is written on its way from a trainer's shard into a parameter, sockets included."""
    extra_bytes: int
    """Memory beside the trainer's shards and the live parameters, at its peak."""
    details: dict[str, Any] = field(default_factory=dict)


class Engine(ABC):
    """A running engine."""

    name: ClassVar[str]
    title: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]]
    """How it can keep its weights here: `plain`, as `load_weights` wrote them, or `packed` for a CPU's matrix products."""
    ways: ClassVar[tuple[str, ...]]
    """Those that its users have otherwise."""

    @abstractmethod
    def __init__(self, model: Path, tp: int, layout: str, scratch: Path, environment: dict[str, str]) -> None:
        """Starts it; `environment` is what engine and trainer have in common."""

    @abstractmethod
    def connect(self, trainer: Remote) -> None:
        """Waits until it runs, then makes what its own ways need to reach it."""

    @abstractmethod
    def update(self, way: str, trainer: Remote, weights: Weights) -> Sample:
        """One update by one of `ways`."""

    @abstractmethod
    def decode(self, tokens: int, requests: int) -> list[float]:
        """Decodes some requests side by side; when each step ended, in seconds on `time.monotonic()`'s clock."""

    @abstractmethod
    def stop(self) -> None: ...
