"""`weightwire close`"""

from __future__ import annotations

from typing import Any

import click

from inference_plugin.cli.app import as_json_option, asked, job_option
from inference_plugin.cli.output import heard_or_not, line, print_json, problem, stop
from inference_plugin.net import addresses, diagnosis
from inference_plugin.net.channel import worker_channel
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import CloseGroup, Done, ReplicaCard, WorkerCard

__all__ = ["close"]

CLOSE_TIMEOUT_S = 30.0


@click.command(short_help="Has all replicas forget a group that nobody updates.")
@click.argument("group")
@job_option
@as_json_option
def close(group: str, job: str | None, as_json: bool) -> None:
    """Has all replicas forget a group, as `SyncManager.close_group` does. The installed weights stay.

    For a group that its trainer left open: until it is closed, no other group may write its parameters. Exit status 1: a replica
    did not answer, or is just committing an update of the group.
    """
    found = asked(addresses.discover(job))
    if not found:
        raise stop(diagnosis.none_runs(job))
    rows = [_closed(group, replica) for replica in found]
    if not any(row["had"] or row["problems"] for row in rows):
        open_groups = sorted({each.group for replica in found for rank in replica["workers"] for each in rank.groups})
        raise stop(f"no replica has a group {group!r}; open groups: {', '.join(open_groups) or 'none'}")
    failed = any(row["problems"] for row in rows)
    with heard_or_not():
        if as_json:
            print_json(ok=not failed, group=group, replicas=rows)
        else:
            for row in rows:
                state = "NOT closed" if row["problems"] else "closed" if row["had"] else "had no such group"
                line(f"{row['replica']}: {state}")
                for text in row["problems"]:
                    problem(text, indent="  ")
    raise SystemExit(1 if failed else 0)


def _closed(group: str, replica: dict[str, Any]) -> dict[str, Any]:
    """Closes the group on one replica; returns this replica's row of the answer."""
    card: ReplicaCard = replica["card"]
    answered: list[WorkerCard] = replica["workers"]
    having = [worker for worker in answered if group in [each.group for each in worker.groups]]
    silent = {worker.rank for worker in card.workers} - {worker.rank for worker in answered}
    problems = [f"rank {rank} does not answer" for rank in sorted(silent)]
    for worker in having:
        try:
            with worker_channel(card, worker) as channel:
                channel.request(CloseGroup(group), Done, timeout_s=CLOSE_TIMEOUT_S)
        except WeightwireError as error:
            problems.append(f"rank {worker.rank}: {error}")
    return {"replica": card.replica, "had": bool(having), "problems": problems}
