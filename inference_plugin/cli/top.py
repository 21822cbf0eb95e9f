"""`weightwire top`"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

import click

from inference_plugin.cli.app import Seconds, as_json_option, is_orphaned, job_option
from inference_plugin.cli.output import print_json, terminal
from inference_plugin.net import addresses, diagnosis
from inference_plugin.net.records import last_reports, record_of
from inference_plugin.wire.reports import gib

__all__ = ["top"]

REPLICA_COLUMNS = (
    "replica", "engine", "state", "group", "version", "behind", "committed", "commits", "failed", "stopped",
)  # fmt: skip
UPDATE_COLUMNS = ("group", "version", "when", "replicas", "failed", "size", "seconds", "throughput")


@click.command(short_help="A live view of replicas and updates.")
@job_option
@click.option("--once", is_flag=True, help="Show it once and end, as in a pipe.")
@click.option("--interval-s", type=Seconds(), default=1.0, help="Seconds between two looks.")
@as_json_option
def top(job: str | None, once: bool, interval_s: float, as_json: bool) -> None:
    """Shows, live, the replicas of this host (versions, how far behind, commits) and each group's last update.

    It reads files only and asks no process, so engines don't notice it. Ctrl-C ends it.
    """
    if as_json:
        print_json(**_look(job))
        return
    screen = terminal()
    if once or not sys.stdout.isatty():
        screen.print(_drawn(_look(job)))
        return
    from rich.live import Live

    with contextlib.suppress(KeyboardInterrupt), Live(console=screen, screen=True, auto_refresh=False) as live:
        live.update(_drawn(_look(job)), refresh=True)
        while not threading.Event().wait(interval_s):
            live.update(_drawn(_look(job)), refresh=True)


def _look(job: str | None) -> dict[str, Any]:
    """What there is to show. `behind` counts versions, from the newest that any update of the group brought."""
    now_s = time.time()
    cards = addresses.discover(job)
    records = {card.replica: record_of(card).groups for card in cards}
    updates = {report.group: (report, now_s - at_s) for report, at_s in last_reports(job)}
    newest = {group: report.version for group, (report, _) in updates.items()}
    for group, record in (entry for groups in records.values() for entry in groups.items()):
        newest[group] = max(newest.get(group, 0), record.version or 0)
    replicas = []
    for card in cards:
        about = {"replica": card.replica, "engine": f"{card.engine} {card.engine_version}", "state": card.state}
        if is_orphaned(card):
            about["state"] = f"orphaned ({card.state})"
        groups = [
            {
                "group": name,
                "version": record.version,
                "behind": newest[name] - record.version if record.version is not None else None,
                "committed_s_ago": now_s - record.committed_at_unix_s if record.commits else None,
                "commits": record.commits,
                "failures": record.failures,
                "stopped_s_per_commit": record.stopped_s / record.commits if record.commits else None,
            }
            for name, record in records[card.replica].items()
        ]
        replicas.append({**about, "groups": groups})
    return {
        "job": job or addresses.job_name(),
        "replicas": replicas,
        "starting": diagnosis.starting(job),
        "updates": [
            {
                "group": group,
                "version": report.version,
                "ended_s_ago": ago_s,
                "replicas": len(report.replicas),
                "failed": len(report.failed),
                "bytes": report.bytes,
                "seconds": report.seconds,
                "bytes_per_s": report.bytes / report.seconds
                if report.seconds and len(report.failed) < len(report.replicas)
                else None,
            }
            for group, (report, ago_s) in sorted(updates.items())
        ],
    }


def _drawn(look: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    replicas = Table(*REPLICA_COLUMNS, title=f"job {look['job']}", title_justify="left")
    for replica in look["replicas"]:
        about = [replica["replica"], replica["engine"], _coloured(replica["state"])]
        for group in replica["groups"] or [None]:
            replicas.add_row(*about, *(_group_cells(group) if group else ["no commit yet"]))
    for text in look["starting"]:
        replicas.add_row(escape(text), "", "starting")
    updates = Table(*UPDATE_COLUMNS, title="last updates", title_justify="left")
    for update in look["updates"]:
        updates.add_row(
            update["group"],
            str(update["version"]),
            _ago(update["ended_s_ago"]),
            str(update["replicas"]),
            str(update["failed"]),
            gib(update["bytes"]),
            f"{update['seconds']:.3f}",
            "" if update["bytes_per_s"] is None else f"{gib(int(update['bytes_per_s']))}/s",
        )
    shown = (
        replicas
        if replicas.row_count
        else f"no replica of job {look['job']!r} runs; `weightwire status` says where it looked"
    )
    return Group(shown, *([updates] if look["updates"] else ["no update was reported"]))


def _group_cells(group: dict[str, Any]) -> list[str]:
    stopped_s, behind = group["stopped_s_per_commit"], group["behind"]
    return [
        group["group"],
        "none" if group["version"] is None else str(group["version"]),
        "" if behind is None else f"[yellow]{behind}[/yellow]" if behind else "0",
        _ago(group["committed_s_ago"]),
        str(group["commits"]),
        ", ".join(f"{kind} {count}" for kind, count in group["failures"].items()) or "0",
        "" if stopped_s is None else f"{stopped_s * 1000:.1f} ms",
    ]


def _coloured(state: str) -> str:
    return f"[green]{state}[/green]" if state == "serving" else f"[red]{state}[/red]"


def _ago(seconds: float | None) -> str:
    """A time of the past in words."""
    if seconds is None:
        return "never"
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"
