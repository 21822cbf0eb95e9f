"""Shared by the commands: the application, which imports a command when it is asked for, options, and asking a replica."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from inference_plugin import __version__
from inference_plugin.cli.output import ended_by, stop
from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel, Outgoing, coordinator_channel, fan_out, worker_channel
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

Reply = TypeVar("Reply")

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


def asked(cards: Sequence[ReplicaCard]) -> list[dict[str, Any]]:
    """Of each replica its card as its coordinator gives it now, its workers' cards, its state, and what is wrong with it. All
    coordinators are asked at once, and then all workers.

    `state` is the card's, or "orphaned (serving)" where the engine has outlived the process that started it.
    """
    coordinators = _answers([partial(coordinator_channel, card) for card in cards], ReplicaCard)
    now = [card if isinstance(said, WeightwireError) else said for card, said in zip(cards, coordinators, strict=True)]
    connects = [partial(worker_channel, card, worker) for card in now for worker in card.workers]
    workers = iter(_answers(connects, WorkerCard))
    return [
        _described(card, said, [next(workers) for _ in card.workers])
        for card, said in zip(now, coordinators, strict=True)
    ]


def _answers(connects: Sequence[Callable[[], Channel]], kind: type[Reply]) -> list[Reply | WeightwireError]:
    """What each process answers; an error stands in its place."""
    with contextlib.ExitStack() as opened:
        channels: list[Channel | WeightwireError] = []
        for connect in connects:
            try:
                channels.append(opened.enter_context(connect()))
            except WeightwireError as error:
                channels.append(error)
        requests = [Outgoing(channel, Describe()) for channel in channels if isinstance(channel, Channel)]
        replies = iter(fan_out(requests, kind, timeout_s=ASK_TIMEOUT_S))
        return [next(replies) if isinstance(channel, Channel) else channel for channel in channels]


def _described(
    card: ReplicaCard, said: ReplicaCard | WeightwireError, ranks: Sequence[WorkerCard | WeightwireError]
) -> dict[str, Any]:
    problems = [f"coordinator: {_silent(said, card.pid)}"] if isinstance(said, WeightwireError) else []
    workers = [answer for answer in ranks if not isinstance(answer, WeightwireError)]
    for worker, answer in zip(card.workers, ranks, strict=True):
        if isinstance(answer, WeightwireError):
            problems.append(f"rank {worker.rank}: {_silent(answer, worker.pid)}")
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
