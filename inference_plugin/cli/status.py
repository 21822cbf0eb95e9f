"""`weightwire status`"""

from __future__ import annotations

from typing import Any

import click

from inference_plugin.cli.app import as_json_option, asked, job_option
from inference_plugin.cli.output import line, print_json, problem
from inference_plugin.net import addresses, diagnosis
from inference_plugin.net.records import last_report
from inference_plugin.wire.errors import ConfigError
from inference_plugin.wire.messages import GroupStatus, ReplicaCard
from inference_plugin.wire.reports import UpdateReport

__all__ = ["status"]


@click.command(short_help="Replicas, their versions and states; the last updates.")
@job_option
@as_json_option
def status(job: str | None, as_json: bool) -> None:
    """Shows the job's replicas with their groups, versions and states, and each group's last update; engines that are starting;
    and engines that run without the plug-in, with the reason."""
    found = asked(addresses.discover(job))
    starting = diagnosis.starting(job)
    without = diagnosis.problems(job)
    groups = sorted({group.group for replica in found for worker in replica["workers"] for group in worker.groups})
    reports = {group: report for group in groups if (report := last_report(group, job)) is not None}
    for replica in found:
        statuses = [status for worker in replica["workers"] for status in worker.groups]
        replica["groups"] = {g: _standing([s for s in statuses if s.group == g], reports.get(g)) for g in groups}
    if as_json:
        print_json(replicas=found, starting=starting, last_updates=reports, without_plug_in=without)
        return
    for text in starting:
        line(f"starting: {text}")
    for text in without:
        problem(f"runs without the plug-in: {text}")
    if not found and not starting:
        line(f"no replica of job {job or addresses.job_name()!r} runs; looked in {addresses.runtime_dir(job)}")
        try:
            diagnosis.check_writable(job)
        except ConfigError as error:
            problem(f"{error.message}: a replica that runs can't publish its card; {error.hint}")
        for root in diagnosis.elsewhere(job):
            line(f"this job has replicas in {root}: set WEIGHTWIRE_RUNTIME_DIR to it")
        if others := diagnosis.other_jobs(job):
            line(f"replicas of other jobs run here: {', '.join(others)}; --job NAME shows them")
        line("an engine appears once it has imported its modules; `weightwire doctor` looks for problems")
        return
    for replica in found:
        _print_replica(replica)
    for report in reports.values():
        line(f"last update: {report}")


def _standing(ranks: list[GroupStatus], last: UpdateReport | None) -> str:
    """A replica's state in a group, in the words of `SyncManager.replicas`."""
    if any(rank.state == "torn" for rank in ranks):
        return "torn"
    versions = {rank.version for rank in ranks}
    if not versions or None in versions:
        return "behind" if any(rank.detail for rank in ranks) else "joining"
    return "behind" if last is not None and versions != {last.version} else "current"


def _print_replica(replica: dict[str, Any]) -> None:
    card: ReplicaCard = replica["card"]
    dtype = f", {card.dtype}" if card.dtype else ""
    ranks = f"tp {card.tp}, pp {card.pp}, dp rank {card.dp_rank}"
    why = f" ({card.detail})" if card.detail and card.state != "torn" else ""  # why it is torn is among its problems
    line(
        f"{card.replica}: {card.engine} {card.engine_version}, {card.model}{dtype}, {ranks}: {replica['state']}{why}",
    )
    for what in card.lacks:
        line(f"  in this version of {card.engine} {what}")
    for worker in replica["workers"]:
        for group in worker.groups:
            unserved = "version unknown" if group.detail else "no version yet"
            version = unserved if group.version is None else f"version {group.version}"
            how = f"{group.install} by {group.mechanism} over {group.transport}"
            digest = f", digest {group.digest[:12]}" if group.digest else ""
            stands = replica["groups"][group.group]
            states = ", ".join(dict.fromkeys((stands, group.state)))  # "torn" is a word of both
            about = f": {group.detail}" if group.detail else ""
            line(f"  rank {worker.rank}: {group.group}: {version}, {states}, {how}{digest}{about}")
        if not worker.groups:
            line(f"  rank {worker.rank}: no group yet")
    for text in replica["problems"]:
        problem(text, indent="  ")
