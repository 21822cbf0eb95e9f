"""Checks the arguments of an update: a version, and a source, or a model for which a source is made."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ArgumentError, VersionConflict, WeightwireError
from inference_plugin.wire.manifest import Manifest
from trainer_adapters.sources.base import LocalSlice, WeightSource
from trainer_adapters.sources.chosen import Kind, Sendable, is_made_together, kind_of, source_for
from trainer_adapters.sources.exchange import meet

__all__ = ["FailingSource", "GivenModels", "checked_version"]

MAX_VERSION = (1 << 62) - 1


def checked_version(version: object) -> int | None:
    """A version as an int; None stands for the next one. Integers of numpy and torch are accepted too.

    Raises `ArgumentError` for anything but an integer, and `VersionConflict` for one that is negative or too large."""
    if version is None:
        return None
    number = None
    with contextlib.suppress(TypeError):
        number = None if isinstance(version, bool) else operator.index(version)  # type: ignore[arg-type]
    if number is None:
        raise ArgumentError(
            f"version {version!r} is a {type(version).__name__}",
            hint="a version is an int, such as the number of the training step; leave it out for the next one",
        )
    if not 0 <= number <= MAX_VERSION:
        raise VersionConflict(f"a version is a non-negative int below 2**62, not {number}")
    return number


class GivenModels:
    """Makes sources for models. Keeps the last source, which remembers the model's scan, and how the last update's was made."""

    def __init__(self, group: str, process_group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._process_group = process_group
        self._last: tuple[object, tuple[Kind, bool, object], object, WeightSource] | None = None
        self._sent: tuple[torch.dtype | str | None, Any] = None, None

    def source_of(
        self, model: Sendable, dtype: torch.dtype | str | None, hf_config: Any, *, timeout_s: float
    ) -> WeightSource:
        """The source of an update. Never raises: an error becomes a source that raises it, so that the operation raises it on
        all ranks. `timeout_s`: of that operation; a source that the ranks make together takes half of it to bring them
        together."""
        source = self._source_of(model, dtype, hf_config, timeout_s)
        if not isinstance(source, FailingSource):
            self._sent = dtype, hf_config
        return source

    def source_to_verify(
        self, model: Sendable, dtype: torch.dtype | str | None, hf_config: Any, *, timeout_s: float
    ) -> WeightSource:
        """As `source_of`: None stands for the last update's `dtype` and `hf_config`."""
        if not isinstance(model, WeightSource):
            sent_dtype, sent_config = self._sent
            dtype = sent_dtype if dtype is None else dtype
            hf_config = sent_config if hf_config is None else hf_config
        return self._source_of(model, dtype, hf_config, timeout_s)

    def _source_of(
        self, model: Sendable, dtype: torch.dtype | str | None, hf_config: Any, timeout_s: float
    ) -> WeightSource:
        try:
            kind = kind_of(model)
            together = is_made_together(kind, model)  # a model with LoRA may have been sharded since the last time
            if self._last is not None and kind != "source":
                last_model, last_kind, last_config, source = self._last
                if last_model is model and last_kind == (kind, together, dtype) and last_config is hf_config:
                    return source
            if together:
                self._meet(kind, timeout_s / 2)
            source = source_for(
                model, dtype=dtype, hf_config=hf_config, group=self._group, process_group=self._process_group
            )
        except Exception as error:  # noqa: BLE001 -- the operation raises it, on all ranks
            return FailingSource(WeightwireError.wrap(error).at(side="trainer"))
        if kind != "source":
            self._last = model, (kind, together, dtype), hf_config, source
        return source

    def close(self) -> None:
        """Drops the last model."""
        self._last, self._sent = None, (None, None)

    def _meet(self, kind: Kind, timeout_s: float) -> None:
        """Waits until all ranks make such a source. A rank that failed before never does, and without a deadline of ours the
        source's collectives would wait for it until the process group's. Raises `SyncTimeout`, which names the missing ranks."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(self._process_group) > 1:
            meet(b"", self._process_group, timeout_s=timeout_s, making=f"adapter of a {kind} model")


class FailingSource(WeightSource):
    """The source of an operation that cannot begin: it raises the reason on all ranks."""

    def __init__(self, error: WeightwireError) -> None:
        self._error = error

    def manifest(self) -> Manifest:
        raise self._error

    def slices(self) -> Iterator[LocalSlice]:
        return iter(())
