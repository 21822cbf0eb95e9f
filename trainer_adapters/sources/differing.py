"""Tells how the models of two trainer ranks differ, for the error that refuses them."""

from __future__ import annotations

import zlib

import msgspec

from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import ManifestMismatch, ProtocolError, first_few
from inference_plugin.wire.manifest import Manifest

__all__ = ["another_model", "packed", "unpacked"]

MAX_BYTES = 1 << 28
"""Of a manifest that another rank sends."""

SHOWN = 3


def packed(manifest: Manifest) -> bytes:
    """A manifest to send to another rank: compressed, as names resemble each other."""
    return zlib.compress(msgspec.msgpack.encode(manifest), 1)


def unpacked(data: bytes) -> Manifest:
    """A manifest that another rank sent. Raises `ProtocolError`."""
    try:
        return decode_as(zlib.decompressobj().decompress(data, MAX_BYTES), Manifest)
    except zlib.error as error:
        raise ProtocolError(f"not a packed manifest: {error}") from error


def another_model(mine: Manifest, rank: int, theirs: bytes) -> ManifestMismatch:
    """The error for `rank`, whose manifest is not `mine`, rank 0's. `theirs`: that rank's, `packed`; b"" if it sent none."""
    how = "names, shapes, dtypes, order or ties"
    if theirs:
        how = _how(mine, unpacked(theirs), rank)
    return ManifestMismatch(
        f"trainer rank {rank} has another model than rank 0 ({how})",
        hint="build the same model and the same adapter on every rank; if each rank has a part of one model, such as a pipeline "
        "stage, give its tensors to ExportAdapter(model.named_parameters), which takes some from each",
        side="trainer",
        rank=rank,
    )


def _how(mine: Manifest, theirs: Manifest, rank: int) -> str:
    here, there = (
        {spec.name: f"{spec.dtype} {list(spec.shape)}" for spec in one.tensors}
        | {n: f"tied to {s}" for n, s in one.tied.items()}
        for one in (mine, theirs)
    )
    parts = []
    for owner, own, other in (0, here, there), (rank, there, here):
        if alone := [name for name in own if name not in other]:
            parts.append(f"only rank {owner} has {first_few(alone, SHOWN)}")
    if changed := [
        f"{name} is {here[name]} on rank 0 and {there[name]} on rank {rank}"
        for name in here
        if name in there and here[name] != there[name]
    ]:
        parts.append(first_few(changed, SHOWN))
    if not parts:
        at = next(i for i, spec in enumerate(mine.tensors) if spec != theirs.tensors[i])
        first, second = mine.tensors[at].name, theirs.tensors[at].name
        parts.append(f"another order: tensor {at} is {first} on rank 0 and {second} on rank {rank}")
    return "; ".join(parts)
