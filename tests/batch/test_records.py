"""Entries are compact, hashable and refuse what can't be."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import BatchError, ProtocolError
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.records import ClearReport, Entry, Kind, Owner, ShardId, VersionSpan

ENTRY = Entry(
    shard=ShardId("task-000123", "log_probs"),
    rows=1,
    kind=Kind.DENSE,
    dtype="float32",
    item_shape=(1024,),
    lengths=(),
    nbytes=4096,
    digest=(1 << 64) - 1,
    versions=VersionSpan(3, 4),
    owner="owner-01",
)


def test_an_entry_takes_about_sixty_bytes() -> None:
    assert len(msgspec.msgpack.encode(ENTRY)) <= 64


def test_an_entry_says_whose_and_what_and_neither_where_nor_when() -> None:
    """No address, no training step, no offset into a batch: an entry is the same in whatever batch it is."""
    assert Entry.__struct_fields__ == (
        *("shard", "rows", "kind", "dtype", "item_shape", "lengths", "nbytes", "digest", "versions", "owner"),
    )
    assert ShardId.__struct_fields__ == ("task_id", "key")
    entries = [msgspec.structs.replace(ENTRY, shard=ShardId(name, "k")) for name in ("a", "b")]
    batch = DistributedBatch.of_entries(entries, [Owner(ENTRY.owner, "ipc:///s")])
    assert batch.chunk(2)[1].entries() == entries[1:]
    assert batch.reorder([len(batch) - 1, 0]).chunk(2)[0].entries() == entries[1:]


def test_entries_and_shard_ids_are_hashable_and_equal_after_a_round_trip() -> None:
    again = decode_as(msgspec.msgpack.encode(ENTRY), Entry)
    assert again == ENTRY and hash(again) == hash(ENTRY) and {again: 1}[ENTRY] == 1
    assert {ShardId("a", "b"), ShardId("a", "b")} == {ShardId("a", "b")}
    owner = Owner("owner-01", "tcp://10.0.0.1:7000", boot_id="b", pid=4, start_ticks=5)
    assert decode_as(msgspec.msgpack.encode(owner), Owner) == owner


@given(st.text(min_size=1, max_size=64), st.text(min_size=1, max_size=64))
def test_ids_may_hold_any_character(task_id: str, key: str) -> None:
    shard = ShardId(task_id, key)
    assert decode_as(msgspec.msgpack.encode(shard), ShardId) == shard


def test_ids_with_separators_never_meet() -> None:
    assert ShardId("a:b", "c") != ShardId("a", "b:c")
    assert str(ShardId("a:b", "c")) != str(ShardId("a", "b:c"))


@pytest.mark.parametrize(
    ("task_id", "key"), [("", "k"), ("t", ""), ("t" * 513, "k"), ("t", "k" * 513), ("\ud800", "k")]
)
def test_ids_out_of_their_limits_are_refused(task_id: str, key: str) -> None:
    with pytest.raises(BatchError):
        ShardId(task_id, key)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": 0}, "has 0 rows"),
        ({"rows": (1 << 20) + 1}, "rows; allowed"),
        ({"dtype": "float3"}, "unknown dtype"),
        ({"nbytes": 4095}, "says 4095 bytes"),
        ({"lengths": (3,)}, "1 lengths"),
        ({"kind": Kind.JAGGED}, "0 lengths"),
        ({"kind": Kind.VALUES}, "plain values"),
        ({"digest": -1}, "64-bit"),
        ({"digest": 1 << 64}, "64-bit"),
        ({"item_shape": (1 << 40, 1 << 40), "nbytes": 1 << 44}, "make"),
    ],
)
def test_an_impossible_entry_is_refused_here_and_from_a_peer(change: dict[str, object], text: str) -> None:
    with pytest.raises(BatchError, match=text):
        msgspec.structs.replace(ENTRY, **change)
    fields = {name: getattr(ENTRY, name) for name in Entry.__struct_fields__} | change
    if fields["digest"] == 1 << 64:
        return  # no msgpack integer is that large
    with pytest.raises(ProtocolError):
        decode_as(msgspec.msgpack.encode(list(fields.values())), Entry)


def test_versions_are_a_span() -> None:
    assert VersionSpan(2, 3).joined(VersionSpan(5, 7)) == VersionSpan(2, 7)
    assert str(VersionSpan(2, 2)) == "2" and str(VersionSpan(2, 7)) == "2..7"
    for first, last in ((3, 2), (-1, 2)):
        with pytest.raises(BatchError, match="no span"):
            VersionSpan(first, last)


def test_a_clear_report_says_who_was_not_reached() -> None:
    assert str(ClearReport(3, 1)) == "3 cleared, 1 unknown"
    assert "owner-2" in str(ClearReport(0, 0, (("owner-2", ProtocolError("no")),)))
