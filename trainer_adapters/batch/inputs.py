"""Turns the values that users put into parts, and explains why other values are not rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from inference_plugin.wire.errors import BatchError, ManifestMismatch
from inference_plugin.wire.tensors import PackedRows, dtype_name, packed_rows
from trainer_adapters.batch.parts import ListedPart, LocalPart
from trainer_adapters.batch.records import MAX_ROWS, Kind, ShardId, VersionSpan, check_versions
from trainer_adapters.batch.values import plain_values

__all__ = ["GivenPart", "checked_dtype", "local_part", "parts_of_task", "parts_of_tasks"]

_SORT = attrgetter("dtype", "device", "layout")


class GivenPart(msgspec.Struct, frozen=True, gc=False):
    """A part that was just made of what a user gave, its bytes, and where they lie if that is known already."""

    part: LocalPart
    nbytes: int
    sources: PackedRows | None = None


def local_part(value: Any) -> LocalPart:
    """The rows of `value` as a part; row i is `value[i]`. Raises `BatchError` for anything that is not rows:

    - a tensor `[rows, ...]`, or a numpy array of numbers: dense;
    - a nested tensor, or a list of tensors whose first dimension differs: jagged; a list of equal shapes is dense;
    - any other list, tuple or numpy array: plain values (numpy scalars become Python's, tuples become lists);
    - a part: itself.
    """
    return _part_of(value) if (listed := _listed_part(value)) is None else listed.part


def parts_of_tasks(tasks: Mapping[str, Mapping[str, Any]], versions: VersionSpan | None) -> dict[ShardId, GivenPart]:
    """As `parts_of_task`, of several tasks."""
    if not isinstance(tasks, Mapping):
        raise BatchError(
            f"the tasks are a {type(tasks).__name__}", hint="give a dict of tasks, each a dict of rows by key"
        )
    return {shard: one for task, data in tasks.items() for shard, one in parts_of_task(task, data, versions).items()}


def parts_of_task(
    task_id: str, data: Mapping[str, Any], versions: VersionSpan | None = None
) -> dict[ShardId, GivenPart]:
    """The rows of a task, by key, as parts. Raises `BatchError` where the keys have different numbers of rows, or none, and for
    `versions` of another kind."""
    check_versions(versions)
    if not isinstance(data, Mapping):
        raise BatchError(
            f"the data of task {task_id!r:.300} is a {type(data).__name__}", hint="give a dict of rows by key"
        )
    given = {ShardId(task_id, key): _given_part(value) for key, value in data.items()}
    counts = {one.part.rows for one in given.values()}
    if len(counts) != 1:
        listed = ", ".join(f"{shard.key!r}: {one.part.rows}" for shard, one in given.items())
        raise BatchError(f"the keys of task {task_id!r} have different numbers of rows: {listed or 'no keys'}")
    if (rows := counts.pop()) > MAX_ROWS:
        raise BatchError(
            f"shard {next(iter(given))} has {rows} rows; allowed are 1 to {MAX_ROWS}",
            hint="a row is one sample of a prompt: give a task fewer, or put them as several tasks",
        )
    return given


def checked_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns `dtype` if a store can hold it. Raises `BatchError`."""
    try:
        dtype_name(dtype)
    except ManifestMismatch as error:
        raise BatchError(error.message) from None
    return dtype


def _given_part(value: Any) -> GivenPart:
    if (listed := _listed_part(value)) is not None:
        return listed
    part = _part_of(value)
    return GivenPart(part, part.nbytes)


def _listed_part(value: Any) -> GivenPart | None:
    """The rows of a list of tensors; None for other values, and for tensors that are to be looked at one by one."""
    if type(value) is not list or (packed := packed_rows(rows := tuple(value))) is None:
        return None
    return GivenPart(ListedPart(rows, packed), packed.nbytes, packed)


def _part_of(value: Any) -> LocalPart:
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
    _check_rows(rows)
    return _jagged_part(rows, [row.shape for row in rows])


def _part_of_list(rows: list[torch.Tensor]) -> LocalPart:
    try:
        shapes = [row.shape for row in rows]
    except RuntimeError:  # a nested tensor has none
        raise _nested_row() from None
    _check_rows(rows)
    if len(set(shapes)) == 1:
        return LocalPart(Kind.DENSE, len(rows), rows, item_shape=tuple(shapes[0]))
    return _jagged_part(rows, shapes)


def _jagged_part(rows: list[torch.Tensor], shapes: list[torch.Size]) -> LocalPart:
    """`rows` have passed `_check_rows`."""
    try:
        lengths, *others = zip(*shapes, strict=True)
    except ValueError:  # numbers of dimensions differ, or there are none
        lengths, others = (), [(0, 1)]
    if any(len(set(sizes)) > 1 for sizes in others):
        told = sorted({tuple(shape) for shape in shapes})
        raise BatchError(
            f"rows of shapes {', '.join(map(str, told[:4]))} ({len(told)} shapes) don't make one column",
            hint="rows may differ in their first dimension only",
        )
    return LocalPart(Kind.JAGGED, len(rows), rows, lengths=lengths)


def _check_rows(rows: list[torch.Tensor]) -> None:
    """A store can hold each row, and all rows have one dtype and one device."""
    if len(set(map(_SORT, rows))) == 1:
        _check_tensor(rows[0])
        return
    for row in {_SORT(row): row for row in rows}.values():  # one of each sort
        _check_tensor(row)
    if len(dtypes := {row.dtype for row in rows}) > 1:
        raise BatchError(f"rows of one key have different dtypes: {', '.join(sorted(map(str, dtypes)))}")
    devices = {row.device for row in rows}
    raise BatchError(f"rows of one key lie on different devices: {', '.join(sorted(map(str, devices)))}")


def _check_values(tensor: Any) -> None:
    if tensor.is_meta:
        raise BatchError(
            "a tensor on the meta device has a shape, but no values", hint="give the tensor that was computed"
        )


def _check_tensor(tensor: torch.Tensor) -> None:
    _check_values(tensor)
    if tensor.is_nested:
        raise _nested_row()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise BatchError(f"a tensor of layout {tensor.layout} on {tensor.device} can't be held", hint="make it dense")
    if hasattr(tensor, "full_tensor"):
        raise BatchError(
            "a DTensor lies on several ranks",
            hint="give this rank's rows, tensor.to_local(), or all of them, tensor.full_tensor()",
        )
    checked_dtype(tensor.dtype)


def _nested_row() -> BatchError:
    return BatchError("a row is a nested tensor itself", hint="give one nested tensor, or a list of plain tensors")


def _of_numpy(array: npt.NDArray[Any]) -> torch.Tensor | list[Any]:
    if isinstance(array, np.ma.MaskedArray):
        raise BatchError(
            "the mask of a masked numpy array would be lost",
            hint="give array.filled(value), and the mask under a key of its own",
        )
    if array.dtype.kind not in "biufc":
        return list(array.tolist()) if array.ndim else [array.item()]
    has_odd_strides = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    if not array.flags.writeable or has_odd_strides or not array.dtype.isnative:  # torch takes none of these
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise BatchError(f"a numpy array of {array.dtype} can't become a tensor: {error}") from error
