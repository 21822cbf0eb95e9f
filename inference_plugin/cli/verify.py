"""`weightwire verify`"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from inference_plugin.cli.app import Seconds, as_json_option, job_option
from inference_plugin.cli.checkpoints import Checkpoint, dtype_named
from inference_plugin.cli.output import line, print_json, stop
from inference_plugin.net import addresses, diagnosis
from inference_plugin.net.channel import coordinator_channel
from inference_plugin.wire.errors import WeightwireError, first_few
from inference_plugin.wire.messages import ReplicaCard, Verified, Verify

if TYPE_CHECKING:
    import torch

__all__ = ["verify"]

TensorNamed: TypeAlias = "Callable[[str], torch.Tensor | None]"
"""A checkpoint's tensor by name, None if it has none of that name."""

SHOWN_DIFFERENCES = 20
"""Differences of a replica that are shown without `--all`; `--json` has all of them."""


@click.command(short_help="Compares live engines with a checkpoint.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory with *.safetensors, or one such file.",
)
@click.option("--group", default="policy", help="Weight-update group.")
@click.option(
    "--dtype", help="That in which the trainer sent the tensors, such as bfloat16; default: as they are stored."
)
@click.option("--replica", help="Only this replica.")
@job_option
@click.option("--timeout-s", type=Seconds(), default=120.0, help="Seconds for each replica.")
@click.option("--all", "show_all", is_flag=True, help="Every difference, not the first 20 of a replica.")
@click.option(
    "--probe", "probe_url", metavar="URL", help="Also ask this server, and transformers, for log-probabilities."
)
@as_json_option
def verify(
    checkpoint: Path,
    group: str,
    dtype: str | None,
    replica: str | None,
    job: str | None,
    timeout_s: float,
    show_all: bool,
    probe_url: str | None,
    as_json: bool,
) -> None:
    """Compares what live engines hold with a checkpoint, byte for byte. Exit status 1: they differ.

    The engine must have taken an update of the group: only then is it known which parameter holds which tensor. With
    --probe it also shows how far engine and transformers lie apart on fixed prompts: is it the weights, or something else?
    """
    from inference_plugin.cli.probe import probe

    tensors = Checkpoint(checkpoint)
    tensor_named = _in_dtype(tensors.get, dtype_named(dtype))
    cards = [card for card in addresses.discover(job) if replica in (None, card.replica)]
    if not cards:
        raise stop(
            diagnosis.none_runs(job)
            if replica is None
            else f"no replica {replica} runs; `weightwire status` lists them"
        )
    results = [_verified(card, group, timeout_s, tensors, tensor_named) for card in cards]
    probed = None if probe_url is None else probe(probe_url, checkpoint, timeout_s)
    if as_json:
        print_json(group=group, replicas=results, probe=probed)
    else:
        for result in results:
            verdict = "equal" if result["ok"] else "DIFFERENT" if result["boxes"] else "NOT COMPARED"
            line(f"{result['replica']}: {verdict} ({result['boxes']} boxes)")
            problems = result["problems"]
            shown = problems if show_all else problems[:SHOWN_DIFFERENCES]
            for problem in shown:
                line(f"  {problem}")
            if len(shown) < len(problems):
                line(f"  and {len(problems) - len(shown)} more; --all shows all {len(problems)}")
            if beyond := result.get("not_compared"):
                names = ", ".join(beyond) if show_all else first_few(beyond)
                line(f"  not compared, no rank took them under these names: {names}")
        if probed is not None:
            line(str(probed))
            if all(result["ok"] for result in results):
                line("  It is not the weights: what is left comes from dtypes, kernels, attention or quantisation.")
    raise SystemExit(0 if all(result["ok"] for result in results) else 1)


def _in_dtype(tensor_named: TensorNamed, dtype: torch.dtype | None) -> TensorNamed:
    """The checkpoint's tensors as an update in `dtype` carries them."""

    def cast(name: str) -> torch.Tensor | None:
        tensor = tensor_named(name)
        return tensor if tensor is None or dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    return cast


def _verified(
    card: ReplicaCard, group: str, timeout_s: float, tensors: Collection[str], tensor_named: TensorNamed
) -> dict[str, Any]:
    """One replica's row of the answer."""
    from inference_plugin.wire.comparison import compare_rank, held_by_no_rank  # imports torch

    with coordinator_channel(card) as channel:
        try:
            answer = channel.request(Verify(group, timeout_s), Verified, timeout_s=timeout_s + 5)
        except WeightwireError as error:
            return {"replica": card.replica, "ok": False, "boxes": 0, "problems": [str(error)]}
    problems = [words for rank in answer.ranks for words in compare_rank(rank, tensor_named)]
    problems += held_by_no_rank(answer.ranks, tensor_named)
    problems += [f"rank {r.rank}: {name}: {why}" for r in answer.ranks for name, why in r.unreadable.items()]
    boxes = sum(len(rank.boxes) for rank in answer.ranks)
    if not boxes:
        problems.append(f"group {group!r} holds nothing that could be compared")
    version = answer.ranks[0].version if answer.ranks else None
    known = {name for rank in answer.ranks for name in (*(box.name for box in rank.boxes), *rank.unreadable)}
    return {
        "replica": card.replica,
        "version": version,
        "ok": not problems,
        "boxes": boxes,
        "problems": problems,
        # Tied to another tensor, passed over by the engine's loader, or left out of the update.
        "not_compared": sorted(set(tensors) - known) if boxes else [],
    }
