"""Launching a worker of these tests, and what its ranks' slices must be together."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from inference_plugin.wire.cover import check_exact_cover
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import box_view, bytes_view
from tests.support.preloaded import ForkedProgram, nursery
from tests.trainers.forked import WELL

ROOT = Path(__file__).parents[2]

PRELOADED = (
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.testing",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
    "trainer_adapters.manager",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed goes back at once, so that a peak can be measured
}
END_S = 600.0
LOG = "torchrun.log"

Ranks = dict[str, list[dict[str, Any]]]


def launch(worker: str, ranks: int, out: Path, *arguments: Path, python: str = sys.executable) -> Ranks:
    """What each rank saw in each case of a worker."""
    torchrun(worker, ranks, out, *arguments, python=python)
    return results(out, ranks)


def results(out: Path, ranks: int) -> Ranks:
    """What the ranks of a worker left."""
    left = [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]
    return {case: [result[case] for result in left] for case in left[0]}


def torchrun(worker: str, ranks: int, out: Path, *arguments: Path, python: str = sys.executable) -> None:
    """Runs a worker of this directory to its end, in this environment or that of another `python`."""
    run_ranks(Path(__file__).with_name(worker), ranks, out, str(out), *map(str, arguments), python=python)


def run_ranks(program: Path, ranks: int, out: Path, *arguments: str, python: str = sys.executable) -> str:
    """What `torchrun --standalone --nproc-per-node=RANKS PROGRAM ARGUMENTS` prints, if all ranks end well."""
    ran = start_ranks(program, ranks, out, *arguments, python=python)
    try:
        return ended_well(ran, out)
    finally:
        ran.terminate()  # the agent ends its ranks


def ended_well(ran: ForkedProgram, out: Path) -> str:
    """What a program that `start_ranks` started printed, when all its ranks have ended well."""
    ran.wait(END_S)
    printed = (out / LOG).read_text(errors="replace")
    assert (out / WELL).exists(), printed[-8000:]
    return printed


def start_ranks(program: Path, ranks: int, out: Path, *arguments: str, python: str = sys.executable) -> ForkedProgram:
    """Starts that. What it prints goes into `out / LOG`."""
    more = () if python == sys.executable else ("tests.support.megatron_loaded", "tests.support.deepspeed_loaded")
    modules = (*PRELOADED, *more)
    return nursery(python, modules, tuple(ENVIRONMENT.items())).start(
        "tests.trainers.forked",
        [str(ranks), str(out), str(program), *arguments],
        os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        out / LOG,
    )


def on(names: str, both: Sequence[Any] = (), four: Sequence[Any] = ()) -> pytest.MarkDecorator:
    """Parameters of a test with a `ranks` fixture: those of `both` on two and on four ranks, those of `four`, which need
    them, on four."""
    rows = [(count, entry) for entry in both for count in (2, 4)] + [(4, entry) for entry in four]
    values = [(count, *(entry if isinstance(entry, tuple) else (entry,))) for count, entry in rows]
    ids = [f"{count} ranks-{entry[0] if isinstance(entry, tuple) else entry}" for count, entry in rows]
    return pytest.mark.parametrize(f"ranks,{names}", values, ids=ids, indirect=["ranks"])


def of(ranks: Ranks, case: str) -> list[dict[str, Any]]:
    """What each rank saw in a case."""
    crashes = [seen["crash"] for seen in ranks[case] if "crash" in seen]
    assert not crashes, crashes[0]
    return ranks[case]


def written(seen: list[dict[str, Any]], collectives: int = 0) -> tuple[Manifest, dict[str, torch.Tensor], list[int]]:
    """The manifest, what the ranks wrote into one segment, and how many bytes each wrote.

    Checks what holds for every source: one manifest, slices as claimed, an exact cover, no empty slice, no collective
    (but for a way that gathers), and that what training keeps equal is what another rank sends.
    """
    assert len({rank["manifest"] for rank in seen}) == 1, "ranks disagree about the manifest"
    assert [rank["collectives"] for rank in seen] == [collectives] * len(seen)
    manifest = msgspec.msgpack.decode(seen[0]["manifest"], type=Manifest).check()
    segment = torch.full((manifest.layout.nbytes,), 0xAB, dtype=torch.uint8)
    boxes = []
    sent = [0] * len(seen)
    for rank, result in enumerate(seen):
        assert sorted(result["claims"]) == sorted(raw for raw, _ in result["slices"]), "slices are not what was claimed"
        for raw, tensor in result["slices"]:
            box = msgspec.convert(raw, Box)
            assert tuple(tensor.shape) == box.sizes
            assert tensor.numel(), f"an empty slice of {manifest.describe(box)}"
            box_view(segment, manifest, box).copy_(tensor)
            boxes.append((box, f"rank {rank}"))
            sent[rank] += manifest.box_nbytes(box)
    check_exact_cover(manifest, boxes)
    owners = dict(boxes)
    for rank, result in enumerate(seen):
        for raw, tensor in result.get("kept_equal", ()):
            box = msgspec.convert(raw, Box)
            assert owners[box] != f"rank {rank}", f"{manifest.describe(box)} is compared with another rank's"
            sent_values = box_view(segment, manifest, box)
            assert torch.equal(sent_values, tensor.to(sent_values.dtype)), manifest.describe(box)
    values = {spec.name: box_view(segment, manifest, manifest.whole(i)) for i, spec in enumerate(manifest.tensors)}
    return manifest, values, sent


def assert_is_gold(values: dict[str, torch.Tensor], gold: dict[str, torch.Tensor], tied: dict[str, str]) -> None:
    assert set(values) == set(gold) - set(tied)
    for name, value in values.items():
        expected = gold[name].to(value.dtype).contiguous()
        assert value.shape == expected.shape, name
        assert torch.equal(bytes_view(value), bytes_view(expected)), name
