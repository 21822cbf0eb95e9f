"""A batch at work on the ranks of a trainer: shared out, fetched, joined by what the ranks compute, cleared everywhere.

    rank 0                                     every rank
    batch = pool.next_batch(...)
                                               at_work = RankBatch(batch, store, by="token_ids")     batch: None above rank 0
                                               rows = at_work.fetch()                                its rows, LOCAL
                                               at_work.add({"old_logprobs": recomputed(rows)})
    at_work.add_whole({"advantages": ...})
                                               rows = at_work.fetch()                                its rows, with all keys
    at_work.clear()

Between the ranks travels metadata, as tensors of bytes over the process group: no pickle. Rows go from their owner to the rank
that reads them.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch
import torch.distributed as dist

from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import (
    AuthError,
    BatchError,
    DigestMismatch,
    ErrorInfo,
    FetchFailed,
    PeerLost,
    SyncTimeout,
    TransportUnavailable,
    WeightwireError,
)
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.boundary import TIMEOUT_S
from trainer_adapters.batch.limits import checked_seconds
from trainer_adapters.batch.nested import Putting, remotize
from trainer_adapters.batch.records import ClearReport

__all__ = ["RankBatch"]

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class RankBatch:
    """The rows of `batch`, a REMOTE batch of rank 0, on the ranks of `group`, which takes tensors of the CPU (gloo).

    `store` is this rank's own. `fetch` and `add` are collective: every rank calls them, in the same order, and the group's own
    time limit applies. Where one rank fails in them, all ranks raise its error. Where rank 0 fails in `read` or `add_whole`, let
    it end: a rank that waits for it raises `PeerLost` at once. If a rank lives on and never comes, the others raise `SyncTimeout`
    at the group's limit. `whole` is the batch as it is by now, on rank 0.
    `lost`: tasks that were left out of it, because their rows are lost.
    """

    def __init__(
        self,
        batch: DistributedBatch | None,
        store: Putting,
        *,
        by: str,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`batch`: None above rank 0. `by`: the key whose tokens are shared out evenly, as in `DistributedBatch.split`.
        `timeout_s`: longest time of a fetch, and of a clear. Raises `BatchError` for another kind of argument, and without
        torch.distributed; `ConfigError` for a `timeout_s` that is no time."""
        if not isinstance(batch, DistributedBatch | None):
            raise BatchError(
                f"batch={batch!r:.300} is a {type(batch).__name__}", hint="give a DistributedBatch, or None"
            )
        if not hasattr(store, "put"):
            raise BatchError(f"store={store!r:.300} is a {type(store).__name__}", hint="give a Store(budget_bytes=...)")
        timeout_s = checked_seconds("timeout_s", timeout_s)
        if not dist.is_initialized():
            raise BatchError(
                "a RankBatch is for the ranks of torch.distributed, which is not initialized",
                hint="call init_process_group first; a trainer of one process needs only batch.fetch()",
            )
        self.whole = DistributedBatch() if batch is None else batch
        self.lost: set[str] = set()
        self._store, self._by, self._timeout_s = store, by, timeout_s
        self._kept = [self.whole]
        self._own_rows = 0
        self._ranks = _Ranks(group)

    @property
    def moved_bytes(self) -> int:
        """What this rank has sent to other ranks and received from them, all of it metadata."""
        return self._ranks.moved_bytes

    def fetch(self) -> DistributedBatch | None:
        """This rank's rows, LOCAL; None, on all ranks, where fewer rows than ranks are left.

        The rows of tasks whose owner has died, has cleared them or does not answer are left out, on all ranks. Raises
        `BatchError`, on all ranks, where rows arrived wrong, where a rank has no means to fetch them (no descriptors, no Ray), or
        where rows that a rank computed are lost.
        """
        lost: set[str] = set()
        self._own_rows = 0
        while True:
            rows = self._share(lost)
            if rows is None:
                return None
            mine = self._ranks.agreed(functools.partial(_fetched, rows, self._timeout_s))
            fetched = [decode_as(each, _Fetched) for each in self._ranks.everyones(msgspec.msgpack.encode(mine))]
            _raise_wrong(fetched)
            lost = {task for each in fetched for task in each.lost}
            if not lost:
                self._own_rows = len(rows)
                return rows
            self.lost |= lost

    def add(self, data: Mapping[str, Any]) -> None:
        """Adds keys to the batch: what this rank computed from the rows that it fetched last, one for each, in their order."""
        put: list[DistributedBatch] = []
        try:
            parts = self._ranks.at_first(self._ranks.agreed(lambda: self._put(self._of_own_rows(data), put)))
            self._ranks.agreed(lambda: self._join(parts))
        except Exception:
            self._drop(put)
            raise

    def add_whole(self, data: Mapping[str, Any]) -> None:
        """Rank 0 alone: adds keys to the batch that it computed for all rows of `whole`, in their order."""
        put: list[DistributedBatch] = []
        try:
            self._join([self._put(DistributedBatch(data), put)])
        except Exception:
            self._drop(put)
            raise

    def read(self, keys: Iterable[str]) -> DistributedBatch:
        """Rank 0 alone: these keys of all rows, LOCAL. Rows of tasks whose owner has died are left out of the batch first."""
        keys = tuple(keys)
        while True:
            rows = self.whole.select(keys)
            fetched = _fetched(rows, self._timeout_s)
            _raise_wrong([fetched])
            if not fetched.lost:
                return rows
            self.lost.update(fetched.lost)
            self._leave_out(set(fetched.lost))

    def clear(self) -> ClearReport:
        """Rank 0: has every owner drop what the batch began with, and what was added to it. The report lists owners that could
        not be reached."""
        reports = [batch.clear(timeout_s=self._timeout_s) for batch in self._kept]
        failed = {owner: error for report in reports for owner, error in report.failed}
        counts = sum(report.cleared for report in reports), sum(report.unknown for report in reports)
        return ClearReport(*counts, tuple(failed.items()))

    def _share(self, lost: set[str]) -> DistributedBatch | None:
        mine = self._ranks.from_first(self._ranks.agreed(lambda: self._shares(lost)))
        return DistributedBatch.from_bytes(mine) if mine else None

    def _shares(self, lost: set[str]) -> list[bytes]:
        """On rank 0: what each rank gets of the rows, without those of lost tasks."""
        if self._ranks.is_first and lost:
            self._leave_out(lost)
        if not self._ranks.is_first or len(self.whole) < self._ranks.count:
            return [b""] * self._ranks.count
        parts = self.whole.split(self._ranks.count, self._by)
        self.whole = DistributedBatch.concat(parts)  # in the order of the ranks' rows
        return [part.to_bytes() for part in parts]

    def _of_own_rows(self, data: Mapping[str, Any]) -> DistributedBatch:
        """`data` as a batch. Too many rows of one rank and too few of another would pass for those of all ranks."""
        rows = DistributedBatch(data)
        if len(rows) != self._own_rows:
            raise BatchError(
                f"{len(rows)} rows are added, but this rank fetched {self._own_rows}",
                hint="add one row for each row of this rank's last fetch(), in their order",
            )
        return rows

    def _put(self, rows: DistributedBatch, put: list[DistributedBatch]) -> bytes:
        """Puts rows into this rank's store, notes them in `put`, and returns their metadata."""
        put.append(remotize(rows, self._store, self._task_id()))
        return put[-1].to_bytes()

    def _join(self, parts: Sequence[bytes]) -> None:
        """Adds the rows of all ranks to the batch, on rank 0; others have no `parts`."""
        if parts:
            added = DistributedBatch.concat([DistributedBatch.from_bytes(part) for part in parts])
            self.whole = self.whole.union(added)
            self._kept.append(added)

    def _drop(self, put: Sequence[DistributedBatch]) -> None:
        """Frees rows that did not become a part of the batch."""
        for batch in put:
            if (report := batch.clear(timeout_s=self._timeout_s)).failed:
                logger.warning("weightwire: rows that were not added stay where they are: %s", report)

    def _leave_out(self, tasks: set[str]) -> None:
        if own := tasks - set(self.whole.row_tasks(self._by)):
            raise BatchError(
                f"rows that the ranks computed are lost: {sorted(own)[:3]}",
                hint="restart the ranks: one of them has ended",
            )
        keep = [task not in tasks for task in self.whole.row_tasks(self._by)]
        self.whole = self.whole.filter(keep)

    def _task_id(self) -> str:
        """Unique over a training: a store's id is."""
        return f"{self._store.owner.id}/{next(_numbers)}"


_numbers = itertools.count(1)


class _Fetched(msgspec.Struct, array_like=True):
    """How a fetch ended: tasks whose rows are lost, and what is wrong beyond that."""

    lost: tuple[str, ...] = ()
    wrong: str = ""


_WRONG = DigestMismatch, AuthError, BatchError, TransportUnavailable
"""Errors that don't say that rows are lost: they arrived wrong, or this rank can't or may not fetch them."""


def _fetched(rows: DistributedBatch, timeout_s: float) -> _Fetched:
    """Fetches rows. What is lost with its owner is no error, unlike `_WRONG`."""
    try:
        rows.fetch(timeout_s=timeout_s)
    except FetchFailed as error:
        if any(isinstance(failure.error, _WRONG) for failure in error.failures):
            return _Fetched(wrong=str(error))
        logger.warning("weightwire: tasks are left out of the batch: %s", error)
        return _Fetched(tuple(dict.fromkeys(failure.task_id for failure in error.failures)))
    return _Fetched()


def _raise_wrong(fetched: Sequence[_Fetched]) -> None:
    """The same error on all ranks, so that none waits for another."""
    wrong = [f"rank {rank}: {each.wrong}" for rank, each in enumerate(fetched) if each.wrong]
    if wrong:
        raise BatchError(
            "; ".join(wrong), hint="these rows must not be left out silently: find out what made them wrong"
        )


def _typed(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A collective call whose errors say what became of the other ranks. Gloo's are RuntimeErrors, told apart by their text."""

    @functools.wraps(call)
    def typed(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        try:
            return call(*arguments, **named)
        except RuntimeError as error:
            if "imed out" in str(error):
                raise SyncTimeout(
                    f"not all ranks came to this call within the limit of their process group: {error}",
                    hint="a rank that failed elsewhere, such as rank 0 in read() or add_whole(), must end or come here too",
                    side="trainer",
                ) from error
            if "onnection" in str(error) or "roken pipe" in str(error):
                raise PeerLost(
                    f"a rank ended, and this one waited for it: {error}",
                    hint="its own error is in its log; restart the ranks",
                    side="trainer",
                ) from error
            raise

    return typed


class _Ranks:
    """Bytes between the ranks of a group, as tensors of equal length that begin with the number of bytes. Collective."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._first = 0 if group is None else dist.get_global_rank(group, 0)
        self.count, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self.is_first = self._rank == 0
        self.moved_bytes = 0

    def agreed(self, work: Callable[[], Result]) -> Result:
        """What `work` returns on this rank. If it raises on some ranks, all raise: each its own error, the others that of the
        first."""
        error: WeightwireError | None = None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - whatever it is, all ranks get it
            error = WeightwireError.wrap(raised).at(side="trainer", rank=self._rank)
        told = self.everyones(b"" if error is None else msgspec.msgpack.encode(error.info()))
        if error is not None:
            raise error
        for each in filter(None, told):
            raise WeightwireError.of(decode_as(each, ErrorInfo))
        return result

    @_typed
    def from_first(self, shares: Sequence[bytes]) -> bytes:
        """This rank's share of what rank 0 has for each rank."""
        longest = self._longest(max(map(len, shares)) if self.is_first else 0)
        mine = _framed(b"", longest)
        dist.scatter(
            mine,
            [_framed(share, longest) for share in shares] if self.is_first else None,
            self._first,
            group=self._group,
        )
        self.moved_bytes += len(mine) * (self.count - 1 if self.is_first else 1)
        return _content(mine)

    @_typed
    def at_first(self, mine: bytes) -> list[bytes]:
        """What each rank has, on rank 0; nothing on others."""
        longest = self._longest(len(mine))
        framed = _framed(mine, longest)
        parts = [_framed(b"", longest) for _ in range(self.count)] if self.is_first else None
        dist.gather(framed, parts, self._first, group=self._group)
        self.moved_bytes += len(framed) * (self.count - 1 if self.is_first else 1)
        return [_content(part) for part in parts or ()]

    @_typed
    def everyones(self, mine: bytes) -> list[bytes]:
        """What each rank has, on all ranks."""
        if not (longest := self._longest(len(mine))):
            return [b""] * self.count
        parts = [_framed(b"", longest) for _ in range(self.count)]
        dist.all_gather(parts, _framed(mine, longest), group=self._group)
        self.moved_bytes += 2 * len(parts[0]) * (self.count - 1)
        return [_content(part) for part in parts]

    def _longest(self, nbytes: int) -> int:
        most = torch.tensor([nbytes], device="cpu")
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return int(most)


def _framed(data: bytes, most: int) -> torch.Tensor:
    framed = torch.zeros(_HEAD_BYTES + most, dtype=torch.uint8, device="cpu")
    framed[:_HEAD_BYTES].view(torch.int64).fill_(len(data))
    framed.numpy()[_HEAD_BYTES : _HEAD_BYTES + len(data)] = memoryview(data)
    return framed


def _content(framed: torch.Tensor) -> bytes:
    nbytes = int(framed[:_HEAD_BYTES].view(torch.int64))
    return framed.numpy()[_HEAD_BYTES : _HEAD_BYTES + nbytes].tobytes()


_HEAD_BYTES = 8
