"""Sharded trainers in front of a real replica: whatever one rank does wrong, all ranks hear of it and nothing changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.plain_engine import checkpoint, digests_expected
from tests.support.rig import Rig, runtime
from tests.trainers.launching import torchrun

Seen = list[dict[str, Any]]

KINDS = ["fsdp1", "fsdp2", "dtensor", "export"]
FAULTS = {
    "manifest raises": ("WeightwireError", "rank 1 has lost its model"),
    "claims a parameter less": ("ManifestMismatch", "each byte once: written by nobody"),
    "claims a parameter twice": ("ManifestMismatch", "each byte once: written more than once"),
    "raises in the middle": ("WeightwireError", "out of memory, says rank 1"),
    "skips a parameter": ("ManifestMismatch", "written by nobody"),
    "pending sums": ("ManifestMismatch", "sums are pending, redistribute it"),
    "a meta tensor": ("ManifestMismatch", "extra is on the meta device"),
    "another model": (
        "ManifestMismatch",
        "trainer rank 1 has another model than rank 0 (only rank 1 has extra (1 in all))",
    ),
}
OF_MODELS = {"pending sums", "a meta tensor", "another model"}
"""An export has none of these: its manifest is made when its adapter is."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    out = tmp_path_factory.mktemp("rig")
    with pytest.MonkeyPatch.context() as patch, runtime(patch) as directory:
        rig = Rig(directory, tp=2)
        try:
            torchrun("rig_worker.py", 2, out)
            peeked = rig.peek()
        finally:
            rig.end()
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    return [{**rank, "peeked": peeked} for rank in ranks]


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (kind, fault)
        for kind in KINDS
        for fault in FAULTS
        if (kind, fault) != ("fsdp1", "pending sums") and not (kind == "export" and fault in OF_MODELS)
    ],
)
def test_one_wrong_rank_is_an_error_on_all_and_the_old_version_stays(seen: Seen, kind: str, fault: str) -> None:
    error, text = FAULTS[fault]
    for rank in seen:
        found = rank[kind][fault]
        assert found["error"] == error, found
        assert text in found["text"], found
        assert found["old version is there"]


@pytest.mark.parametrize("kind", KINDS)
def test_orphans_and_doubles_of_claims_are_named_before_a_byte_moves(seen: Seen, kind: str) -> None:
    for rank in seen:
        phases = {
            fault: rank[kind][fault]["phase"] for fault in ("claims a parameter less", "claims a parameter twice")
        }
        assert set(phases.values()) == {"agree"}
        assert "by rank 0 and rank 1" in rank[kind]["claims a parameter twice"]["text"]
        assert rank[kind]["skips a parameter"]["phase"] == "stage"


def test_copies_that_come_apart_are_warned_about_ever_more_seldom_and_by_verify(seen: Seen) -> None:
    first, second = (rank["copies"] for rank in seen)
    assert first["warned"] == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0] and first["by verify"] == 1
    assert second["lines"] == []
    line = first["lines"][0]
    assert "copies that have come apart" in line and "layers.1.norm.weight[0:16]: " in line
    assert "on rank 0, " in line and line.endswith("on rank 1 (1 in all)")
    assert first["ok"] and second["ok"]


@pytest.mark.parametrize("kind", ["plain", "hybrid", "adapted", "ignored", "streamed", "yielded"])
def test_ranks_that_train_several_models_instead_of_one_are_told_so_and_nothing_is_mixed(seen: Seen, kind: str) -> None:
    for rank in seen:
        for turn in ("first", "second"):
            found = rank["several models"][kind][turn]
            for attempt in found["attempts"]:  # the same call again is refused again
                assert (attempt["error"], attempt["phase"]) == ("ManifestMismatch", "stage"), found
                assert (
                    "ranks hold different weights" in attempt["text"]
                    and "broadcast it from one rank" in attempt["text"]
                )
            assert found["old version is there"]


def test_the_engine_holds_the_lowest_ranks_copies_and_an_embedding_that_was_not_contiguous(seen: Seen) -> None:
    assert seen[0]["peeked"] == digests_expected(checkpoint(seen[0]["copies"]["seed"]), 2)
