"""Files of the runtime directory that are read without asking a process, so that a reader waits for nobody: what a replica has
counted since its engine started (its coordinator replaces the file after each commit), and each group's last report."""

from __future__ import annotations

import contextlib
import functools
import logging
from pathlib import Path

import msgspec

from inference_plugin.net.addresses import replace_file, runtime_dir
from inference_plugin.net.held import read_plain
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import ProtocolError
from inference_plugin.wire.messages import ReplicaCard
from inference_plugin.wire.reports import UpdateReport

__all__ = [
    "GroupRecord", "ReplicaRecord", "last_report", "last_reports", "record_of", "save_record", "save_report",
]  # fmt: skip


logger = logging.getLogger(__name__)


class GroupRecord(msgspec.Struct, frozen=True):
    """Commits of one group. Seconds and bytes are sums over all commits; `failures` counts by error class."""

    version: int | None = None
    commits: int = 0
    failures: dict[str, int] = {}
    waited_s: float = 0.0
    install_s: float = 0.0
    stopped_s: float = 0.0
    installed_bytes: int = 0
    committed_at_unix_s: float = 0.0


class ReplicaRecord(msgspec.Struct, frozen=True):
    """All groups of a replica that took a commit, or failed to."""

    groups: dict[str, GroupRecord] = {}


def save_record(replica: str, record: ReplicaRecord) -> None:
    """Replaces the replica's record. Raises OSError if the directory can't be written."""
    replace_file(runtime_dir() / f"{replica}.counts", msgspec.msgpack.encode(record))


def record_of(card: ReplicaCard) -> ReplicaRecord:
    """What the replica of `card` has counted; an empty record where there is none, or one that can't be read."""
    try:
        return decode_as(read_plain(runtime_dir(card.job) / f"{card.replica}.counts"), ReplicaRecord)
    except (OSError, ProtocolError):
        return ReplicaRecord()


def save_report(report: UpdateReport) -> None:
    """Replaces the last report of the report's group. Raises OSError where the directory can't be written."""
    content = msgspec.msgpack.encode(report)
    replace_file(runtime_dir() / f"{report.group}.report", content, has_one_writer=False)


def last_report(group: str, job: str | None = None) -> UpdateReport | None:
    """The last update of `group` in `job`, whichever manager sent it. None if no update was reported."""
    return _report(runtime_dir(job) / f"{group}.report")


def last_reports(job: str | None) -> list[tuple[UpdateReport, float]]:
    """The last update of every group of `job`, with the Unix time at which it was reported."""
    found = []
    for path in sorted(runtime_dir(job).glob("*.report")):
        with contextlib.suppress(FileNotFoundError):
            if (report := _report(path)) is not None:
                found.append((report, path.stat().st_mtime))
    return found


def _report(path: Path) -> UpdateReport | None:
    """None where there is none, or one that can't be read: cut off by a crash of the host, or of another version."""
    try:
        return decode_as(read_plain(path), UpdateReport)
    except FileNotFoundError:
        return None
    except (OSError, ProtocolError) as error:
        _warn_once(f"the report {path} can't be read and is left out: {error}")
        return None


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("weightwire: %s", text)
