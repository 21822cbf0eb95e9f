"""Looks for NaN and infinity in the pieces that a trainer rank sends, right before each piece is digested and copied: so the
piece is in the processor's cache, and memory is read once. It looks at the bytes that travel, after the cast, for elements whose
exponent has all bits set: in C where the package was built with a compiler, else by numpy, with the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from inference_plugin.wire.compiled import FUNCTIONS
from inference_plugin.wire.errors import NotFinite, first_few
from inference_plugin.wire.geometry import PiecePlace
from inference_plugin.wire.manifest import Manifest
from trainer_adapters.sources.base import LocalSlice

__all__ = ["FiniteCheck", "all_finite"]


class FiniteCheck:
    """The check of one rank's part of an update."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._found: dict[int, None] = {}

    def watch(self, slices: Iterable[LocalSlice]) -> Iterator[LocalSlice]:
        """The same slices; their pieces are checked as they are sent."""
        for item in slices:
            yield replace(item, seen=self._look)
            del item  # before the next one is made

    def raise_found(self) -> None:
        """Raises `NotFinite`, which names the tensors, if there are any."""
        if self._found:
            names = [self._manifest.tensors[i].name for i in self._found]
            raise NotFinite(f"NaN or infinity in {first_few(names)}", side="trainer")

    def _look(self, place: PiecePlace, data: Any) -> None:
        tensor = place.box.tensor
        if tensor not in self._found and not all_finite(data, self._manifest.tensors[tensor].dtype):
            self._found[tensor] = None


MASKS: dict[str, tuple[int, int]] = {
    "float64": (8, 0x7FF0_0000_0000_0000),
    "complex128": (8, 0x7FF0_0000_0000_0000),
    "float32": (4, 0x7F80_0000),
    "complex64": (4, 0x7F80_0000),
    "bfloat16": (2, 0x7F80),
    "float16": (2, 0x7C00),
    "float8_e5m2": (1, 0x7C),
    "float8_e4m3fn": (1, 0x7F),
    "float8_e8m0fnu": (1, 0xFF),
}
"""For each dtype: bytes of an element (of its real part, if it is complex), and the bits that NaN and infinity have set. In
float8_e4m3fn and float8_e8m0fnu only NaN has them: they have no infinity."""

NEGATIVE_ZERO = 0x80
"""The only NaN of the float8 types whose names end in "fnuz"; they have no infinity."""

SEARCHED_BYTES = 256 << 10
"""Bytes that numpy looks at in one go: what it computes in between stays in a core's own cache."""


def all_finite(data: Any, dtype: str) -> bool:
    """Whether no element of `data`, a C-contiguous buffer of elements of `dtype`, is NaN or infinite. True for dtypes that have
    neither. Releases the GIL if it is done in C."""
    if dtype.endswith("fnuz"):
        return not bool((np.frombuffer(data, dtype=np.uint8) == NEGATIVE_ZERO).any())
    if dtype not in MASKS:
        return True
    return not has_all_bits(data, *MASKS[dtype])


def has_all_bits_by_numpy(data: Any, width: int, mask: int) -> bool:
    flat = np.frombuffer(data, dtype=np.uint8)
    if flat.size % width:
        raise ValueError(f"elements of {width} bytes don't fill the buffer")
    bits = np.dtype(f"u{width}").type(mask)
    for start in range(0, flat.size, SEARCHED_BYTES):
        elements = np.frombuffer(flat[start : start + SEARCHED_BYTES].data, dtype=f"u{width}")
        if bool(((elements & bits) == bits).any()):
            return True
    return False


has_all_bits: Callable[[Any, int, int], bool] = has_all_bits_by_numpy if FUNCTIONS is None else FUNCTIONS.has_all_bits
