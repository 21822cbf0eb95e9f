"""A batch's metadata as bytes: all of it, little of it, and nothing else is accepted."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.wire.errors import BatchError, ProtocolError
from tests.batch.memory_owner import MemoryClient, MemoryOwner
from trainer_adapters.batch import packing
from trainer_adapters.batch.batch import BatchStatus, DistributedBatch
from trainer_adapters.batch.records import Entry, Kind, Owner, ShardId, VersionSpan

OWNERS = [Owner("owner/ä:1", "tcp://10.0.0.1:7000", "boot", 7, 8), Owner("b", "ipc:///x")]


def entry(task: int, key: str, rows: int = 1, kind: Kind = Kind.DENSE, versions: VersionSpan | None = None) -> Entry:
    length = 64 + task % 7
    return Entry(
        ShardId(f"task {task}/ü:", key),
        rows,
        kind,
        "" if kind is Kind.VALUES else "bfloat16",
        (length,) if kind is Kind.DENSE else (),
        (length,) * rows if kind is Kind.JAGGED else (),
        5 if kind is Kind.VALUES else 2 * length * rows,
        (task * 0x9E3779B97F4A7C15) % (1 << 64),
        versions,
        OWNERS[task % 2].id,
    )


def some_batch() -> DistributedBatch:
    entries = [entry(i, "a", 1 + i % 3, versions=VersionSpan(i, i + 1)) for i in range(5)]
    entries += [entry(i, "b", 1 + i % 3, Kind.JAGGED if i % 2 else Kind.DENSE) for i in range(5)]
    entries += [entry(i, "c", 3, Kind.VALUES) for i in range(10, 13)]
    return DistributedBatch.of_entries(entries, OWNERS)


def contents(batch: DistributedBatch) -> list[Any]:
    """All that a batch says, by row."""
    listed: list[Any] = [len(batch), batch.status, batch.owners, batch.task_ids, batch.versions, batch.nbytes]
    for key, column in batch.columns().items():
        index, entries = column.index, column.all_entries()
        rows = [(entries[part], row) for part, row in zip(index.part.tolist(), index.row.tolist(), strict=True)]
        listed.append((key, column.schema, rows))
    return listed


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch,
        lambda batch: batch.reorder([8, 0, 3, 3, 7]),
        lambda batch: batch.chunk(2)[1],
        lambda batch: batch.chunk(20)[19],
        lambda batch: batch.select(["c"]),
        lambda batch: batch.select([]),
        lambda batch: DistributedBatch(),
        lambda batch: DistributedBatch.concat([batch.reorder([1]), batch]),
    ],
)
def test_a_batch_is_the_same_after_its_bytes(change: Any) -> None:
    batch = change(some_batch())
    data = batch.to_bytes()
    again = DistributedBatch.from_bytes(data)
    named = {entry.owner for entry in batch.entries()}
    expected = contents(batch)
    expected[2] = {owner: batch.owners[owner] for owner in batch.owners if owner in named}
    assert contents(again) == expected
    assert again.to_bytes() == data


def test_an_entry_costs_its_digest_and_a_few_bytes() -> None:
    """4096 tasks of 4 keys: far below 0.5 % of data that has 4 KiB for each entry."""
    entries = [entry(i, key, versions=VersionSpan(i // 100, 1 + i // 100)) for i in range(4096) for key in "abcd"]
    data = DistributedBatch.of_entries(entries, OWNERS).to_bytes()
    assert len(data) < 20 * len(entries)


def test_frameworks_carry_a_batch_by_its_bytes_alone() -> None:
    batch = some_batch()
    rebuild, arguments = batch.__reduce__()
    assert arguments == (batch.to_bytes(),) and contents(rebuild(*arguments)) == contents(batch)
    assert contents(pickle.loads(pickle.dumps(batch))) == contents(batch)  # noqa: S301 -- what Ray does with our bytes
    assert contents(copy.deepcopy(batch)) == contents(batch)


def test_a_local_batch_refuses_to_travel_and_says_what_to_do(client: MemoryClient, owner: MemoryOwner) -> None:
    local = DistributedBatch({"x": torch.zeros(2)})
    for carry in (local.to_bytes, lambda: pickle.dumps(local)):
        with pytest.raises(BatchError, match=r"remotize it first: `remotize\(batch, store, task_id\)`"):
            carry()
    fetched = DistributedBatch.of_entries(owner.put("t", {"x": [1]}), [owner.owner]).fetch()
    with pytest.raises(BatchError, match="remotize"):
        fetched.to_bytes()
    assert copy.copy(fetched)["x"] == [1]


class Malice:
    executed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Malice, "executed", True)


def test_a_malicious_pickle_is_refused_and_not_executed() -> None:
    with pytest.raises(ProtocolError):
        DistributedBatch.from_bytes(pickle.dumps(Malice()))
    assert not Malice.executed


def unpacked() -> dict[str, Any]:
    return dict(
        zip(packing.PackedBatch.__struct_fields__, msgspec.msgpack.decode(some_batch().to_bytes()), strict=True)
    )


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("format", 2, "format 2"),
        ("rows", 8, "rows"),
        ("rows", 1 << 24, "rows|too large"),
        ("rows", 1 << 25, r"\$\[1\]"),
        ("owners", [], "index"),
        ("tasks", ["only one"], "index"),
        ("tasks", ["x" * 513], "512"),
        ("versions", [[2, 1], None], "no span"),
        ("indices", [], "index"),
        ("indices", [[b"1234", b""]], "index of 1 and 0 rows"),
        ("columns", "text", "Expected"),
    ],
)
def test_wrong_fields_are_refused(field: str, value: Any, text: str) -> None:
    fields = unpacked() | {field: value}
    with pytest.raises(ProtocolError, match=text):
        DistributedBatch.from_bytes(msgspec.msgpack.encode(list(fields.values())))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("key", "b", "twice"),
        ("dtype", "float1", "no valid type"),
        ("kind", 7, "Invalid"),
        ("item_shape", [9, 9], "but an entry of it"),
        ("digests", b"1234567", "buffer size"),
        ("digests", b"", "0 entries and 5 owners"),
        ("tasks", [0, 1, 2, 3], "5 entries and 4 tasks"),
        ("tasks", [0, 1, 2, 3, 99], "index"),
        ("owners", [2], "index"),
        ("rows", [1], "rows"),
        ("rows", [1, 2, 3, 1, 1 << 21], r"1048576"),
        ("kinds", [2], "dtype|plain"),
        ("shapes", [[1 << 40, 1 << 40]], "bytes"),
        ("lengths", [[1, 2]], "lengths"),
        ("lengths", [[], []], "5 entries and 2 lengths"),
        ("value_bytes", [0, 0], "5 entries and 2 sizes"),
    ],
)
def test_wrong_columns_are_refused(field: str, value: Any, text: str) -> None:
    fields = unpacked()
    position = packing.PackedColumn.__struct_fields__.index(field)
    fields["columns"][0][position] = value
    with pytest.raises(ProtocolError, match=text):
        DistributedBatch.from_bytes(msgspec.msgpack.encode(list(fields.values())))


def test_an_index_that_points_elsewhere_is_refused() -> None:
    fields = unpacked()
    zeros = np.zeros(9, "<u4")
    for part, row, text in (
        (zeros, zeros, "entry without rows"),
        (zeros + 9, zeros, "outside"),
        (np.arange(9, dtype="<u4") % 5, zeros + 3, "outside"),
    ):
        fields["indices"] = [[part.tobytes(), row.tobytes()], *fields["indices"][1:]]
        with pytest.raises(ProtocolError, match=text):
            DistributedBatch.from_bytes(msgspec.msgpack.encode(list(fields.values())))


def test_a_few_bytes_can_t_make_their_reader_count_for_hours() -> None:
    """100,000 entries of 100,000 rows each, whose lengths are written once."""
    count, fields = 100_000, unpacked()
    column = dict(zip(packing.PackedColumn.__struct_fields__, fields["columns"][0], strict=True))
    column |= {"kind": 1, "dtype": "uint8", "item_shape": [], "digests": bytes(8 * count), "tasks": [0] * count}
    column |= {"rows": [count], "kinds": [1], "shapes": [[]], "lengths": [[0] * count], "versions": [0], "owners": [0]}
    fields |= {"rows": count, "columns": [list(column.values())]}
    fields["indices"] = [[np.arange(count, dtype="<u4").tobytes(), bytes(4 * count)]]
    with pytest.raises(ProtocolError, match="repeats 10000000000 lengths"):
        DistributedBatch.from_bytes(msgspec.msgpack.encode(list(fields.values())))


def test_a_few_bytes_can_t_make_their_reader_build_an_index_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys whose entries have other numbers of rows have an index of their own, also where all rows are in order."""
    entries = [
        Entry(ShardId(f"{key}{rows}", key), rows, Kind.VALUES, "", (), (), 9, 0, None, "store-1")
        for key, counts in (("a", (1, 2)), ("b", (2, 1)))
        for rows in counts
    ]
    batch = DistributedBatch.of_entries(entries, [Owner("store-1", "ipc:///x")])
    data = batch.to_bytes()
    assert len(DistributedBatch.from_bytes(data)) == 3
    monkeypatch.setattr(packing, "MAX_INDEXED_ROWS", 5)
    with pytest.raises(ProtocolError, match="3 rows with more than 1 indices is too large"):
        DistributedBatch.from_bytes(data)
    with pytest.raises(BatchError, match="3 rows with 2 indices, which repeats 0 lengths, is too large to travel"):
        batch.to_bytes()


@pytest.mark.parametrize("limit", ["MAX_BATCH_ROWS", "MAX_INDEXED_ROWS", "MAX_REPEATED_LENGTHS"])
def test_what_a_reader_would_refuse_as_too_large_is_refused_where_it_is_sent(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight rows, of four entries that repeat the same two lengths."""
    batch = DistributedBatch.of_entries([entry(i, "a", 2, Kind.JAGGED) for i in (0, 7, 14, 21)], OWNERS)
    monkeypatch.setattr(packing, limit, 8)
    assert len(DistributedBatch.from_bytes(batch.to_bytes())) == 8
    monkeypatch.setattr(packing, limit, 7)
    with pytest.raises(BatchError, match="too large to travel"):
        batch.to_bytes()


@pytest.mark.parametrize("tag", [np.float32(0.5), torch.tensor(0.5), [1]])
def test_a_tag_that_a_reader_would_refuse_is_refused_where_it_is_sent(tag: Any) -> None:
    one = entry(0, "a", 2, Kind.JAGGED)
    task = one.shard.task_id
    batch = DistributedBatch.of_entries([one], OWNERS, tags={task: {"score": tag}})
    with pytest.raises(BatchError, match=f"tag 'score' of task {task!r} is a {type(tag).__name__}"):
        batch.to_bytes()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_bytes_are_a_batch_or_a_protocol_error(data: st.DataObject) -> None:
    good = bytearray(some_batch().to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        batch = DistributedBatch.from_bytes(bytes(good[: data.draw(st.integers(len(good) - 2, len(good)))]))
    except ProtocolError:
        return
    assert batch.status in BatchStatus and repr(batch) and batch.to_bytes()


@given(st.binary(max_size=64))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        DistributedBatch.from_bytes(garbage)
