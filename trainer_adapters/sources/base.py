"""The contract of a source: the names of a model's tensors, and the slices that this trainer rank holds.

A source describes existing memory. No transport, engine or communication in this file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch

from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box, PiecePlace
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import dtype_name, torch_dtype

__all__ = ["DtypeRules", "LocalSlice", "NameFilter", "WeightSource", "narrowed", "share_boxes", "some_of"]

MIN_CUT_BYTES = 1 << 20
"""Smaller boxes are never divided between ranks that hold the same copy."""

COMPARED = 16
"""Number of boxes that are compared with another rank's copy, among those that training keeps equal."""


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
    - Nobody changes the model between the first slice and the last. Such a change goes unnoticed, because the digests are made
      from the mixed values.
    """

    may_be_cut: ClassVar[bool] = True
    """Whether slices may travel in parts. False if the digests of whole slices have already been announced."""

    def configure(self, config: Config) -> None:  # noqa: B027 -- most sources have no use for it
        """The manager calls this before each operation with its settings, which sources that gather need; without a manager, the
        environment's settings apply. A source that wraps another one passes them on."""

    @abstractmethod
    def manifest(self) -> Manifest:
        """Names, shapes, dtypes and ties of the whole model. Raises `ManifestMismatch`, which names the tensors, if some can't be
        sent."""

    @abstractmethod
    def slices(self) -> Iterator[LocalSlice]:
        """This rank's slices of the manifest that `manifest()` returned last, in its order; tensors that the ranks make
        together may come after the others.

        A slice's tensor is valid until the next one is requested: the iterator may hold one tensor at a time.
        Raises `ManifestMismatch`, at once or during the iteration, if the model no longer fits the manifest.
        """

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
    def engine_dtypes(self) -> Mapping[str, str]:
        """The rules that `adopt_dtypes` took."""
        return {}


class NameFilter:
    """Selects the tensors to send by `fnmatch` patterns on the names of the manifest, case-sensitive.

    With `include`, only names that match one of its patterns are sent; names that match a pattern of `exclude` never are.
    """

    def __init__(self, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> None:
        for patterns in (include, exclude):
            if isinstance(patterns, str):
                raise TypeError(f"include and exclude are lists of patterns, not one string: [{patterns!r}]")
        self.include = tuple(include)
        self.exclude = tuple(exclude)

    def keep(self, names: Iterable[str]) -> set[str]:
        """The names that are sent. Raises `ManifestMismatch` for a pattern that matches none of them."""
        names = list(names)
        if idle := [p for p in self.include + self.exclude if not any(fnmatchcase(name, p) for name in names)]:
            raise ManifestMismatch(
                f"these include or exclude patterns match no name: {first_few(idle)}",
                hint="patterns are matched against the names of the manifest, after rename; correct or remove these",
                side="trainer",
            )
        return {
            name
            for name in names
            if (not self.include or any(fnmatchcase(name, p) for p in self.include))
            and not any(fnmatchcase(name, p) for p in self.exclude)
        }


class DtypeRules:
    """Selects the tensors that travel in another dtype than the trainer's: ordered `(pattern, dtype)`, the first match wins.

    Patterns are those of `fnmatch`, case-sensitive, on the names of the manifest: `{"*norm.weight": torch.float32, "*":
    torch.bfloat16}`. Tensors that match no rule keep their dtype. A dtype may be given by torch's name. A single dtype stands
    for `{"*": dtype}`. "engine" stands for the dtypes of the engine's own model: the first update asks for them, and until then
    nothing is cast (`adopt`).
    """

    def __init__(
        self,
        rules: Mapping[str, torch.dtype | str]
        | Iterable[tuple[str, torch.dtype | str]]
        | DtypeRules
        | torch.dtype
        | str
        | None = None,
    ) -> None:
        self.follow_engine: bool = rules.follow_engine if isinstance(rules, DtypeRules) else rules == "engine"
        if isinstance(rules, DtypeRules):
            pairs: Iterable[tuple[str, torch.dtype | str]] = rules.rules
        elif self.follow_engine:
            pairs = ()
        elif isinstance(rules, str | torch.dtype):
            pairs = (("*", rules),)
        else:
            pairs = rules.items() if isinstance(rules, Mapping) else rules or ()
        self.rules: tuple[tuple[str, torch.dtype], ...] = tuple(
            (pattern, torch_dtype(str(dtype).removeprefix("torch."))) for pattern, dtype in pairs
        )

    def adopt(self, rules: Mapping[str, str]) -> bool:
        """Takes the engine's rules, if these rules were given as "engine". Returns whether that changes them."""
        taken = DtypeRules(rules).rules
        if not self.follow_engine or taken == self.rules:
            return False
        self.rules = taken
        return True

    @property
    def adopted(self) -> dict[str, str]:
        return {pattern: dtype_name(dtype) for pattern, dtype in self.rules} if self.follow_engine else {}

    def resolve(
        self, native: Mapping[str, torch.dtype], tied: Mapping[str, str] | None = None
    ) -> dict[str, torch.dtype]:
        """The dtype in which each tensor of `native` (names to the trainer's dtypes) is sent.

        Raises `ManifestMismatch` for a rule that never applies (because of a typo, or hidden by an earlier rule), except a last
        "*", and for a rule that would turn integers or booleans into floats or the reverse. `tied` maps names that don't travel
        to those that do, for the error's text.
        """
        decided_by = {name: self._first_match(name) for name in native}
        self._check_used(set(decided_by.values()), native, tied or {})
        dtypes = dict(native)
        crossing = []
        for name, index in decided_by.items():
            if index is None:
                continue
            pattern, dtype = self.rules[index]
            if _kind(dtype) != _kind(native[name]):
                crossing.append(f"{name} is {native[name]}, rule {pattern!r} says {dtype}")
            dtypes[name] = dtype
        if crossing:
            raise ManifestMismatch(
                f"dtype rules that would change the kind of numbers: {first_few(crossing)}",
                hint="put a rule of its own dtype for these names before the general one",
                side="trainer",
            )
        return dtypes

    def _first_match(self, name: str) -> int | None:
        return next((i for i, (pattern, _) in enumerate(self.rules) if fnmatchcase(name, pattern)), None)

    def _check_used(self, used: set[int | None], names: Iterable[str], tied: Mapping[str, str]) -> None:
        idle = []
        for index, (pattern, _) in enumerate(self.rules):
            if index in used or (pattern == "*" and index == len(self.rules) - 1):
                continue
            hidden = next((name for name in names if fnmatchcase(name, pattern)), None)
            alias = next((name for name in tied if fnmatchcase(name, pattern)), None)
            if hidden is not None:
                winner = self.rules[self._first_match(hidden) or 0][0]
                idle.append(f"{pattern!r} (hidden by {winner!r}, which comes first)")
            elif alias is not None:
                idle.append(f"{pattern!r} ({alias} is tied and travels as {tied[alias]})")
            else:
                idle.append(f"{pattern!r} (matches no name)")
        if idle:
            raise ManifestMismatch(
                f"dtype rules that never apply: {first_few(idle)}",
                hint="rules are matched against the names of the manifest, in order; correct or remove these",
                side="trainer",
            )


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The view of `tensor` that begins at `offsets` and has shape `sizes`, in elements per dimension."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


def share_boxes(manifest: Manifest, boxes: Sequence[Box], rank: int, world_size: int) -> dict[int, Box]:
    """The part of boxes that `rank` sends, if all `world_size` ranks hold them: by position in `boxes`, only those of which it
    sends something. Raises ValueError if there is no such rank.

    The boxes are laid end to end and their bytes divided evenly between the ranks. A box goes to the rank that its first
    byte falls to; a box of `MIN_CUT_BYTES` or more is cut between rows. A pure function, so that the ranks need not communicate.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, not {rank}")
    sizes = [manifest.box_nbytes(box) for box in boxes]
    low, high = sum(sizes) * rank // world_size, sum(sizes) * (rank + 1) // world_size
    shares = {}
    start = 0
    for position, (box, nbytes) in enumerate(zip(boxes, sizes, strict=True)):
        if (share := _rows_that_begin_in(box, nbytes, low - start, high - start)) is not None:
            shares[position] = share
        start += nbytes
    return shares


def some_of(shares: dict[int, Box]) -> dict[int, Box]:
    """Up to `COMPARED` of the boxes that another rank sends, spread evenly over all boxes of two or more dimensions. Others may
    differ between ranks without an error: statistics that each rank keeps of its own batches."""
    matrices = [(position, box) for position, box in shares.items() if len(box.sizes) > 1]
    step = -(-len(matrices) // COMPARED) or 1
    return dict(matrices[step // 2 :: step])


def _rows_that_begin_in(box: Box, nbytes: int, low: int, high: int) -> Box | None:
    """The rows of a box whose first byte lies in `[low, high)`, counted from the box's own first byte."""
    if not nbytes:
        return None
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or nbytes < MIN_CUT_BYTES:
        return box if low <= 0 < high else None
    rows = box.sizes[dim]
    row_bytes = nbytes // rows
    first, last = (min(max(-(-edge // row_bytes), 0), rows) for edge in (low, high))
    if first >= last:
        return None
    offsets = (*box.offsets[:dim], box.offsets[dim] + first, *box.offsets[dim + 1 :])
    return Box(box.tensor, offsets, (*box.sizes[:dim], last - first, *box.sizes[dim + 1 :]))


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating point"
    if dtype.is_complex:
        return "complex"
    return "boolean" if dtype == torch.bool else "whole"
