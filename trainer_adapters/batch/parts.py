"""Parts: the rows of one shard in this process's memory, and the bytes that stand for them in a store or on the wire.

    value -> local_part -> buffers_of -> the owner's memory -> part_of -> values

`part_of` undoes `buffers_of`: a part and its entry's bytes hold the same rows. Views all the way: values are copied only
where their memory is not contiguous, not on the CPU, or not aligned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inference_plugin.wire.errors import BatchError, ManifestMismatch, ProtocolError
from inference_plugin.wire.tensors import bytes_view, dtype_name, torch_dtype
from trainer_adapters.batch.records import MAX_ROWS, Entry, Kind, ShardId, VersionSpan
from trainer_adapters.batch.values import PlainValue, decode_values, encode_values, plain_values

__all__ = ["LocalPart", "buffers_of", "entry_of", "local_part", "part_of", "parts_of_task"]


class LocalPart:
    """Rows of one shard in memory: immutable. The caller's tensors are kept, not copied.

    `kind` and `rows` as in an `Entry`. Tensor kinds: `dtype` (torch's name) and `item_shape`; `offsets` is int64
    `[rows + 1]` for jagged parts, else None.
    """

    __slots__ = (
        "__weakref__",
        "_encoded",
        "_pieces",
        "_values",
        "dtype",
        "entry",
        "item_shape",
        "kind",
        "offsets",
        "rows",
    )

    def __init__(
        self,
        kind: Kind,
        rows: int,
        pieces: Sequence[Any],
        *,
        offsets: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.kind = kind
        self.rows = rows
        self.offsets = offsets
        self.dtype = ""
        self.item_shape: tuple[int, ...] = ()
        self._encoded: bytes | None = None
        self._pieces: tuple[torch.Tensor, ...] = ()
        self._values: torch.Tensor | list[PlainValue] | None = None
        if kind is Kind.VALUES:
            self._values = pieces if isinstance(pieces, list) else list(pieces)
        else:
            self._pieces = tuple(pieces)
            self.dtype = dtype_name(self._pieces[0].dtype)
            self.item_shape = tuple(self._pieces[0].shape[1:])

    @property
    def tensor(self) -> torch.Tensor:
        """Dense: `[rows, *item_shape]`. Jagged: `[offsets[-1], *item_shape]`. Built once where it was given in pieces."""
        if self._values is None:
            self._values = self._pieces[0] if len(self._pieces) == 1 else torch.cat(self._pieces)
            self._pieces = (self._values,)
        assert isinstance(self._values, torch.Tensor)
        return self._values

    @property
    def values(self) -> list[PlainValue]:
        """The rows of a part of plain values."""
        assert isinstance(self._values, list)
        return self._values

    @property
    def pieces(self) -> tuple[torch.Tensor, ...]:
        """Tensors `[k, *item_shape]` that follow each other; together they are `tensor`."""
        return self._pieces

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each row of a jagged part, else empty."""
        return () if self.offsets is None else tuple(np.diff(self.offsets).tolist())

    @property
    def nbytes(self) -> int:
        """Bytes of the part's entry."""
        if self.kind is Kind.VALUES:
            return len(self.encoded)
        items = self.rows if self.offsets is None else int(self.offsets[-1])
        return items * math.prod(self.item_shape) * torch_dtype(self.dtype).itemsize

    @property
    def encoded(self) -> bytes:
        """A part of plain values as msgpack."""
        if self._encoded is None:
            self._encoded = encode_values(self.values)
        return self._encoded

    def __repr__(self) -> str:
        shape = f" {self.dtype}{list(self.item_shape)}" if self.kind is not Kind.VALUES else ""
        return f"LocalPart({self.kind.name.lower()}, {self.rows} rows{shape})"


def local_part(value: Any) -> LocalPart:
    """The rows of `value` as a part; row i is `value[i]`. Raises `BatchError` for anything that is not rows:

    - a tensor `[rows, ...]`, or a numpy array of numbers: dense;
    - a nested tensor, or a list of tensors whose first dimension differs: jagged; a list of equal shapes is dense;
    - any other list, tuple or numpy array: plain values (numpy scalars become Python's, tuples become lists);
    - a part: itself.
    """
    if isinstance(value, LocalPart):
        return value
    if isinstance(value, np.ndarray):
        value = _of_numpy(value)
    if isinstance(value, torch.Tensor):
        return _nested_part(value) if value.is_nested else _dense_part(value)
    if isinstance(value, (str, bytes, bytearray, memoryview)) or not isinstance(value, Sequence):
        raise BatchError(
            f"a {type(value).__name__} is not rows",
            hint="give a tensor, a nested tensor, a numpy array, or a list with one item for each row",
        )
    tensors: list[Any] = [_of_numpy(row) if isinstance(row, np.ndarray) else row for row in value]
    if tensors and all(isinstance(row, torch.Tensor) for row in tensors):
        return _part_of_list(tensors)
    return LocalPart(Kind.VALUES, len(value), plain_values(value))


def parts_of_task(task_id: str, data: Mapping[str, Any]) -> dict[ShardId, LocalPart]:
    """The rows of a task, by key, as parts. Raises `BatchError` where the keys have different numbers of rows, or none."""
    parts = {ShardId(task_id, key): local_part(value) for key, value in data.items()}
    if len({part.rows for part in parts.values()}) != 1:
        counts = ", ".join(f"{shard.key!r}: {part.rows}" for shard, part in parts.items())
        raise BatchError(f"the keys of task {task_id!r} have different numbers of rows: {counts or 'no keys'}")
    for shard, part in parts.items():
        if part.rows > MAX_ROWS:
            raise BatchError(
                f"shard {shard} has {part.rows} rows; allowed are 1 to {MAX_ROWS}",
                hint="a row is one sample of a prompt: give a task fewer, or put them as several tasks",
            )
    return parts


def entry_of(shard: ShardId, part: LocalPart, owner: str, digest: int, versions: VersionSpan | None = None) -> Entry:
    """The entry of `part`. `digest` is of the bytes of `buffers_of(part)`, one after the other. Raises `BatchError`."""
    return Entry(
        shard=shard,
        rows=part.rows,
        kind=part.kind,
        dtype=part.dtype,
        item_shape=part.item_shape,
        lengths=part.lengths,
        nbytes=part.nbytes,
        digest=digest,
        versions=versions,
        owner=owner,
    )


def part_of(entry: Entry, buffer: torch.Tensor) -> LocalPart:
    """The rows that `entry` describes, as views of `buffer`: uint8, 1-D, contiguous, `entry.nbytes` long.

    A buffer that is not aligned to the dtype is copied; plain values are decoded. Raises `ProtocolError` for bytes that
    are not what the entry says. Digests are the caller's business.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.numel() != entry.nbytes:
        raise ProtocolError(
            f"entry {entry.shard} needs {entry.nbytes} contiguous bytes, "
            f"not {buffer.numel()} of {buffer.dtype}, shape {list(buffer.shape)}"
        )
    if entry.kind is Kind.VALUES:
        return LocalPart(Kind.VALUES, entry.rows, decode_values(entry, buffer.numpy().data))
    dtype = torch_dtype(entry.dtype)
    if buffer.data_ptr() % dtype.itemsize or buffer.storage_offset() % dtype.itemsize:
        buffer = buffer.clone()
    offsets = None
    items = entry.rows
    if entry.kind is Kind.JAGGED:
        offsets = _offsets(entry.lengths)
        items = int(offsets[-1])
    values = buffer.view(dtype).view(items, *entry.item_shape)
    return LocalPart(entry.kind, entry.rows, (values,), offsets=offsets)


def buffers_of(part: LocalPart) -> list[torch.Tensor]:
    """The bytes of the part's entry: 1-D contiguous uint8 CPU tensors, in order, none of them empty.

    Views of the part's memory, for reading only; tensors that are strided or on another device are copied first.
    """
    if part.kind is Kind.VALUES:
        pieces: Sequence[torch.Tensor] = (torch.from_numpy(np.frombuffer(part.encoded, dtype=np.uint8).copy()),)
    else:
        pieces = part.pieces
    return [bytes_view(_plain_tensor(piece)) for piece in pieces if piece.numel()]


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in contiguous memory of the CPU: itself, mostly."""
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    try:
        return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    except RuntimeError as error:  # torch has no type of its own for this
        raise BatchError(
            f"a tensor of shape {list(tensor.shape)} on {tensor.device} can't be copied to contiguous memory of the CPU: "
            f"{str(error).splitlines()[0]}",
            hint="put less at a time, or make the tensor contiguous first",
        ) from error


def _dense_part(tensor: torch.Tensor) -> LocalPart:
    _check_tensor(tensor)
    if tensor.dim() == 0:
        raise BatchError("a tensor of no dimension has no rows", hint="give a tensor of shape [rows, ...]")
    return LocalPart(Kind.DENSE, tensor.shape[0], (tensor,))


def _nested_part(nested: Any) -> LocalPart:
    """A nested tensor. The usual jagged layout is taken as it is, any other row by row."""
    _check_values(nested)
    if nested.layout is torch.jagged and nested.lengths() is None and getattr(nested, "_ragged_idx", 0) == 1:
        offsets = nested.offsets().cpu().numpy().astype(np.int64)
        values = nested.values()[int(offsets[0]) : int(offsets[-1])]
        _check_tensor(values)
        return LocalPart(Kind.JAGGED, len(offsets) - 1, (values,), offsets=offsets - offsets[0])
    rows = list(nested.unbind())
    if not rows:
        raise BatchError("a nested tensor without rows that is not of the jagged layout has no item shape")
    return _jagged_part(rows)


def _part_of_list(rows: list[torch.Tensor]) -> LocalPart:
    if any(row.is_nested for row in rows):
        raise BatchError("a row is a nested tensor itself", hint="give one nested tensor, or a list of plain tensors")
    if len({row.shape for row in rows}) == 1:
        for row in rows:
            _check_tensor(row)
        _check_one_dtype(rows)
        return LocalPart(Kind.DENSE, len(rows), [row.unsqueeze(0) for row in rows])
    return _jagged_part(rows)


def _jagged_part(rows: list[torch.Tensor]) -> LocalPart:
    for row in rows:
        _check_tensor(row)
    _check_one_dtype(rows)
    if any(row.dim() == 0 for row in rows) or len({row.shape[1:] for row in rows}) != 1:
        shapes = sorted({tuple(row.shape) for row in rows})
        raise BatchError(
            f"rows of shapes {', '.join(map(str, shapes[:4]))} ({len(shapes)} shapes) don't make one column",
            hint="rows may differ in their first dimension only",
        )
    return LocalPart(Kind.JAGGED, len(rows), rows, offsets=_offsets([row.shape[0] for row in rows]))


def _check_one_dtype(rows: list[torch.Tensor]) -> None:
    if len(dtypes := {row.dtype for row in rows}) > 1:
        raise BatchError(f"rows of one key have different dtypes: {', '.join(sorted(map(str, dtypes)))}")
    if len(devices := {row.device for row in rows}) > 1:
        raise BatchError(f"rows of one key lie on different devices: {', '.join(sorted(map(str, devices)))}")


def _check_values(tensor: Any) -> None:
    if tensor.is_meta:
        raise BatchError(
            "a tensor on the meta device has a shape, but no values", hint="give the tensor that was computed"
        )


def _check_tensor(tensor: torch.Tensor) -> None:
    _check_values(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise BatchError(f"a tensor of layout {tensor.layout} on {tensor.device} can't be held", hint="make it dense")
    try:
        dtype_name(tensor.dtype)
    except ManifestMismatch as error:
        raise BatchError(error.message) from None


def _of_numpy(array: npt.NDArray[Any]) -> torch.Tensor | list[Any]:
    if array.dtype.kind not in "biufc":
        return list(array.tolist()) if array.ndim else [array.item()]
    if not array.flags.writeable or any(stride < 0 for stride in array.strides) or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise BatchError(f"a numpy array of {array.dtype} can't become a tensor: {error}") from error


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(np.asarray(lengths, dtype=np.int64), out=offsets[1:])
    return offsets
