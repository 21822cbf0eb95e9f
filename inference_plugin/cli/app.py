"""Shared by the commands: the application, which imports a command when it is asked for, options, and asking a replica."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

from inference_plugin import __version__
from inference_plugin.cli.output import ended_by, stop
from inference_plugin.net import addresses
from inference_plugin.net.channel import coordinator_channel, worker_channel
from inference_plugin.net.processes import has_ended, parent_of
from inference_plugin.wire.config import misspelt_variables
from inference_plugin.wire.errors import SyncTimeout, WeightwireError
from inference_plugin.wire.messages import Describe, ReplicaCard, WorkerCard

try:
    import click
except ImportError as error:
    raise SystemExit(
        f"the weightwire command needs more packages ({error}): pip install '.[cli]' in a checkout of weightwire"
    ) from None

__all__ = ["Seconds", "app", "as_json_option", "asked", "is_orphaned", "job_option"]

COMMANDS = {
    "status": "status",
    "top": "top",
    "doctor": "doctor",
    "push": "push",
    "close": "close",
    "transports": "settings",
    "config": "settings",
    "keygen": "settings",
    "verify": "verify",
    "check-engine": "check_engine",
}
"""Each command, as --help lists them, and its module here. A module's function `config` is the command `config`."""

ASK_TIMEOUT_S = 5.0

job_option = click.option(
    "--job",
    metavar="NAME",
    callback=lambda _context, _option, name: None if name is None else addresses.checked_job(name, "--job"),
    help="Job whose replicas are meant; default WEIGHTWIRE_JOB, or 'default'.",
)
as_json_option = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON document, no table.")


class Seconds(click.FloatRange):
    """A time from 0.1 s to a day. NaN is refused here: it passes click's comparisons with the limits."""

    def __init__(self) -> None:
        super().__init__(min=0.1, max=86400.0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail("NaN is no time", param, ctx)
        return seconds


class Commands(click.Group):
    """Imports the module of a command when that command, or the list of all, is wanted."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"inference_plugin.cli.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command. An error of ours, or a file that cannot be read or written, its output included, is one line on
        stderr and exit status 2."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except WeightwireError as error:  # several are OSErrors as well
            raise stop(str(error)) from None
        except OSError as error:
            raise ended_by(error) from None


@click.group(
    cls=Commands,
    help="What runs, whether it is healthy, and whether an engine holds the weights that it should.",
    epilog="Exit status: 0 all is well; 1 the command found a problem or a difference, or an update failed; 2 the command "
    "could not be carried out (usage, configuration, nothing to ask, output that can't be written).",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
)
@click.version_option(__version__, prog_name="weightwire", message="%(prog)s %(version)s")
@click.pass_context
def app(context: click.Context) -> None:
    if context.invoked_subcommand != "doctor":  # it lists them among the problems
        for text in misspelt_variables():
            print(f"weightwire: warning: {text}", file=sys.stderr)


def asked(card: ReplicaCard) -> dict[str, Any]:
    """A replica's card as its coordinator gives it now, its workers' cards, its state, and what is wrong with it.

    `state` is the card's, or "orphaned (serving)" where the engine has outlived the process that started it.
    """
    problems: list[str] = []
    workers: list[WorkerCard] = []
    try:
        with coordinator_channel(card) as channel:
            card = channel.request(Describe(), ReplicaCard, timeout_s=ASK_TIMEOUT_S)
    except WeightwireError as error:
        problems.append(f"coordinator: {_silent(error, card.pid)}")
    for worker in card.workers:
        try:
            with worker_channel(card, worker) as channel:
                workers.append(channel.request(Describe(), WorkerCard, timeout_s=ASK_TIMEOUT_S))
        except WeightwireError as error:
            problems.append(f"rank {worker.rank}: {_silent(error, worker.pid)}")
    if card.state == "torn":
        problems.append(f"torn: {card.detail}")
    state: str = card.state
    if is_orphaned(card):
        state = f"orphaned ({card.state})"
        problems.append(
            f"orphaned: process {card.parent_pid}, which started this engine, has ended, so no client reaches it; "
            f"end process {card.pid}"
        )
    return {"card": card, "workers": workers, "state": state, "problems": problems}


def _silent(error: WeightwireError, pid: int) -> str:
    """The error of a process that was asked. A timeout's own hint is to run `weightwire status`, which is what runs now."""
    return (
        f"{error.message}: process {pid} hangs or is busy; its log may say why"
        if isinstance(error, SyncTimeout)
        else str(error)
    )


def is_orphaned(card: ReplicaCard) -> bool:
    """Whether the process that started this engine, such as its API server, has ended while the engine goes on. False for a
    replica of another host or pid namespace."""
    if card.boot_id != addresses.boot_id() or card.parent_pid in (0, card.pid) or has_ended(card.pid, card.start_ticks):
        return False
    return parent_of(card.pid) != card.parent_pid
