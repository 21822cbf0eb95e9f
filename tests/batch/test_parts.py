"""Parts and their bytes: what is put is what comes out, without a copy where none is needed."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from inference_plugin.wire.copying import places_in
from inference_plugin.wire.digest import Digest
from inference_plugin.wire.errors import BatchError, ProtocolError
from inference_plugin.wire.manifest import DTYPE_BYTES
from trainer_adapters.batch.inputs import local_part, parts_of_task
from trainer_adapters.batch.parts import LocalPart, buffers_of, entry_of, part_of, sources_of
from trainer_adapters.batch.records import Entry, Kind, ShardId, VersionSpan

SHARD = ShardId("t", "k")


def through_bytes(part: LocalPart, misplaced: int = 0) -> tuple[Entry, LocalPart]:
    """What a store and a consumer do: the bytes one after the other, in memory that begins `misplaced` bytes late."""
    buffers, digest = buffers_of(part), Digest()
    for buffer in buffers:
        digest.update(buffer)
    entry = entry_of(SHARD, part, "o", digest.intdigest(), VersionSpan(1, 2))
    memory = torch.zeros(misplaced + entry.nbytes, dtype=torch.uint8)
    if buffers:
        memory.numpy()[misplaced:] = np.concatenate(buffers)
    return entry, part_of(entry, memory[misplaced:])


def rows_of(part: LocalPart) -> list[Any]:
    if part.kind is Kind.VALUES:
        return part.values
    if part.offsets is None:
        return list(part.tensor)
    return [part.tensor[a:b] for a, b in zip(part.offsets[:-1], part.offsets[1:], strict=True)]


def assert_same_rows(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert bytes(a.contiguous().reshape(-1).view(torch.uint8).numpy()) == bytes(
            b.contiguous().reshape(-1).view(torch.uint8).numpy()
        )


@pytest.mark.parametrize("dtype", [name for name in DTYPE_BYTES if hasattr(torch, name)])
@pytest.mark.parametrize("misplaced", [0, 1])
def test_every_dtype_keeps_its_bytes(dtype: str, misplaced: int) -> None:
    size = DTYPE_BYTES[dtype]
    tensor = torch.arange(3 * 5 * size, dtype=torch.uint8).remainder(2).view(getattr(torch, dtype)).view(3, 5)
    entry, part = through_bytes(local_part(tensor), misplaced)
    assert (entry.kind, entry.dtype, entry.item_shape, entry.nbytes) == (Kind.DENSE, dtype, (5,), 15 * size)
    assert_same_rows(rows_of(part), list(tensor))


def test_a_part_of_aligned_bytes_is_a_view_of_them() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    part = local_part(tensor)
    assert part.tensor is tensor and buffers_of(part)[0].ctypes.data == tensor.data_ptr()
    memory = torch.zeros(64, dtype=torch.uint8)
    view = part_of(entry_of(SHARD, part, "o", 0), memory[16:])
    assert view.tensor.data_ptr() == memory.data_ptr() + 16


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12).view(3, 4).t(),
        torch.arange(24).view(2, 3, 4)[:, ::2],
        torch.arange(3),
        torch.zeros(3, 0),
        torch.ones(2, 3, requires_grad=True),
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.arange(6, dtype=">i4").reshape(2, 3)[::-1],
        np.array([(1, 7), (2, 8)], dtype=[("a", "i1"), ("b", "<i4")])["b"],  # 5 bytes from one to the next
        [torch.arange(3), torch.arange(3, 6)],
        [torch.tensor(1.5), torch.tensor(2.5)],
    ],
)
def test_dense_rows_of_every_form_come_back(value: Any) -> None:
    part = local_part(value)
    assert part.kind is Kind.DENSE
    for row, again in zip(value, rows_of(through_bytes(part)[1]), strict=True):
        assert again.tolist() == row.tolist()


@pytest.mark.parametrize(
    "rows",
    [
        [[1.0], [2.0, 3.0], []],
        [[], [], [5.0]],
        [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]],
    ],
)
@pytest.mark.parametrize("form", ["list", "nested", "strided"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_rows_of_every_form_come_back(rows: list[Any], form: str) -> None:
    tensors = [torch.tensor(row) for row in rows]
    value: Any = tensors
    if form == "nested":
        value = torch.nested.nested_tensor(tensors, layout=torch.jagged)
    elif form == "strided":
        value = torch.nested.nested_tensor(tensors, layout=torch.strided)
    entry, part = through_bytes(local_part(value))
    assert entry.kind is Kind.JAGGED and entry.lengths == tuple(map(len, rows))
    assert_same_rows(rows_of(part), tensors)


def test_a_slice_of_a_nested_tensor_holds_its_own_rows_only() -> None:
    whole = torch.nested.nested_tensor_from_jagged(torch.arange(10), torch.tensor([2, 4, 9]))
    entry, part = through_bytes(local_part(whole))
    assert entry.nbytes == 7 * 8 and [r.tolist() for r in rows_of(part)] == [[2, 3], [4, 5, 6, 7, 8]]
    narrowed = torch.nested.narrow(
        torch.arange(12).view(2, 6), 1, torch.tensor([1, 0]), torch.tensor([2, 3]), layout=torch.jagged
    )
    assert [r.tolist() for r in rows_of(local_part(narrowed))] == [[1, 2], [6, 7, 8]]


def test_plain_values_come_back_as_messages_carry_them() -> None:
    value = [None, True, -(1 << 63), (1 << 64) - 1, 1.5, "a/b:ü", b"\0", (1, [2]), {"k": {3: None}}, np.float32(2)]
    part = local_part(value)
    expected = [None, True, -(1 << 63), (1 << 64) - 1, 1.5, "a/b:ü", b"\0", [1, [2]], {"k": {3: None}}, 2.0]
    assert part.values == expected
    entry, again = through_bytes(part)
    assert again.values == expected and entry.nbytes == len(part.encoded)
    assert local_part(np.array(["a", "b"])).values == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor(1.0), "no dimension"),
        (torch.eye(3).to_sparse(), "layout"),
        (torch.zeros(2, dtype=torch.uint16), "can't travel"),
        (torch.zeros(2, device="meta"), "no values"),
        (np.ma.masked_array([1, 2], mask=[0, 1]), "the mask of a masked numpy array"),
        ([np.ma.masked_array([1, 2], mask=[0, 1])], "the mask of a masked numpy array"),
        ([torch.zeros(2), torch.zeros(3, dtype=torch.int64)], "different dtypes"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "don't make one column"),
        ([torch.zeros(2), torch.zeros(2, 4)], "don't make one column"),
        ([torch.tensor(1.0), torch.zeros(2)], "don't make one column"),
        ([torch.zeros(2), 3], "a Tensor is not a plain value"),
        ([object()], r"rows\[0\]: a object"),
        ([{"a": [1, {1, 2}]}], r"rows\[0\]\['a'\]\[1\]: a set"),
        ([{(1,): 2}], "keys are str or int"),
        ([1 << 64], "64 bits"),
        ("text", "a str is not rows"),
        ({"a": 1}, "a dict is not rows"),
        (3, "a int is not rows"),
    ],
)
def test_what_is_not_rows_is_refused_with_its_place(value: Any, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        local_part(value)


def test_values_nested_without_end_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(BatchError, match="nested deeper"):
        local_part([endless])


def test_text_that_no_message_can_carry_is_refused_when_it_is_to_travel() -> None:
    with pytest.raises(BatchError, match="can't be encoded"):
        buffers_of(local_part(["\ud800"]))


def test_bytes_that_are_not_the_entry_are_refused() -> None:
    part = local_part([1, 2])
    entry = entry_of(SHARD, part, "o", 0)
    for bad in (b"\x93\x01\x02\x03", b"\x81\x01\x02", b"\xc1\xc1\xc1"):
        buffer = torch.frombuffer(bytearray(bad), dtype=torch.uint8)
        with pytest.raises(ProtocolError, match=r"rows|plain values|contiguous bytes"):
            part_of(entry, buffer)
    tensor_entry = entry_of(SHARD, local_part(torch.zeros(2, 2)), "o", 0)
    for buffer in (torch.zeros(15, dtype=torch.uint8), torch.zeros(16), torch.zeros(4, 4, dtype=torch.uint8)):
        with pytest.raises(ProtocolError, match="needs 16 contiguous bytes"):
            part_of(tensor_entry, buffer)


def test_rows_of_no_part_make_no_entry() -> None:
    with pytest.raises(BatchError, match="has 0 rows"):
        entry_of(SHARD, local_part(torch.zeros(0, 3)), "o", 0)


def test_sources_are_the_buffers_without_an_array_for_each_piece() -> None:
    for value in (
        [torch.arange(3), torch.arange(0), torch.arange(5)],
        [torch.arange(4), torch.arange(4) + 4],
        [torch.tensor(1.0), torch.tensor(2.0)],
        [torch.arange(12).reshape(3, 4).t(), torch.arange(8).reshape(2, 4)[:, :3]],
        torch.randn(3, 4, requires_grad=True),
        torch.ones(3, dtype=torch.complex64).conj(),
        [torch.ones(3, dtype=torch.complex64).conj().imag, torch.ones(2)],
        ["plain", None],
    ):
        part = local_part(value)
        sources = sources_of(part)
        found = b"".join(itertools.starmap(ctypes.string_at, places_in(sources.places)))
        assert found == b"".join(buffer.tobytes() for buffer in buffers_of(part))
        assert len(found) == part.nbytes
        (given,) = parts_of_task(SHARD.task_id, {SHARD.key: value}).values()
        known = given.sources or sources
        assert b"".join(itertools.starmap(ctypes.string_at, places_in(known.places))) == found
        assert given.nbytes == part.nbytes
        assert entry_of(SHARD, given.part, "o", 1) == entry_of(SHARD, part, "o", 1)


def freed(start: int, step: int = 1) -> torch.Tensor:
    """Elements of memory that is gone."""
    whole = torch.ones(8)
    part = whole[start : start + 4 : step]
    whole.untyped_storage().resize_(0)
    return part


@pytest.mark.parametrize("start", [0, 3])
def test_a_tensor_whose_memory_was_freed_is_refused(start: int) -> None:
    gone, strided = freed(start), freed(start, 2)
    for rows in ([gone, gone], [gone, torch.ones(2)], [torch.nn.Parameter(torch.ones(2)), gone], [strided, strided]):
        with pytest.raises(BatchError, match="its memory was freed"):
            sources_of(local_part(rows))
        with pytest.raises(BatchError, match="its memory was freed"):
            buffers_of(local_part(rows))
