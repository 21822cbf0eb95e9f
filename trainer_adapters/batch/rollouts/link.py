"""One pool as its worker sees it, without sockets, threads or clocks: which attempts run, what is to be announced, and which
rows in the store are this pool's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inference_plugin.wire.errors import ErrorInfo
from inference_plugin.wire.messages import Announce, Announced, Take, Work
from inference_plugin.wire.messages.rollout import MAX_ANNOUNCED, AssignedTask, Finished, TaskRef

__all__ = ["Orders", "PoolLink"]

ANNOUNCE_BYTES = 16 << 20
"""Metadata in one announcement, unless a single task has more."""


@dataclass(frozen=True)
class Orders:
    """What the worker is to do, in this order: clear tasks from the store, cancel attempts, begin tasks, leave the pool.

    `settled`: tasks of which an attempt is over and done with, once `clear` is done. A pool that has stopped is left only after
    its answer to the last announcement: that tells which rows are part of a batch and stay.
    """

    clear: tuple[str, ...] = ()
    cancel: tuple[TaskRef, ...] = ()
    begin: tuple[AssignedTask, ...] = ()
    settled: tuple[str, ...] = ()
    leave: bool = False


@dataclass
class PoolLink:
    """`era` counts the pools that this one took the place of; an attempt is of the era in which it began.

    `running`: attempts that run. `cancelled`: those of them whose result nobody wants. `finished`: attempts to announce.
    `held`: tasks whose rows the pool has accepted, and that may still be in the store.

    `dirty`: the pool should hear of a slot that has become free, which no announcement tells it.
    """

    worker: str
    job: str
    owner: bytes
    slots: int
    pool: str = ""
    era: int = 0
    seq: int = 0
    received: int = 0
    running: set[TaskRef] = field(default_factory=set)
    cancelled: set[TaskRef] = field(default_factory=set)
    finished: dict[TaskRef, Finished] = field(default_factory=dict)
    announced: tuple[TaskRef, ...] = ()
    held: set[str] = field(default_factory=set)
    dirty: bool = False
    stopped: bool = False

    def take(self) -> Take:
        """The next request for work; the one before is given up."""
        self.seq += 1
        self.dirty = False
        running = tuple(sorted({*self.running, *self.finished}, key=lambda ref: ref.attempt))
        return Take(self.job, self.worker, self.pool, self.seq, self.received, self.owner, self.slots, running)

    def on_work(self, work: Work) -> Orders:
        """The answer to the last `take`."""
        if work.seq != self.seq:
            return Orders()
        if work.pool != self.pool:  # the first answer, or that of a pool which took another one's address
            orders, self.pool = self.give_up(), work.pool
            return orders
        self.received = work.seq
        self.held.difference_update(work.clear)
        settled = self._settle(ref for ref in self.finished if ref.task_id in work.clear)
        if work.stop:
            self.stopped = True
            cancel = tuple(sorted(self.running - self.cancelled, key=lambda ref: ref.attempt))
            self.cancelled.update(cancel)
            unannounced = self._settle(ref for ref in self.finished if ref not in self.announced)
            clear = (*work.clear, *unannounced)
            return Orders(clear, cancel, settled=(*settled, *unannounced), leave=not self.announced)
        begin = tuple(
            task for task in work.tasks if (ref := _ref(task)) not in self.running and ref not in self.finished
        )
        self.running.update(_ref(task) for task in begin)
        cancel = tuple(ref for ref in work.cancel if ref in self.running and ref not in self.cancelled)
        self.cancelled.update(cancel)
        return Orders(work.clear, cancel, begin, settled)

    def _settle(self, refs: Iterable[TaskRef]) -> tuple[str, ...]:
        """Drops finished attempts that need not be announced any more: the pool has their rows cleared, so it has accepted them,
        even if its answer was not read yet. Returns their tasks."""
        settled = set(refs)
        for ref in settled:
            del self.finished[ref]
        self.announced = tuple(ref for ref in self.announced if ref not in settled)
        return tuple(sorted(ref.task_id for ref in settled))

    @property
    def has_left(self) -> bool:
        """Whether the pool has stopped, and this worker has left it: nobody listens there any more."""
        return self.stopped and not self.finished

    def wants(self, ref: TaskRef, era: int) -> bool:
        """Whether the result of an attempt that runs is still wanted."""
        return era == self.era and ref in self.running and ref not in self.cancelled

    def on_end(self, ref: TaskRef, era: int, finished: Finished | None) -> Orders:
        """An attempt has ended, with its rows in the store if `finished` has entries."""
        if era == self.era and ref in self.running:
            self.running.discard(ref)
            if ref not in self.cancelled and finished is not None:
                self.finished[ref] = finished
                return Orders()
            self.cancelled.discard(ref)
            self.dirty = True
        return Orders(clear=(ref.task_id,), settled=(ref.task_id,))

    def announce(self) -> Announce | None:
        """What is to be announced now; the announcement before, if one is open, is given up."""
        chosen: list[Finished] = []
        nbytes = 0
        for finished in self.finished.values():
            nbytes += len(finished.entries)
            if chosen and (nbytes > ANNOUNCE_BYTES or len(chosen) == MAX_ANNOUNCED):
                break
            chosen.append(finished)
        self.announced = tuple(finished.ref for finished in chosen)
        return Announce(self.worker, self.pool, tuple(chosen)) if chosen else None

    def on_announced(self, reply: Announced) -> Orders:
        """The answer to the last `announce`."""
        dropped = set(reply.dropped)
        for ref in self.announced:
            finished = self.finished.pop(ref, None)
            if finished is not None and finished.error is None and ref not in dropped:
                self.held.add(ref.task_id)
        announced, self.announced = self.announced, ()
        settled = tuple(ref.task_id for ref in announced)
        clear = tuple(ref.task_id for ref in announced if ref in dropped)
        return Orders(clear, settled=settled, leave=self.stopped)

    def on_refused(self, error: ErrorInfo) -> Orders:
        """The pool refused the last announcement as a whole: its tasks fail, and the next announcement says so."""
        for ref in self.announced:
            self.finished[ref] = Finished(ref, error=error)
        announced, self.announced = self.announced, ()
        return Orders(clear=tuple(ref.task_id for ref in announced))

    def give_up(self) -> Orders:
        """The pool is lost: cancels all of its attempts and clears all of its rows."""
        clear = tuple(dict.fromkeys((*(ref.task_id for ref in self.finished), *self.held)))
        cancel = tuple(sorted(self.running - self.cancelled, key=lambda ref: ref.attempt))
        settled = tuple(ref.task_id for ref in self.finished)
        self.running, self.cancelled, self.finished, self.held, self.announced = set(), set(), {}, set(), ()
        self.era += 1
        return Orders(clear, cancel, settled=settled)


def _ref(task: AssignedTask) -> TaskRef:
    return TaskRef(task.task_id, task.attempt)
