"""The rows that every way carries, from a seed, and their digests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from inference_plugin.wire.digest import digest_bytes

KEYS = ("input_ids", "log_probs", "advantages", "loss_mask")
TOKEN_BYTES = 8 + 4 + 4 + 1
SHORTEST, LONGEST = 64, 16 << 10
OWNERS = CONSUMERS = 2

Rows = dict[str, list[torch.Tensor]]
"""The rows of one task: a list of 1-D tensors for each key."""


class Case(msgspec.Struct, frozen=True):
    """`samples` rows, put in tasks of `per_put`. Tasks go to the owners in turn; the first half is for consumer 0."""

    samples: int
    per_put: int
    seed: int = 0

    @property
    def tasks(self) -> int:
        return self.samples // self.per_put

    def of_owner(self, owner: int) -> range:
        return range(owner, self.tasks, OWNERS)

    def of_consumer(self, consumer: int) -> range:
        half = self.tasks // CONSUMERS
        return range(consumer * half, (consumer + 1) * half)

    @property
    def nbytes(self) -> int:
        return int(self.lengths().sum()) * TOKEN_BYTES

    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Tokens of each sample, uniform from 64 to 16 k."""
        return np.random.default_rng(self.seed).integers(SHORTEST, LONGEST + 1, self.samples)

    def make(self, owner: int) -> dict[int, Rows]:
        """The rows of an owner's tasks, by task."""
        lengths = self.lengths()
        made: dict[int, Rows] = {}
        for task in self.of_owner(owner):
            rows: Rows = {key: [] for key in KEYS}
            for sample in range(task * self.per_put, (task + 1) * self.per_put):
                random, n = np.random.default_rng([self.seed, sample]), int(lengths[sample])
                values = (
                    random.integers(0, 150_000, n),
                    random.standard_normal(n, dtype=np.float32),
                    random.standard_normal(n, dtype=np.float32),
                    random.integers(0, 2, n, dtype=np.uint8).view(np.bool_),
                )
                for key, value in zip(KEYS, values, strict=True):
                    rows[key].append(torch.from_numpy(value))
            made[task] = rows
        return made


class Times(NamedTuple):
    """One run, in seconds of the system's monotonic clock, which all processes share. `controller_bytes` both ways."""

    start_s: float
    put_s: float
    consumed_s: float
    controller_bytes: int


def read(rows: Mapping[str, Sequence[Any]]) -> list[int]:
    """Reads every byte of a task's rows once; returns digests, sample by sample and key by key."""
    return [digest_bytes(_bytes(row)) for sample in zip(*(rows[key] for key in KEYS), strict=True) for row in sample]


def _bytes(row: Any) -> memoryview:
    array = row.numpy() if isinstance(row, torch.Tensor) else np.asarray(row)
    return memoryview(array).cast("B")


def expected(case: Case, by_task: Mapping[int, list[int]], consumer: int) -> list[int]:
    """The digests that a consumer must report."""
    return [digest for task in case.of_consumer(consumer) for digest in by_task[task]]


def digests_of(made: Mapping[int, Rows]) -> dict[int, list[int]]:
    return {task: read(rows) for task, rows in made.items()}


def flat(lists: Iterable[list[int]]) -> list[int]:
    return [one for each in lists for one in each]


def now_s() -> float:
    return time.monotonic()
