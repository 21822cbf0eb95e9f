"""Logs and counts a replica's commits, and tells third parties' listeners of them, each on a thread of its own: neither a full
pipe, a slow disk nor a slow listener delays the engine's next step or the manager's answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from inference_plugin.net.records import GroupRecord, ReplicaRecord, save_record
from inference_plugin.plugins import plugin_manager
from inference_plugin.wire.errors import ErrorInfo, WeightwireError
from inference_plugin.wire.messages import Committed
from inference_plugin.worker.lane import Lane

__all__ = ["CommitListeners", "CommitRecorder"]

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Most commits that wait for a log, a disk or a listener that hangs; later ones are neither logged, counted nor told."""
CLOSE_TIMEOUT_S = 2.0


class CommitListeners:
    """Calls `weightwire_committed` of every plug-in, in the order of the commits."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._lane = Lane("weightwire-listeners")

    def start(self) -> None:
        self._lane.start()

    def tell(self, group: str, version: int, stopped_s: float) -> None:
        """Any thread; returns at once."""
        if self._lane.waiting() >= MAX_WAITING:
            logger.warning("weightwire: a listener hangs; it is not told of version %d of %s", version, group)
            return
        hook = plugin_manager().hook.weightwire_committed
        self._lane.put(partial(hook, replica=self._replica, group=group, version=version, stopped_s=stopped_s))

    def close(self) -> None:
        """Waits up to `CLOSE_TIMEOUT_S` for listeners that are running; may be called twice."""
        self._lane.close(CLOSE_TIMEOUT_S)


class CommitRecorder:
    """Writes one log line for each commit, failed ones included, and the replica's record (`net.records`)."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._groups: dict[str, GroupRecord] = {}
        self._lane = Lane("weightwire-recorder")
        self._complained = False

    def start(self) -> None:
        self._lane.start()

    def tell_commit(self, group: str, committed: Committed) -> None:
        """Any thread; returns at once."""
        self._put(partial(self._count_commit, group, committed))

    def tell_unknown(self, groups: tuple[str, ...]) -> None:
        """Any thread; returns at once. Nobody knows any more which version of these groups the replica serves."""
        self._put(partial(self._forget_versions, groups))

    def tell_failure(self, error: ErrorInfo) -> None:
        """Any thread; returns at once. `error` is that of a commit, or of a rank during one."""
        self._put(partial(self._count_failure, error))

    def close(self) -> None:
        """Waits up to `CLOSE_TIMEOUT_S` for what was told; may be called twice."""
        self._lane.close(CLOSE_TIMEOUT_S)

    def _put(self, count: Callable[[], None]) -> None:
        if self._lane.waiting() < MAX_WAITING:  # else the log itself hangs, or the disk: there is nowhere to say it
            self._lane.put(lambda: self._record(count))

    def _record(self, count: Callable[[], None]) -> None:
        try:
            count()
            save_record(self._replica, ReplicaRecord(self._groups))
        except Exception:  # logged once; the next commit is recorded with this one
            if not self._complained:
                self._complained = True
                logger.exception("weightwire: the counters of %s can't be written; trying on", self._replica)

    def _count_commit(self, group: str, committed: Committed) -> None:
        self._forget_versions(tuple({closed for rank in committed.ranks for closed in rank.replaced}))
        install_s = max((rank.install_s for rank in committed.ranks), default=0.0)
        installed_bytes = sum(rank.checked_bytes for rank in committed.ranks)
        before = self._groups.get(group, GroupRecord())
        self._groups[group] = msgspec.structs.replace(
            before,
            version=committed.version,
            commits=before.commits + 1,
            waited_s=before.waited_s + committed.waited_s,
            install_s=before.install_s + install_s,
            stopped_s=before.stopped_s + committed.stopped_s,
            installed_bytes=before.installed_bytes + installed_bytes,
            committed_at_unix_s=time.time(),
        )
        logger.info(
            "weightwire: replica %s serves version %d of %s: %.1f MB, generation stopped for %.1f ms",
            self._replica,
            committed.version,
            group,
            installed_bytes / 1e6,
            committed.stopped_s * 1000,
        )

    def _forget_versions(self, groups: tuple[str, ...]) -> None:
        for group in groups:
            self._groups[group] = msgspec.structs.replace(self._groups.get(group, GroupRecord()), version=None)

    def _count_failure(self, error: ErrorInfo) -> None:
        before = self._groups.get(error.group, GroupRecord())
        failures = {**before.failures, error.kind: before.failures.get(error.kind, 0) + 1}
        self._groups[error.group] = msgspec.structs.replace(before, failures=failures)
        logger.warning("weightwire: replica %s committed nothing: %s", self._replica, WeightwireError.of(error))
