"""Digests: xxh3 by the xxhash library (https://github.com/Cyan4973/xxHash). They guard against accident, not malice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import xxhash

from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.manifest import Manifest

__all__ = ["Digest", "digest_bytes", "digest_group"]


def digest_bytes(buffer: Any) -> int:
    """xxh3-64 of a C-contiguous buffer (anything with the buffer protocol). Releases the GIL while it computes."""
    return xxhash.xxh3_64_intdigest(buffer)


Digest = xxhash.xxh3_64
"""`digest_bytes` of bytes given to `update` one after the other; `intdigest` returns it. Releases the GIL too."""


def digest_group(manifest: Manifest, pieces: Iterable[Piece]) -> str:
    """xxh3-128, in hex, over a manifest and all its pieces in canonical order.

    Engines that got the same update report the same value. It depends on how the trainer cut its tensors into pieces; to
    compare different trainings, compare tensors (`weightwire verify`).
    """
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode([manifest.fingerprint, sorted(pieces)]))
