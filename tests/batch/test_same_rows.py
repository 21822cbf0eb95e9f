"""Any sequence of operations gives the same rows, whether the data is here or elsewhere, for any split of keys into shards.

Three things do the same operations: a list of dicts, a LOCAL batch, and a REMOTE one whose keys are cut into shards each in
its own way.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.batch.memory_owner import MemoryClient, MemoryOwner
from trainer_adapters.batch.balance import partition
from trainer_adapters.batch.batch import BatchStatus, DistributedBatch
from trainer_adapters.batch.nested import Putting
from trainer_adapters.batch.records import VersionSpan

Rows = list[dict[str, Any]]
KEYS = ("ids", "states", "mask", "scores", "logits", "tags")


def rows_of(batch: DistributedBatch) -> Rows:
    """The rows of a LOCAL batch as plain Python."""
    columns = {}
    for key, value in batch.items():
        rows = value.unbind() if isinstance(value, torch.Tensor) else value
        columns[key] = [row.tolist() if isinstance(row, torch.Tensor) else row for row in rows]
    return [{key: columns[key][i] for key in columns} for i in range(len(batch))]


def made_rows(count: int, seed: int) -> tuple[Rows, dict[str, Any]]:
    """Rows as plain Python, and as the values of a batch."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 5, count).tolist()
    ids = [torch.from_numpy(random.integers(0, 99, length)) for length in lengths]
    states = [torch.from_numpy(random.integers(0, 99, (length, 2)).astype(np.float32)) for length in lengths]
    values: dict[str, Any] = {
        "ids": torch.nested.nested_tensor(ids, layout=torch.jagged),
        "states": torch.nested.nested_tensor(states, layout=torch.jagged),
        "mask": torch.from_numpy(random.integers(0, 2, (count, 4)).astype(np.bool_)),
        "scores": torch.from_numpy(random.integers(0, 99, count).astype(np.float32)).to(torch.bfloat16),
        "logits": torch.from_numpy(random.integers(0, 99, (count, 2, 3)).astype(np.float64)),
        "tags": [[None, i, f"tag {i}", {"i": [i]}][i % 4] for i in range(count)],
    }
    plain = [
        {
            "ids": ids[i].tolist(),
            "states": states[i].tolist(),
            "mask": values["mask"][i].tolist(),
            "scores": values["scores"][i].tolist(),
            "logits": values["logits"][i].tolist(),
            "tags": values["tags"][i],
        }
        for i in range(count)
    ]
    return plain, values


def put(owners: Sequence[Putting], values: dict[str, Any], cuts: dict[str, list[int]]) -> DistributedBatch:
    """The values as a REMOTE batch; each key is cut into shards at its own rows, shards go to the owners in turn."""
    whole, entries = DistributedBatch(values), []
    for key in values:
        bounds = [0, *cuts[key], len(whole)]
        for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
            part = whole.select([key]).reorder(range(start, stop))[key]
            owner = owners[number % len(owners)]
            entries += owner.put(f"{key}/{number}", {key: part}, VersionSpan(number, number))
    return DistributedBatch.of_entries(entries, [owner.owner for owner in owners])


@st.composite
def cut_rows(draw: st.DrawFn) -> tuple[int, int, dict[str, list[int]]]:
    count = draw(st.integers(1, 12))
    cuts = {
        key: sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else [] for key in KEYS
    }  # fmt: skip
    return count, draw(st.integers(0, 1 << 16)), cuts


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "chunk",
                "split",
                "reorder",
                "filter",
                "select",
                "rejoin",
                "twice",
                "union",
                "bytes",
                "fetch",
                "split tasks",
                "without",
            ]
        ),
        st.integers(0, 1 << 16),
    ),
    max_size=6,
)


class Three:
    """The same rows three times."""

    def __init__(self, plain: Rows, local: DistributedBatch, remote: DistributedBatch) -> None:
        self.plain = plain
        self.local = local
        self.remote = remote

    def apply(self, operation: str, seed: int) -> None:
        random = np.random.default_rng(seed)
        count, parts, both = len(self.plain), int(random.integers(1, 5)), (self.local, self.remote)
        keys = list(self.local.keys())
        if operation == "chunk":
            sizes = [count // parts + (i < count % parts) for i in range(parts)]
            chosen = int(random.integers(0, parts))
            self.plain = self.plain[sum(sizes[:chosen]) : sum(sizes[: chosen + 1])]
            self.local, self.remote = (batch.chunk(parts)[chosen] for batch in both)
        elif operation == "split":
            key = "ids" if "ids" in keys else "mask"
            if key not in keys:
                return
            by: Any = key if key == "ids" else random.integers(0, 9, count)
            tokens = [len(row["ids"]) for row in self.plain] if key == "ids" else by
            chosen = int(random.integers(0, parts))
            rows = partition(np.asarray(tokens, dtype=np.int64), parts)[chosen]
            self.plain = [self.plain[i] for i in rows]
            self.local, self.remote = (batch.split(parts, by)[chosen] for batch in both)
        elif operation == "split tasks":
            tasks = self.remote.row_tasks()
            chosen = int(random.integers(0, parts))
            mine = self.remote.split(parts, random.integers(0, 9, count), whole_tasks=True)
            kept = set(mine[chosen].row_tasks())
            rows = [i for i, task in enumerate(tasks) if task in kept]
            assert sorted(task for one in mine for task in set(one.row_tasks())) == sorted(set(tasks))
            self.plain = [self.plain[i] for i in rows]
            self.local, self.remote = self.local.reorder(rows), mine[chosen]
        elif operation == "without":
            unwanted = list(random.permutation(self.remote.task_ids)[: random.integers(0, 3)])
            of_row = [set(of_keys) for of_keys in zip(*(self.remote.row_tasks(key) for key in keys), strict=True)]
            rows = [i for i, tasks in enumerate(of_row) if not tasks & set(unwanted)]
            self.plain = [self.plain[i] for i in rows]
            self.local, self.remote = self.local.reorder(rows), self.remote.without(unwanted)
        elif operation == "reorder":
            rows = random.integers(0, count, random.integers(0, 9)) if count and seed % 2 else random.permutation(count)
            self.plain = [self.plain[i] for i in rows]
            self.local, self.remote = (batch.reorder(rows) for batch in both)
        elif operation == "filter":
            keep = random.integers(0, 3, count) > 0
            self.plain = [row for row, kept in zip(self.plain, keep, strict=True) if kept]
            self.local, self.remote = self.local.filter(torch.from_numpy(keep)), self.remote.filter(keep.tolist())
        elif operation == "select":
            some = list(random.permutation(keys)[: random.integers(1, len(keys) + 1)])
            self.plain = [{key: row[key] for key in some} for row in self.plain]
            self.local, self.remote = (batch.select(some) for batch in both)
        elif operation == "rejoin":
            self.local, self.remote = (DistributedBatch.concat(batch.chunk(parts)) for batch in both)
        elif operation == "twice":
            order = random.permutation(count)
            self.plain = [*self.plain, *(self.plain[i] for i in order)]
            self.local, self.remote = (DistributedBatch.concat([batch, batch.reorder(order)]) for batch in both)
        elif operation == "union":
            cut = int(random.integers(0, len(keys) + 1))
            self.local, self.remote = (batch.select(keys[cut:]).union(batch.select(keys[:cut])) for batch in both)
        elif operation == "bytes" and self.remote.status is not BatchStatus.LOCAL:
            self.remote = DistributedBatch.from_bytes(self.remote.to_bytes())
        elif operation == "fetch":
            self.remote.fetch()

    def check(self) -> None:
        assert len(self.local) == len(self.remote) == len(self.plain)
        assert set(self.local.keys()) == set(self.remote.keys())
        for key in self.local:
            if key in ("ids", "states", "mask", "logits"):
                assert self.local.lengths(key).tolist() == self.remote.lengths(key).tolist()
                assert self.remote.lengths(key).tolist() == [len(row[key]) for row in self.plain]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cut_rows(), OPERATIONS)
def test_any_operations_give_the_same_rows_local_and_remote(
    made: tuple[int, int, dict[str, list[int]]], operations: list[tuple[str, int]]
) -> None:
    count, seed, cuts = made
    with pytest.MonkeyPatch.context() as patch:
        client = MemoryClient()
        patch.setitem(sys.modules, "trainer_adapters.batch.client", client)
        plain, values = made_rows(count, seed)
        three = Three(plain, DistributedBatch(values), put([MemoryOwner(client), MemoryOwner(client)], values, cuts))
        assert three.local.status is BatchStatus.LOCAL and three.remote.status is BatchStatus.REMOTE
        for operation, argument in operations:
            three.apply(operation, argument)
            three.check()
        assert three.local.status is BatchStatus.LOCAL
        assert rows_of(three.local) == three.plain
        assert rows_of(three.remote.fetch()) == three.plain
        asked = [shard for shards in client.asked for shard in shards]
        assert three.remote.status is BatchStatus.LOCAL
        again = rows_of(three.remote)
        assert again == three.plain and len(asked) == sum(map(len, client.asked))


def test_keys_in_16_and_in_4_shards_stay_aligned(client: MemoryClient) -> None:
    plain, values = made_rows(32, 7)
    cuts = {key: list(range(2, 32, 2)) for key in KEYS} | {"ids": [8, 16, 24], "tags": [1]}
    remote = put([MemoryOwner(client)], values, cuts)
    assert len(remote.entries()) == 16 * 4 + 4 + 2
    for start, chunk in zip((0, 11, 22), remote.chunk(3), strict=True):
        assert rows_of(chunk.fetch()) == plain[start : start + 11 - (start == 22)]


def test_what_no_row_needs_is_not_fetched(client: MemoryClient) -> None:
    plain, values = made_rows(32, 8)
    remote = put([MemoryOwner(client)], values, {key: list(range(1, 32)) for key in KEYS})
    three = remote.reorder([5, 3, 30]).select(["ids", "tags"])
    assert rows_of(three.fetch()) == [{"ids": plain[i]["ids"], "tags": plain[i]["tags"]} for i in (5, 3, 30)]
    assert {(shard.key, shard.task_id) for shard in client.asked[0]} == {
        (key, f"{key}/{i}") for key in ("ids", "tags") for i in (5, 3, 30)
    }


def test_batches_that_share_columns_give_their_rows_to_threads_of_their_own() -> None:
    """Rows that lie scattered are put together by the one thread while the other reads them."""
    some = [DistributedBatch({"n": [torch.full((i % 3 + 1,), i), torch.full((2,), i)]}) for i in range(100)]
    expected = [value for i in range(100) for value in ([i] * (i % 3 + 1), [i, i])]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            for _ in range(200):
                batch = DistributedBatch.concat(some)
                together = threads.submit(batch.select(["n"]).__getitem__, "n")
                rows = threads.submit(batch.rows, "n").result()
                assert (
                    [row.tolist() for row in rows] == [row.tolist() for row in together.result().unbind()] == expected
                )
    finally:
        sys.setswitchinterval(before)
