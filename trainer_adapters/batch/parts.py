"""Parts: the rows of one shard in this process's memory, and the bytes that stand for them in a store or on the wire.

    value -> local_part (`inputs`) -> buffers_of -> the owner's memory -> part_of, or leased_part -> values

`part_of` undoes `buffers_of`: a part and its entry's bytes hold the same rows. `sources_of` is `buffers_of` by address: a put of
many rows then makes no array for each of them. Views all the way: values are copied only
where their memory is not contiguous, not on the CPU, or not aligned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from inference_plugin.wire.copying import places_at
from inference_plugin.wire.errors import BatchError, ProtocolError
from inference_plugin.wire.manifest import DTYPE_BYTES
from inference_plugin.wire.tensors import PackedRows, bytes_view, dtype_name, is_freed, tensors_over, torch_dtype
from trainer_adapters.batch.records import Entry, Kind, ShardId, VersionSpan
from trainer_adapters.batch.values import PlainValue, decode_values, encode_values

if TYPE_CHECKING:
    from trainer_adapters.batch.consumer import LeasedBytes

__all__ = [
    "LeasedPart",
    "ListedPart",
    "LocalPart",
    "Sources",
    "buffers_of",
    "entry_of",
    "leased_part",
    "offsets_of",
    "part_of",
    "sources_of",
]


NUMPY_DTYPES = {
    name: np.dtype(name).str
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}
"""numpy has these too, under the same names, and calls them so in its array interface; of a tensor of another dtype it is given
the bytes."""

_DENSE, _JAGGED = Kind.DENSE, Kind.JAGGED  # an enum's own attributes are slow


class LocalPart:
    """Rows of one shard in memory: immutable. The caller's tensors are kept, not copied.

    `kind` and `rows` as in an `Entry`. Tensor kinds: `dtype` (torch's name) and `item_shape`. `offsets`: of jagged parts only.
    """

    __slots__ = (
        "__weakref__",
        "_encoded",
        "_lengths",
        "_offsets",
        "_pieces",
        "_values",
        "dtype",
        "item_shape",
        "kind",
        "rows",
    )

    def __init__(
        self,
        kind: Kind,
        rows: int,
        pieces: Sequence[Any],
        *,
        offsets: npt.NDArray[np.int64] | None = None,
        lengths: tuple[int, ...] | None = None,
        item_shape: tuple[int, ...] | None = None,
    ) -> None:
        """`pieces`: plain values, or tensors `[k, *item_shape]`; where `item_shape` is given, one tensor for each dense row.
        Jagged parts have `offsets` or `lengths`, whichever the caller knows."""
        self.kind = kind
        self.rows = rows
        self._offsets = offsets
        self._lengths = lengths
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
            self.item_shape = tuple(self._pieces[0].shape[1:]) if item_shape is None else item_shape

    @property
    def offsets(self) -> npt.NDArray[np.int64] | None:
        """int64 `[rows + 1]`: where each row of a jagged part begins in `tensor`, and the end of the last one."""
        if self._offsets is None and self._lengths is not None:
            self._offsets = offsets_of(self._lengths)
        return self._offsets

    @property
    def tensor(self) -> torch.Tensor:
        """Dense: `[rows, *item_shape]`. Jagged: `[offsets[-1], *item_shape]`. Built once where it was given in pieces."""
        if self._values is None:
            pieces = self._pieces  # once: another thread may be putting them together too
            first = pieces[0]
            if self.kind is Kind.DENSE and first.dim() == len(self.item_shape):  # each piece is a row
                self._values = first.unsqueeze(0) if self.rows == 1 else torch.stack(pieces)
            else:
                self._values = first if len(pieces) == 1 else torch.cat(pieces)
            self._pieces = (self._values,)
        assert isinstance(self._values, torch.Tensor)
        return self._values

    def only_row(self) -> torch.Tensor:
        """The row of a dense part of one row: `tensor[0]`."""
        return self.tensor.squeeze(0)

    @property
    def pieces(self) -> tuple[torch.Tensor, ...]:
        """Tensors whose values, one tensor after the other, are those of `tensor`."""
        return self._pieces

    @property
    def values(self) -> list[PlainValue]:
        """The rows of a part of plain values."""
        assert isinstance(self._values, list)
        return self._values

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each row of a jagged part, else empty."""
        if self._lengths is None and self._offsets is not None:
            self._lengths = tuple(np.diff(self._offsets).tolist())
        return self._lengths or ()

    @property
    def nbytes(self) -> int:
        """Bytes of the part's entry."""
        if self.kind is Kind.VALUES:
            return len(self.encoded)
        items = sum(self.lengths) if self.kind is Kind.JAGGED else self.rows
        return items * math.prod(self.item_shape) * DTYPE_BYTES[self.dtype]

    @property
    def encoded(self) -> bytes:
        """A part of plain values as msgpack."""
        if self._encoded is None:
            self._encoded = encode_values(self.values)
        return self._encoded

    def __repr__(self) -> str:
        shape = f" {self.dtype}{list(self.item_shape)}" if self.kind is not Kind.VALUES else ""
        return f"LocalPart({self.kind.name.lower()}, {self.rows} rows{shape})"


class ListedPart(LocalPart):
    """Rows that were given as a list of tensors, which `packed` describes."""

    __slots__ = ()

    def __init__(self, rows: tuple[torch.Tensor, ...], packed: PackedRows) -> None:
        shape, lengths = packed.shape, packed.lengths
        self.dtype = packed.dtype
        self.rows = len(rows)
        if lengths.count(lengths[0]) == len(lengths):
            self.kind, self.item_shape, self._lengths = _DENSE, shape, None
        else:
            self.kind, self.item_shape, self._lengths = _JAGGED, shape[1:], lengths
        self._pieces = rows
        self._offsets = self._values = self._encoded = None


class LeasedPart(LocalPart):
    """Rows in their owner's memory, which this process maps. Their tensor is made at its first use: a batch may have many
    thousands of parts. The lease ends with the part and with the last view of its tensor."""

    __slots__ = ("_leased",)

    def __init__(self, entry: Entry, leased: LeasedBytes) -> None:
        self.kind = entry.kind
        self.rows = entry.rows
        self.dtype = entry.dtype
        self.item_shape = entry.item_shape
        self._offsets = self._values = self._encoded = None
        self._lengths = entry.lengths if entry.kind is Kind.JAGGED else None
        self._leased = leased

    @property
    def tensor(self) -> torch.Tensor:
        if self._values is None:
            items = self.rows if self._lengths is None else sum(self._lengths)
            self._values = self._view((items, *self.item_shape))
        assert isinstance(self._values, torch.Tensor)
        return self._values

    @staticmethod
    def rows_of(parts: Sequence[LeasedPart], inner: tuple[int, ...], dtype: str) -> list[torch.Tensor] | None:
        """All rows of parts, each `[length, *inner]`, together: a batch may have many thousands. None where torch or the dtype
        has no such way, and where a part's tensor was made: its rows are views of it, which autograd knows."""
        if any(part._values is not None for part in parts):
            return None
        leased = [part._leased for part in parts]
        lengths = [part._lengths or part.item_shape[:1] * part.rows for part in parts]
        return tensors_over(leased, [each.address for each in leased], lengths, inner, dtype)

    def _view(self, shape: tuple[int, ...]) -> torch.Tensor:
        """All of its values in this shape."""
        tensors = tensors_over([self._leased], [self._leased.address], [shape[:1]], shape[1:], self.dtype)
        if tensors is not None:
            return tensors[0]
        if (typestr := NUMPY_DTYPES.get(self.dtype)) is not None:  # numpy's views take less time than torch's
            return torch.from_numpy(self._leased.array(typestr, shape))
        return torch.from_numpy(self._leased.array()).view(torch_dtype(self.dtype)).view(shape)

    @property
    def pieces(self) -> tuple[torch.Tensor, ...]:
        return (self.tensor,)


def entry_of(
    shard: ShardId,
    part: LocalPart,
    owner: str,
    digest: int,
    versions: VersionSpan | None = None,
    nbytes: int | None = None,
) -> Entry:
    """The entry of `part`. `digest` is of the bytes of `buffers_of(part)`, one after the other; a caller that knows their number
    gives it as `nbytes`. Raises `BatchError`."""
    if nbytes is None:
        nbytes = part.nbytes
    kind, dtype, item_shape, lengths = part.kind, part.dtype, part.item_shape, part.lengths
    return Entry(shard, part.rows, kind, dtype, item_shape, lengths, nbytes, digest, versions, owner)


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
    if buffer.data_ptr() % DTYPE_BYTES[entry.dtype] or buffer.storage_offset() % DTYPE_BYTES[entry.dtype]:
        buffer = buffer.clone()
    lengths = entry.lengths if entry.kind is Kind.JAGGED else None
    return LocalPart(entry.kind, entry.rows, (_rows_in(entry, buffer),), lengths=lengths)


def leased_part(entry: Entry, leased: LeasedBytes) -> LocalPart:
    """As `part_of`, for the bytes of a leased shard. The lease ends as soon as nothing here needs them."""
    if entry.kind is Kind.VALUES or leased.address % DTYPE_BYTES[entry.dtype]:
        return part_of(entry, torch.from_numpy(leased.array()))
    return LeasedPart(entry, leased)


def _rows_in(entry: Entry, buffer: torch.Tensor) -> torch.Tensor:
    """The tensor of an entry whose aligned bytes are `buffer`."""
    items = sum(entry.lengths) if entry.kind is Kind.JAGGED else entry.rows
    return buffer.view(torch_dtype(entry.dtype)).view(items, *entry.item_shape)


def buffers_of(part: LocalPart) -> list[npt.NDArray[np.uint8]]:
    """The bytes of the part's entry: 1-D contiguous arrays, in order, none of them empty.

    Views of the part's memory, for reading only; tensors that are strided or on another device are copied first. Raises
    `BatchError` for a tensor whose memory was freed.
    """
    if part.kind is Kind.VALUES:
        return [np.frombuffer(part.encoded, dtype=np.uint8)]
    return [_bytes_of(piece, part.dtype) for piece in part.pieces if piece.numel()]


class Sources(NamedTuple):
    """Places in this process's memory (see `copying.places_in`). `kept` keeps the memory alive."""

    places: bytes
    kept: object

    @staticmethod
    def of(arrays: Sequence[npt.NDArray[np.uint8]]) -> Sources:
        """The places of arrays: 1-D, contiguous."""
        return Sources(places_at([array.ctypes.data for array in arrays], [array.size for array in arrays]), arrays)


def sources_of(part: LocalPart) -> Sources:
    """Where the bytes of the part's entry lie, in order: what `buffers_of` gives, without an array for each piece.

    Raises `BatchError` for a tensor whose memory was freed.
    """
    pieces = part.pieces
    if not (pieces and set(map(type, pieces)) == {torch.Tensor} and _lie_as_read(pieces)):
        return Sources.of(buffers_of(part))
    if any(map(is_freed, pieces)):
        raise _freed()
    addresses = list(map(torch.Tensor.data_ptr, pieces))
    if len(lengths := part.lengths) == len(pieces):
        unit_bytes = math.prod(part.item_shape) * DTYPE_BYTES[part.dtype]
        sizes = [length * unit_bytes for length in lengths]
    else:
        itemsize = DTYPE_BYTES[part.dtype]
        sizes = [items * itemsize for items in map(torch.Tensor.numel, pieces)]
    return Sources(places_at(addresses, sizes), pieces)


def _lie_as_read(pieces: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of tensors, all of one dtype and on one device, has their values in order."""
    first = pieces[0]
    return (
        first.is_cpu
        and not first.is_complex()  # which may be conjugated when it is read
        and all(map(torch.Tensor.is_contiguous, pieces))
        and not (first.is_floating_point() and any(map(torch.Tensor.is_neg, pieces)))
    )


def _freed() -> BatchError:
    return BatchError(
        "a tensor has a shape, but its memory was freed", hint="FSDP frees what it gathered: put a copy of it"
    )


def _bytes_of(tensor: torch.Tensor, dtype: str) -> npt.NDArray[np.uint8]:
    if not tensor.data_ptr() or is_freed(tensor):
        raise _freed()
    if dtype in NUMPY_DTYPES and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        return tensor.detach().numpy().reshape(-1).view(np.uint8)
    return bytes_view(_plain_tensor(tensor)).numpy()


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


def offsets_of(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(np.asarray(lengths, dtype=np.int64), out=offsets[1:])
    return offsets
