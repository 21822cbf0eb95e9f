"""`weightwire push`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from inference_plugin.cli.app import Seconds, as_json_option, job_option
from inference_plugin.cli.checkpoints import Checkpoint, dtype_named
from inference_plugin.cli.output import heard_or_not, line, print_json, problem, stop
from inference_plugin.wire.errors import ArgumentError, WeightwireError

if TYPE_CHECKING:
    from inference_plugin.wire.messages import InFlight

__all__ = ["push"]


@click.command(short_help="Brings a checkpoint into all running replicas.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--version", type=click.IntRange(0, 2**62 - 1), help="Default: one more than any replica of the job serves."
)
@click.option("--group", default="policy", help="Weight-update group.")
@click.option("--dtype", help="Send every tensor in this dtype, such as bfloat16; default: as it is stored.")
@click.option(
    "--in-flight",
    type=click.Choice(["keep", "recompute", "abort", "drain"]),
    default="keep",
    help="What happens to requests in flight.",
)
@click.option("--verify", is_flag=True, help="Then compare the live parameters with the checkpoint.")
@click.option(
    "--timeout-s", type=Seconds(), default=600.0, help="Seconds for the update, and again for the comparison."
)
@job_option
@as_json_option
def push(
    checkpoint: Path,
    version: int | None,
    group: str,
    dtype: str | None,
    in_flight: InFlight,
    verify: bool,
    timeout_s: float,
    job: str | None,
    as_json: bool,
) -> None:
    """Brings a checkpoint into all running replicas, without a restart. Exit status 1: a replica does not have it, or none runs.

    CHECKPOINT is a directory with *.safetensors, or one such file. The files are read tensor by tensor while they are sent.
    """
    from trainer_adapters import ModuleAdapter, SyncManager

    sent = dtype_named(dtype)
    source = ModuleAdapter(Checkpoint(checkpoint), dtype_rules={"*": sent} if sent else None)
    if job is not None:
        os.environ["WEIGHTWIRE_JOB"] = job  # this process joins the job
    with SyncManager(group, in_flight=in_flight, timeout_s=timeout_s) as manager:
        try:
            report = manager.update(source, version)
            verified = manager.verify(source) if verify else None
        except ArgumentError as error:
            raise stop(str(error)) from None
        except WeightwireError as error:
            with heard_or_not():
                if as_json:
                    print_json(ok=False, version=error.version, error=error.info())
                else:
                    problem(str(error))
            raise SystemExit(1) from None
    ok = not report.failed and (verified is None or verified.ok)
    with heard_or_not():
        if as_json:
            print_json(ok=ok, version=report.version, report=report, verified=verified)
        else:
            line(str(report))
            if verified is not None:
                line(str(verified))
    raise SystemExit(0 if ok else 1)
