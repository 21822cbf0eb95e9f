"""An owner that is killed in the middle of a put: real processes, and kill -9 while its rows are being copied."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from inference_plugin.wire.errors import FetchFailed, PeerLost, ProtocolError, WeightwireError
from tests.batch import stuck_worker
from tests.batch.owners import Held, as_bytes, fetched
from tests.batch.stuck_worker import KEYS, ROW_BYTES, ROWS, rows_of
from tests.support.engines import segments_of
from tests.support.rig import eventually, fork, gone, kill, runtime
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.inputs import local_part
from trainer_adapters.batch.records import Entry, Owner, ShardId
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.store import Store

LONG_S = 300.0
PAGE = os.sysconf("SC_PAGESIZE")


def why_no_faults() -> str:
    try:
        os.close(stuck_worker.open_faults())
    except OSError as error:
        return f"this kernel lets nobody wait for a page: {error}"
    return ""


pytestmark = pytest.mark.skipif(bool(why_no_faults()), reason=why_no_faults())


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


class Worker:
    def __init__(self, directory: Path, name: str, reached: Path | None = None) -> None:
        told = directory / name
        environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}
        self.pid = fork("tests.batch.stuck_worker:run", environment, told=str(told), reached=str(reached or ""))
        eventually(lambda: told.exists() or gone(self.pid), "the worker")
        self.owner: Owner = msgspec.msgpack.decode(told.read_bytes(), type=Held).owner


def entries_as_if_put(task_id: str, owner: Owner) -> list[Entry]:
    """What `owner` would announce, with the right digests."""
    with Store(budget_bytes=16 << 20) as twin:
        return [msgspec.structs.replace(entry, owner=owner.id) for entry in twin.put(task_id, rows_of(task_id))]


def failures(entries: Sequence[Entry], owner: Owner) -> list[tuple[ShardId, type[WeightwireError]]]:
    """Why each shard can't be fetched; none of them can."""
    have: dict[ShardId, object] = {}
    with pytest.raises(FetchFailed) as caught:
        fetched(entries, owner, have=have)  # type: ignore[arg-type]
    assert not have
    return [(ShardId(one.task_id, one.key), type(one.error)) for one in caught.value.failures]


def holders(segments: set[int]) -> list[int]:
    """Processes that have one of these segments open or mapped."""
    return [process.pid for process in psutil.process_iter() if segments & set(segments_of(process))]


def rows_are_right(batch: DistributedBatch) -> bool:
    return all(
        [row.tolist() for row in batch.rows(key)]
        == [row.tolist() for task in batch.row_tasks(key)[::ROWS] for row in rows_of(str(task))[key]]
        for key in KEYS
    )


@pytest.mark.parametrize(
    "at",
    [(KEYS[0], 0, 0), (KEYS[1], ROWS // 2, ROW_BYTES // 2), (KEYS[-1], ROWS - 1, ROW_BYTES - PAGE)],
    ids=["at its first byte", "in the middle", "at its last page"],
)
def test_an_owner_killed_in_the_middle_of_a_put(directory: Path, at: tuple[str, int, int]) -> None:
    """What it announced before stays true until it dies, and is reported lost then. Nothing of the put is ever readable. Its
    memory goes with the last reader, and its task runs elsewhere."""
    reached, stuck = directory / "reached", {"stuck": at}
    with RolloutPool(on_lost="rerun") as pool:
        dying = Worker(directory, "dying", reached)
        for task in ("read", "taken", "kept"):
            pool.submit(task, {}).result(LONG_S)
        read, taken = pool.next_batch(1, LONG_S), pool.next_batch(1, LONG_S)
        read.fetch()
        half = pool.submit("half", stuck)
        eventually(reached.exists, "the put, stuck")
        of_half = entries_as_if_put("half", dying.owner)

        assert failures(of_half, dying.owner) == [(entry.shard, ProtocolError) for entry in of_half]
        of_taken = fetched(taken.entries(), dying.owner)  # the owner goes on serving what it announced
        assert {shard.key: as_bytes(part) for shard, part in of_taken.items()} == {
            key: as_bytes(local_part(rows)) for key, rows in rows_of("taken").items()
        }
        del of_taken
        segments = set(segments_of(psutil.Process(dying.pid)))
        assert segments and not half.done()
        kill(dying.pid)

        other = Worker(directory, "other")
        assert {entry.owner for entry in half.result(LONG_S).entries} == {other.owner.id}
        assert failures(of_half, dying.owner) == [(entry.shard, PeerLost) for entry in of_half]
        assert failures(taken.entries(), dying.owner) == [(entry.shard, PeerLost) for entry in taken.entries()]
        assert read.task_ids == ("read",) and rows_are_right(read)
        assert pool.stats().lost == 1, "`kept`, which had finished and was in no batch"
        again = pool.next_batch(1, LONG_S)
        assert again.task_ids == ("half",) and rows_are_right(again.fetch())

        del read
        gc.collect()
        eventually(lambda: not holders(segments), f"the end of the memory of process {dying.pid}")
        again.clear()
        kill(other.pid)
