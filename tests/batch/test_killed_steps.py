"""kill -9 at steps all along a put: a reader gets all rows of it or none, and nothing is left behind."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from inference_plugin.wire.errors import FetchFailed, PeerLost
from tests.batch.dying_owner import FIRST, SECOND
from tests.batch.owners import Held, as_bytes, fetched, rows_of
from tests.batch.test_killed_puts import holders
from tests.support.engines import segments_of
from tests.support.rig import eventually, fork, gone, kill, runtime
from trainer_adapters.batch.inputs import local_part
from trainer_adapters.batch.parts import LocalPart
from trainer_adapters.batch.records import Entry, Owner, ShardId
from trainer_adapters.batch.store import Store

STEPS = 12
"""Places at which the owner is killed, spread over the lines of a put; and once after it."""

SHORT_S = 2.0
"""A put that stands still may hold the store's lock. Then nobody is answered, and a fetch ends without rows."""


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


class Dying:
    def __init__(self, directory: Path, number: int, task_id: str, step: int) -> None:
        told, self._begin, self.stopped = (directory / f"{name}{number}" for name in ("told", "begin", "stopped"))
        self.pid = fork(
            "tests.batch.dying_owner:run",
            {"WEIGHTWIRE_RUNTIME_DIR": str(directory)},
            told=str(told),
            begin=str(self._begin),
            stopped=str(self.stopped),
            task_id=task_id,
            step=step,
        )
        eventually(lambda: told.exists() or gone(self.pid), "the owner")
        held = msgspec.msgpack.decode(told.read_bytes(), type=Held)
        self.owner, self.whole = held.owner, held.entries

    def put(self) -> int:
        """Begins the put, and waits until it stands still. Returns the number of its lines, or 0 if it did not end."""
        self._begin.touch()
        eventually(lambda: self.stopped.exists() or gone(self.pid), "the put")
        return int(self.stopped.read_text() or 0)


def as_if_put(task_id: str, dying: Dying) -> list[Entry]:
    """What the owner would announce of its second put, but for rows that it had put before under the same name."""
    old = {entry.digest for entry in dying.whole}
    with Store(budget_bytes=16 << 20) as twin:
        entries = twin.put(task_id, rows_of(task_id, SECOND))
    return [msgspec.structs.replace(entry, owner=dying.owner.id) for entry in entries if entry.digest not in old]


def read(entries: Sequence[Entry], owner: Owner, timeout_s: float) -> tuple[dict[ShardId, LocalPart], set[type]]:
    """The shards that could be fetched, and the errors of the others."""
    have: dict[ShardId, LocalPart] = {}
    try:
        fetched(entries, owner, have=have, timeout_s=timeout_s)
    except FetchFailed as failed:
        return have, {type(one.error) for one in failed.failures}
    return have, set()


def are_rows(have: dict[ShardId, LocalPart], entries: Sequence[Entry], items: int) -> bool:
    """Whether all shards of `entries` are there, and right."""
    expected = {entry.shard: rows_of(entry.shard.task_id, items)[entry.shard.key] for entry in entries}
    return {shard: as_bytes(part) for shard, part in have.items()} == {
        shard: as_bytes(local_part(rows)) for shard, rows in expected.items()
    }


@pytest.mark.parametrize("task_id", ["half", "whole"], ids=["of a new task", "that replaces rows"])
def test_an_owner_killed_at_any_step_of_a_put(directory: Path, task_id: str) -> None:
    lines = (to_its_end := Dying(directory, 0, task_id, 0)).put()
    assert lines > 5 * STEPS
    kill(to_its_end.pid)
    came = []
    for number, step in enumerate([*range(1, lines, lines // STEPS), 0], 1):
        dying = Dying(directory, number, task_id, step)
        before, _ = read(dying.whole, dying.owner, 60)
        has_ended = bool(dying.put())
        assert has_ended or step
        of_put = as_if_put(task_id, dying)

        have, why = read(of_put, dying.owner, 60 if has_ended else SHORT_S)
        assert (are_rows(have, of_put, SECOND) and not why) or (not have and len(why) == 1), (step, have, why)
        came.append(bool(have))
        segments = set(segments_of(psutil.Process(dying.pid)))
        assert segments
        kill(dying.pid)

        assert read(of_put, dying.owner, 60) == ({}, {PeerLost})
        assert read(dying.whole, dying.owner, 60) == ({}, {PeerLost})
        assert are_rows(before, dying.whole, FIRST), "what was read before stays"
        assert not have or are_rows(have, of_put, SECOND)
        del before, have
        gc.collect()
        eventually(lambda held=segments: not holders(held), f"the end of the memory of process {dying.pid}")
    assert not came[0] and came[-1], came
    assert all(earlier <= later for earlier, later in itertools.pairwise(came)), came
