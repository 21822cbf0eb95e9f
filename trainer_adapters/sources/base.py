"""The contract of a source: the names of a model's tensors, and the slices that this trainer rank holds.

A source describes existing memory. No transport, engine or communication in this file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from inference_plugin.wire.config import Config
from inference_plugin.wire.geometry import Box, PiecePlace
from inference_plugin.wire.manifest import Manifest

__all__ = ["LocalSlice", "WeightSource", "WrappingSource"]


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """A box of one tensor of the manifest, and its values in this rank's memory.

    `tensor` has shape `box.sizes`, any strides, any device, and no gradient. Its dtype is the trainer's own; if a dtype rule
    gives the manifest another dtype, the sender casts while it copies. `seen`: set by the manager, which looks at each piece's
    bytes before they are sent; a source leaves it out.
    """

    box: Box
    tensor: torch.Tensor
    seen: Callable[[PiecePlace, Any], None] | None = None


class WeightSource(ABC):
    """One model of the trainer, as checkpoint tensors; one object on each trainer rank that holds part of it.

    The contract:

    - `manifest()` describes the whole model. It is the same on all ranks, in the same order, and talks to no other rank. It
      may be called before every update, and follows changes of the model since.
    - `slices()` yields this rank's part of that manifest. The slices of all ranks together cover every tensor
      exactly once; empty slices are left out. It gathers nothing.
    - The two agree element for element. A source that sees a difference (a parameter that was added, removed or changed in
      shape since `manifest()`) raises `ManifestMismatch`. The receiver of the slices finds any other difference and aborts the
      update: the old version stays in service.
    - `claims()` lists the boxes that `slices()` will yield, so that gaps and overlaps between ranks are found before a byte
      moves. A source that can't know them returns None; its slices are then checked after they are written.
    - Nobody changes the model between the first slice and the last: the digests are made from the mixed values. Where
      `slices_last()` is True, the beginnings of a few matrices are compared afterwards, which finds most such changes.
    """

    may_be_cut: ClassVar[bool] = True
    """Whether slices may travel in parts. False if the digests of whole slices have already been announced."""

    def configure(self, config: Config) -> None:  # noqa: B027 -- most sources have no use for it
        """The manager calls this before each operation with its settings, which sources that gather need; without a manager, the
        environment's settings apply. A source that wraps another one passes them on."""

    def expect_reads(self, times: int) -> None:  # noqa: B027 -- only sources that can be read once need it
        """Before an update reads `slices()`, `times` times: once for each of its transports."""

    @abstractmethod
    def manifest(self) -> Manifest:
        """Names, shapes, dtypes and ties of the whole model. Raises `ManifestMismatch`, which names the tensors, if some can't be
        sent."""

    @abstractmethod
    def slices(self) -> Iterator[LocalSlice]:
        """This rank's slices of the manifest that `manifest()` returned last, in its order; tensors that the ranks make
        together may come after the others.

        A slice's tensor is valid until the next one is requested (see `slices_last`): the iterator may hold one tensor at a time.
        Raises `ManifestMismatch`, at once or during the iteration, if the model no longer fits the manifest.
        """

    def slices_last(self) -> bool:
        """Whether all tensors that `slices()` yields hold their values until the update has read them, also after the iterator's
        end, as parameters in memory do: they may then be read together. A class that overrides `slices()` of one of our sources
        answers for its own tensors: until it overrides this too, each of them is read before the next is requested."""
        return False

    def claims(self) -> tuple[Box, ...] | None:
        """The boxes that `slices()` will yield; None if they aren't known before it runs."""
        return None

    def made_together(self) -> frozenset[int]:
        """Tensors, by index of the manifest, that `slices()` makes with collectives. If there are any, all ranks iterate over
        `slices()` together, to the end; the memory of such a slice is reused for the next one."""
        return frozenset()

    def copies(self) -> Iterator[LocalSlice]:
        """Slices that another rank sends and that this rank also holds, if nothing keeps the two equal.

        They don't travel. In some updates their digests are compared with the sender's; a difference is logged as a warning.
        """
        return iter(())

    def kept_equal(self) -> Iterator[LocalSlice]:
        """A few slices that another rank sends and that this rank also holds, if training keeps the two equal (data parallelism)
        and each rank sends a part.

        They don't travel. In some updates their digests are compared with the sender's. A difference is an error: the engines
        would get parts of several different models.
        """
        return iter(())

    def adopt_dtypes(self, rules: Mapping[str, str]) -> bool:
        """Sends tensors in the engine's dtypes from now on, if the source was made with `dtype_rules="engine"`. Returns whether
        that changes anything. `rules`: as in `DtypeRules`, for all tensors of the manifest."""
        return False

    @property
    def follows_engine(self) -> bool:
        """Whether the source was made with `dtype_rules="engine"`."""
        return False

    @property
    def engine_dtypes(self) -> Mapping[str, str]:
        """The rules that `adopt_dtypes` took."""
        return {}


class WrappingSource(WeightSource):
    """Sends what another source sends, but for what a subclass overrides."""

    _source: WeightSource | None = None
    """The other source; None until it is made."""

    @abstractmethod
    def _ready(self) -> WeightSource:
        """The other source, made if need be. Raises `ManifestMismatch` if it no longer fits the model."""

    def _changed(self, slices: Iterator[LocalSlice], *, anew: bool) -> Iterator[LocalSlice]:
        """What is sent in place of the other source's slices. `anew`: they are sent; the others are only compared with what was
        sent."""
        return slices

    def configure(self, config: Config) -> None:
        if self._source is not None:
            self._source.configure(config)

    def expect_reads(self, times: int) -> None:
        self._ready().expect_reads(times)

    def manifest(self) -> Manifest:
        return self._ready().manifest()

    def slices(self) -> Iterator[LocalSlice]:
        return self._changed(self._ready().slices(), anew=True)

    def claims(self) -> tuple[Box, ...] | None:
        return self._ready().claims()

    def made_together(self) -> frozenset[int]:
        return self._ready().made_together()

    def copies(self) -> Iterator[LocalSlice]:
        return self._changed(self._ready().copies(), anew=False)

    def kept_equal(self) -> Iterator[LocalSlice]:
        return self._changed(self._ready().kept_equal(), anew=False)

    def adopt_dtypes(self, rules: Mapping[str, str]) -> bool:
        return self._source is not None and self._source.adopt_dtypes(rules)

    @property
    def follows_engine(self) -> bool:
        return self._source is not None and self._source.follows_engine

    @property
    def engine_dtypes(self) -> Mapping[str, str]:
        return self._source.engine_dtypes if self._source is not None else {}
