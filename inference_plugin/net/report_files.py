"""The last update report of each group, as a file in the runtime directory: managers write it, `weightwire status` reads it."""

from __future__ import annotations

import contextlib

import msgspec

from inference_plugin.net.addresses import replace_file, runtime_dir
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.reports import UpdateReport

__all__ = ["last_report", "last_reports", "save_report"]


def save_report(report: UpdateReport) -> None:
    """Replaces the last report of the report's group. Raises OSError where the directory can't be written."""
    replace_file(runtime_dir() / f"{report.group}.report", msgspec.msgpack.encode(report))


def last_report(group: str, job: str | None = None) -> UpdateReport | None:
    """The last update of `group` in `job`, whichever manager sent it. None if no update was reported."""
    path = runtime_dir(job) / f"{group}.report"
    return decode_as(path.read_bytes(), UpdateReport) if path.exists() else None


def last_reports(job: str | None) -> list[tuple[UpdateReport, float]]:
    """The last update of every group of `job`, with the Unix time at which it was reported."""
    found = []
    for path in sorted(runtime_dir(job).glob("*.report")):
        with contextlib.suppress(FileNotFoundError):
            found.append((decode_as(path.read_bytes(), UpdateReport), path.stat().st_mtime))
    return found
