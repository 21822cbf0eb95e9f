"""The store of an owner: what it keeps, what it refuses, and what becomes of the memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.wire.errors import AuthError, BatchError, ConfigError, FetchFailed, ProtocolError, StoreFull
from tests.batch.interrupts import answers, interrupted
from tests.batch.owners import MIB, descriptors, elsewhere, fetched, mappings, memfd_bytes, owners, segment_descriptors
from tests.batch.store_promises import SMALL, StorePromises
from tests.support.rig import eventually, runtime
from trainer_adapters.batch.filling import fill
from trainer_adapters.batch.memory import LARGE_FROM_BYTES, PAGE, Block, BlockMemory
from trainer_adapters.batch.parts import Sources
from trainer_adapters.batch.records import ShardId
from trainer_adapters.batch.store import Store


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(budget_bytes=64 * MIB) as one:
        yield one


@pytest.fixture
def small() -> Iterator[Store]:
    with Store(budget_bytes=SMALL) as one:
        yield one


class TestEmbedded(StorePromises):
    """What every store promises, of the embedded one."""


def test_of_several_tasks_all_rows_are_stored_and_replace_others_or_none(store: Store) -> None:
    entries = store.put_tasks({"t": {"a": torch.zeros(2), "b": [1, 2]}, "u": {"a": torch.ones(3)}})
    assert [(str(entry.shard), entry.rows) for entry in entries] == [("'t':'a'", 2), ("'t':'b'", 2), ("'u':'a'", 3)]
    before = held(store)
    for wrong in ({"u": {"a": [{1}]}}, {"u": {"a": torch.ones(65 * MIB)}}, {"u": {"b": [1, 2]}}):
        with pytest.raises((BatchError, StoreFull)):
            store.put_tasks({"t": {"a": torch.ones(2)}, **wrong})
        assert held(store) == before == (2, 3, entries[1].nbytes + 20) and not store.get(entries[0].shard).tensor.any()
    store.put_tasks({"u": {"a": torch.ones(1)}, "t": {"a": torch.ones(2)}})
    assert held(store) == (2, 3, before[2] - 8)


def held(store: Store) -> tuple[int, int, int]:
    """Tasks, shards and bytes."""
    stats = store.stats()
    return stats.tasks, stats.shards, stats.nbytes


def test_a_shard_that_is_replaced_lives_on_for_its_readers(store: Store) -> None:
    (first,) = store.put("t", {"a": torch.zeros(2, 1000)})
    have = fetched([first], store.owner)
    (second,) = store.put("t", {"a": torch.ones(2, 1000)})
    assert (store.stats().nbytes, store.stats().leased_bytes) == (8000, 8000)
    assert not have[first.shard].tensor.any() and fetched([second], store.owner)[second.shard].tensor.all()
    have.clear()
    eventually(lambda: store.stats().leased_bytes == 0, "the end of the lease")


def test_what_a_store_does_not_take_is_said_at_the_call(store: Store) -> None:
    wrong: Any = [1]
    with pytest.raises(BatchError, match=r"the task id \[1\] is a list, not a text"):
        store.put(wrong, {"a": [1]})
    with pytest.raises(BatchError, match=r"shard=5 is a int -- give a ShardId"):
        store.get(5)  # type: ignore[arg-type]
    for ids in (5, None, [wrong]):
        with pytest.raises(BatchError, match="need a list of task ids"):
            store.held(ids)  # type: ignore[arg-type]
    for shape in (None, 1.5, [1.5], torch.zeros(2)):
        with pytest.raises(ConfigError, match="give a whole number"):
            store.empty(shape, dtype=torch.float32)  # type: ignore[arg-type]
    assert store.empty(3, dtype=torch.float32).shape == (3,)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="budget_bytes=tensor"):
        Store(budget_bytes=torch.zeros(2))  # type: ignore[arg-type]


def test_a_closed_store_says_so_when_it_is_asked_for_a_shard(store: Store) -> None:
    (entry,) = store.put("t", {"a": [1]})
    store.close()
    with pytest.raises(ProtocolError, match="is closed"):
        store.get(entry.shard)


def test_a_forked_child_can_neither_write_over_its_parents_rows_nor_close_its_parents_store(store: Store) -> None:
    entries = store.put("t", {"k": torch.ones(1, 1000)})
    child = os.fork()
    if not child:
        refused = 0
        for use in (
            lambda: store.put("child", {"k": torch.zeros(1, 1000)}),
            lambda: store.empty((3,), dtype=torch.int8),
            lambda: store.get(entries[0].shard),
            lambda: store.clear(["t"]),
        ):
            with contextlib.suppress(BatchError):
                use()
                break
            refused += 1
        store.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    more = store.put("u", {"k": torch.full((1, 1000), 2.0)})
    assert Path(store.owner.address.removeprefix("ipc://")).exists()
    have = fetched([*entries, *more], store.owner)
    assert [have[entry.shard].tensor.mean().item() for entry in (*entries, *more)] == [1.0, 2.0]


# --- budget ------------------------------------------------------------------------------------------------------------


def test_a_full_store_says_what_fills_it(store: Store) -> None:
    (entry,) = store.put("kept", {"k": torch.zeros(1, 8 * MIB)})
    (read,) = store.put("read", {"k": torch.zeros(1, 4 * MIB)})
    have = fetched([read], store.owner)
    store.clear(["read"])
    with pytest.raises(StoreFull) as raised:
        store.put("more", {"k": torch.zeros(1, 5 * MIB)}, timeout_s=0.05)
    text = str(raised.value)
    for part in (
        *("'more' needs 20971520 bytes", "within 0.05 s", "of 67108864 bytes 33554432 are held"),
        "16777216 are cleared but still read",
    ):
        assert part in text, text
    assert store.stats().tasks == 1 and have and entry


def test_a_store_that_closes_leaves_no_socket_behind() -> None:
    store = Store(budget_bytes=1000)
    path = Path(store.owner.address.removeprefix("ipc://"))
    assert path.exists()
    store.close()
    assert not path.exists()


def test_a_second_store_at_the_address_of_a_living_one_is_refused_and_a_dead_ones_may_be_taken(directory: Path) -> None:
    address = f"ipc://{directory}/mine"
    with Store(budget_bytes=MIB, address=address) as store:
        entries = store.put("t", {"k": [1]})
        with pytest.raises(AuthError, match="listens there"):
            Store(budget_bytes=MIB, address=address)
        assert fetched(entries, store.owner)[entries[0].shard].values == [1]
    with owners(directory, ["t"], address=address) as (owner,):
        with pytest.raises(AuthError, match="listens there"):
            Store(budget_bytes=MIB, address=address)
        owner.kill()
        assert (directory / "mine").exists()
        with Store(budget_bytes=MIB, address=address) as store:
            entries = store.put("t", {"k": [2]})
            assert fetched(entries, store.owner)[entries[0].shard].values == [2]
    (directory / "mine").write_text("somebody's file")
    with pytest.raises(AuthError, match="a file that is no socket"):
        Store(budget_bytes=MIB, address=address)
    assert (directory / "mine").read_text() == "somebody's file"


# --- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_descriptors_and_mappings_are_flat_over_2000_rounds() -> None:
    gc.collect()
    before = memfd_bytes()  # of tests that failed
    with Store(budget_bytes=64 * MIB) as store:
        lagging = [entry for i in range(3) for entry in store.put(f"lagging{i}", {"k": torch.full((1, 10), float(i))})]
        seen: list[tuple[int, int, int]] = []
        rows = {"a": torch.ones(4, 9_000), "b": [torch.ones(n) for n in (100, 3000)] * 2, "c": ["x"] * 4}
        for i in range(2000):
            entries = store.put(f"t{i}", rows)
            assert len(fetched(entries, store.owner if i % 20 else elsewhere(store.owner))) == 3
            store.clear([f"t{i}"])
            if i in (200, 1000, 1999):
                gc.collect()
                eventually(lambda: store.stats().leased_bytes == 0, "the end of the leases")
                if seen:  # libzmq closes sockets on a thread of its own
                    eventually(lambda: descriptors() <= seen[0][0] + 4, f"the descriptors of round 200: {seen}")
                seen.append((descriptors(), mappings(), memfd_bytes()))
        first, *later = seen
        for found in later:  # 340 MB went through
            assert found[1] <= first[1] + 2 and found[2] <= before + 65 * MIB, seen
        assert store.stats().nbytes == 120 and store.stats().spare_bytes <= 64 * MIB
        have = fetched(lagging, store.owner)
        assert [have[entry.shard].tensor[0, 5] for entry in lagging] == [0, 1, 2]
        have.clear()
        store.clear(["lagging0", "lagging1", "lagging2"])
    gc.collect()
    eventually(lambda: memfd_bytes() <= before, "all memory is given back")


def test_rows_that_are_put_after_a_clear_take_no_more_memory_and_come_to_the_same_pages() -> None:
    gc.collect()
    before = memfd_bytes()
    with Store(budget_bytes=256 * MIB) as store:
        for step in range(6):
            rows = {
                "dense": torch.full((2, MIB // 2), step),
                "ragged": [torch.full((i,), step) for i in (1, 9000)],
            }
            entries = [entry for i in range(3) for entry in store.put(f"{step}/{i}", rows)]
            most = 4 * 8 * MIB  # a segment for the 8 MiB of each task, and one for all small rows
            assert 12 * MIB <= memfd_bytes() - before <= most + 2 * MIB
            if step > 2:
                assert all(holding.block.is_warm for held in store.tasks.values() for holding in held.values())
            have = fetched(entries, store.owner if step % 2 else elsewhere(store.owner))  # every digest is checked
            assert all(part.tensor.eq(step).all() for part in have.values())
            have.clear()
            store.clear([f"{step}/{i}" for i in range(3)])
            eventually(lambda: store.stats().leased_bytes == 0, "the end of the leases")
            assert (store.stats().nbytes, store.taken_bytes) == (0, 0) and store.stats().spare_bytes >= 12 * MIB


def test_spare_memory_counts_against_the_budget_and_gives_way_to_rows() -> None:
    gc.collect()
    before = memfd_bytes()
    with Store(budget_bytes=64 * MIB) as store:
        for i in range(7):
            store.put(f"small{i}", {"k": torch.full((1, 8 * MIB), i, dtype=torch.uint8)})
        store.clear(["small0", "small2", "small4", "small6"])
        assert store.stats().spare_bytes == 32 * MIB
        store.put("large", {"k": torch.ones(1, 40 * MIB, dtype=torch.uint8)})
        assert store.stats().spare_bytes == 0 and memfd_bytes() - before <= 64 * MIB + 4 * PAGE
        with pytest.raises(StoreFull):
            store.put("more", {"k": torch.ones(1, MIB, dtype=torch.uint8)})
        store.clear(["large", "small1", "small3"])
        (tiny,) = store.put("tiny", {"k": torch.ones(1, 100, dtype=torch.uint8)})
        store.clear(["small5"])
        (whole,) = store.put("whole", {"k": torch.full((1, 64 * MIB - 100), 7, dtype=torch.uint8)})
        assert memfd_bytes() - before <= 64 * MIB + 4 * PAGE
        have = fetched([whole, tiny], store.owner)
        assert have[whole.shard].tensor.eq(7).all() and have[tiny.shard].tensor.eq(1).all()


def test_a_segment_that_is_full_and_empty_is_kept_for_the_next_blocks_until_it_is_trimmed() -> None:
    memory = BlockMemory(16 * PAGE)
    before = segment_descriptors()
    blocks = [memory.allocate(5 * PAGE) for _ in range(7)]
    assert memory.segments == 3 and not any(block.is_warm for block in blocks)
    assert [given_back for block in blocks for given_back in memory.free(block)] == []
    again = [memory.allocate(5 * PAGE) for _ in range(7)]
    assert memory.segments == 3 and all(block.is_warm for block in again) and memory.spare_bytes == 0
    for block in again:
        memory.free(block)
    assert memory.spare_bytes == 35 * PAGE
    memory.give_back(memory.trim(1))
    assert memory.segments == 2 and 0 < memory.spare_bytes < 35 * PAGE
    memory.give_back(memory.trim(memory.spare_bytes))
    assert (memory.segments, memory.spare_bytes) == (0, 0)
    memory.close()
    assert segment_descriptors() <= before


def test_a_segment_that_gave_pages_back_or_whose_reader_may_live_on_takes_no_further_block() -> None:
    memory = BlockMemory(16 * PAGE)
    gone, kept = memory.allocate(4 * PAGE), memory.allocate(4 * PAGE)
    fill([kept], [Sources.of([np.ones(4 * PAGE, np.uint8)])])
    memory.free(gone)
    memory.give_back(memory.trim(PAGE))
    after = memory.allocate(4 * PAGE)
    assert after.segment is not kept.segment and kept.memory.all()
    memory.give_back(memory.free(kept))
    assert memory.segments == 1
    memory.retire([after])
    last = memory.allocate(PAGE)
    assert last.segment is not after.segment
    memory.give_back(memory.free(after))
    assert memory.segments == 1
    memory.close()


def test_a_write_after_the_memory_was_closed_meets_no_other_file(tmp_path: Path) -> None:
    memory = BlockMemory(16 * PAGE)
    block = memory.allocate(PAGE)
    memory.close()
    with contextlib.ExitStack() as stack:  # files that take over the numbers of the closed descriptors
        files = [stack.enter_context((tmp_path / str(i)).open("w+b")) for i in range(8)]
        fill([block], [Sources.of([np.ones(PAGE, np.uint8)])])
        assert [os.fstat(file.fileno()).st_size for file in files] == [0] * 8
    gc.collect()
    before = segment_descriptors()
    del block
    gc.collect()
    assert segment_descriptors() == before - 1  # what the mapping keeps


def test_thousands_of_short_rows_arrive_in_order() -> None:
    rows = [torch.full((i % 7,), i, dtype=torch.int16) for i in range(1541)]
    with Store(budget_bytes=MIB) as store:
        (entry,) = store.put("t", {"k": rows})
        part = store.get(entry.shard)
        assert torch.equal(part.tensor, torch.cat(rows)) and part.lengths == tuple(len(row) for row in rows)
        assert fetched([entry], store.owner)[entry.shard].lengths == part.lengths  # its digest was checked


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3 * PAGE), st.sampled_from(["", "free", "free two", "trim"])), max_size=60),
    st.randoms(),
)
def test_blocks_never_overlap_keep_their_bytes_and_give_every_page_back(
    steps: list[tuple[int, str]], chance: Any
) -> None:
    gc.collect()
    before = memfd_bytes()
    memory = BlockMemory(8 * PAGE)
    held: list[tuple[Block, int]] = []

    def free(block: Block, mark: int) -> None:
        assert (block.memory == mark).all()
        memory.give_back(memory.free(block))

    def pages() -> int:
        return PAGE * len(
            {
                (id(b.segment), p)
                for b, _ in held
                if b.segment
                for p in range(b.offset // PAGE, (b.offset + b.nbytes - 1) // PAGE + 1)
            }
        )

    for i, (nbytes, then) in enumerate(steps):
        block = memory.allocate(nbytes)
        assert block.offset % 64 == 0 and block.memory.size == nbytes
        mark = i % 255 + 1
        assert fill([block], [Sources.of([np.full(nbytes, mark, np.uint8)] if nbytes else [])])
        held.append((block, mark))
        if then == "trim":
            memory.give_back(memory.trim(memory.spare_bytes))
            assert memory.spare_bytes == 0 and memfd_bytes() <= before + pages()
        for _ in range({"free": 1, "free two": 2}.get(then, 0)):
            if held:
                free(*held.pop(chance.randrange(len(held))))
        occupied = sum(-(-block.nbytes // 64) * 64 for block, _ in held)
        assert memfd_bytes() - before <= occupied + memory.spare_bytes + pages() + memory.segments * PAGE
    while held:
        free(*held.pop())
    memory.give_back(memory.trim(memory.spare_bytes))
    assert memory.spare_bytes == 0 and memfd_bytes() == before
    memory.close()


def test_large_pages_come_back_block_by_block_and_count_as_what_they_take() -> None:
    """A segment of this size asks for pages of 2 MiB; a host that has none gives small ones."""
    gc.collect()
    before = memfd_bytes()
    memory = BlockMemory(LARGE_FROM_BYTES)
    blocks = [memory.allocate(MIB - 64) for _ in range(33)]
    for i, block in enumerate(blocks):
        fill([block], [Sources.of([np.full(MIB - 64, i + 1, np.uint8)])])
    assert memory.segments == 2
    held = sum(block.nbytes for block in blocks)
    assert held <= memfd_bytes() - before <= held + memory.spare_bytes + memory.segments * PAGE
    for i in range(0, 33, 2):
        memory.give_back(memory.free(blocks[i]))
    memory.give_back(memory.trim(memory.spare_bytes))
    assert memory.spare_bytes == 0 and memfd_bytes() - before <= 16 * (MIB + 2 * PAGE)
    for i in range(1, 33, 2):
        assert (blocks[i].memory == i + 1).all()
        memory.give_back(memory.free(blocks[i]))
        assert memfd_bytes() - before <= (32 - i) // 2 * (MIB + 2 * PAGE)
    assert (memory.segments, memory.spare_bytes, memfd_bytes()) == (0, 0, before)
    small = memory.allocate(100)
    memory.give_back(memory.trim(memory.spare_bytes))
    fill([small], [Sources.of([np.ones(100, np.uint8)])])
    assert memfd_bytes() - before <= PAGE, "a large page would bring back what was given up beside the block"
    memory.close()


def test_a_clear_beside_puts_and_fetches_gives_the_rows_or_says_that_they_are_gone(store: Store) -> None:
    stop = time.monotonic() + 3
    problems: list[BaseException] = []
    seen: list[Any] = []

    def put_and_clear() -> None:
        for i in range(1_000_000):
            value = float(i % 100)
            entries = store.put("t", {"k": torch.full((1, 5000), value)})
            seen[:] = [(entries, value)]
            store.clear(["t"])
            if time.monotonic() > stop:
                return

    def fetch(far: bool) -> None:
        while time.monotonic() < stop and not problems:
            for entries, value in list(seen):
                try:
                    part = fetched(entries, elsewhere(store.owner) if far else store.owner)[entries[0].shard]
                    assert (part.tensor == value).all()
                except FetchFailed as error:
                    if not all(
                        "it was cleared" in str(one.error) or "replaced" in str(one.error) for one in error.failures
                    ):
                        problems.append(error)
                except AssertionError as error:
                    problems.append(error)

    threads = [threading.Thread(target=put_and_clear), *(threading.Thread(target=fetch, args=(far,)) for far in (0, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_point_of_a_put_leaves_all_rows_and_the_store_usable(store: Store) -> None:
    """The interrupted put stores all of its keys or none; no memory of rows that are held is written to again."""

    def rows(value: int) -> dict[str, Any]:
        return {"a": torch.full((1, 100), value), "b": torch.full((1, 200), value)}

    value, before = 0, set[int]()
    while True:
        value += 1
        was_interrupted = interrupted(functools.partial(store.put, "t", rows(value)), after=value)
        assert answers(store.stats), "the lock stays taken"
        store.put(f"other {value}", rows(-value))  # into whatever memory counts as free
        held = [store.get(ShardId("t", key)).tensor.unique().tolist() for key in "ab"] if "t" in store else [[], []]
        assert held[0] == held[1] and set(held[0]) in ({value}, before)
        before = set(held[0])
        if not was_interrupted:
            break
    assert value > 50, "fewer calls than a put makes"
