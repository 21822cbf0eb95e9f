"""`weightwire push`"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from inference_plugin.cli.app import AsJson, Job, app
from inference_plugin.cli.checkpoints import Checkpoint
from inference_plugin.cli.output import line, print_json, problem, stop
from inference_plugin.wire.errors import WeightwireError

if TYPE_CHECKING:
    import torch

__all__ = ["push"]


@app.command()
def push(
    checkpoint: Annotated[Path, typer.Argument(help="Directory with *.safetensors, or one such file.")],
    version: Annotated[
        int | None, typer.Option(min=0, help="Default: one more than any replica of the job serves.")
    ] = None,
    group: Annotated[str, typer.Option(help="Weight-update group.")] = "policy",
    dtype: Annotated[
        str | None, typer.Option(help="Send every tensor in this dtype, such as bfloat16; default: as it is stored.")
    ] = None,
    in_flight: Annotated[
        Literal["keep", "recompute", "abort", "drain"], typer.Option(help="What happens to requests in flight.")
    ] = "keep",
    verify: Annotated[bool, typer.Option("--verify", help="Then compare the live parameters with it.")] = False,
    timeout_s: Annotated[float, typer.Option(help="For the update, and again for the comparison.")] = 600.0,
    job: Job = None,
    as_json: AsJson = False,
) -> None:
    """Brings a checkpoint into all running replicas, without a restart. Exit status 1: not every replica has it.

    The files are read tensor by tensor while they are sent.
    """
    import torch

    from trainer_adapters import ModuleAdapter, SyncManager

    sent = getattr(torch, dtype, None) if dtype else None
    if dtype and not isinstance(sent, torch.dtype):
        raise stop(f"--dtype {dtype}: torch has no dtype of that name")
    source = ModuleAdapter(_Tensors(Checkpoint(checkpoint)), dtype_rules={"*": sent} if sent else None)
    _use_job(job)
    with SyncManager(group, in_flight=in_flight, timeout_s=timeout_s) as manager:
        if version is None:
            served = [number for number in manager.versions().values() if number is not None]
            version = 1 + max(served, default=-1)
        try:
            report = manager.update(source, version)
            verified = manager.verify(source) if verify else None
        except WeightwireError as error:
            if as_json:
                print_json(ok=False, version=version, error=error.info())
            else:
                problem(str(error))
            raise typer.Exit(1) from None
    ok = not report.failed and (verified is None or verified.ok)
    if as_json:
        print_json(ok=ok, version=version, report=report, verified=verified)
        raise typer.Exit(0 if ok else 1)
    line(f"version {version} of {group}: {report.bytes / 1e6:.1f} MB in {report.seconds:.3f} s")
    for replica in report.replicas:
        why = (
            f": {replica.error.message}" if replica.error else f", generation stopped {replica.stopped_s * 1000:.1f} ms"
        )
        line(f"  {replica.replica}: {replica.status}, serves version {replica.version}{why}")
    for compared in verified.replicas if verified is not None else ():
        line(f"  {compared.replica}: {'equal' if compared.ok else 'DIFFERENT'} ({compared.boxes} boxes compared)")
        for text in (*compared.differ, *compared.unreadable):
            line(f"    {text}")
    raise typer.Exit(0 if ok else 1)


class _Tensors(Mapping[str, "torch.Tensor"]):
    """A checkpoint as a mapping: each tensor is read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name)
        if tensor is None:
            raise KeyError(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.names)

    def __len__(self) -> int:
        return len(self._checkpoint.names)


def _use_job(job: str | None) -> None:
    """Makes this process a member of the job."""
    import os

    if job is not None:
        os.environ["WEIGHTWIRE_JOB"] = job
