"""DTensors of all kinds, on real gloo ranks: what all ranks write together is the unsharded model, bit for bit.

All cases of one world size run in one launch (`dtensor_worker.py`); each test below looks at one case.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from inference_plugin.wire.geometry import Box
from tests.trainers.launching import Ranks, assert_is_gold, launch, of, written
from trainer_adapters.sources.placements import index_ranges, shards_of


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch("dtensor_worker.py", 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch("dtensor_worker.py", 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch("plan_worker.py", 8, tmp_path_factory.mktemp("eight"))


ANY_WORLD = [
    "tensor_parallel_plan_alone",
    "copies_of_plain_tensors_that_come_apart",
    "sequence_parallel_norms",
    "a_shard_of_several_boxes",
    "a_tensor_on_some_of_the_ranks",
    "a_local_tensor_that_is_not_contiguous",
    "an_export_of_shards",
]
FOUR_RANKS = [
    "fsdp_over_tensor_parallel",
    "fsdp_over_tensor_parallel_offloaded",
    "trained_with_norms_that_come_apart",
    "experts_on_a_mesh_of_their_own",
    "experts_divided_twice",
    "replicas_of_tensor_parallel_groups",
    "one_model_on_each_half",
    "an_export_of_copies_that_come_apart",
]


@pytest.mark.parametrize("case", ANY_WORLD)
def test_shards_on_two_ranks_equal_the_unsharded_gold_bit_for_bit(two: Ranks, case: str) -> None:
    seen = of(two, case)
    manifest, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], manifest.tied)


@pytest.mark.parametrize("case", ANY_WORLD + FOUR_RANKS)
def test_shards_on_four_ranks_equal_the_unsharded_gold_bit_for_bit(four: Ranks, case: str) -> None:
    seen = of(four, case)
    manifest, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], manifest.tied)


@pytest.mark.parametrize(
    "case",
    [
        "fsdp_over_two_cuts",
        "fsdp_over_two_uneven_cuts",
        "fsdp_between_two_cuts",
        "fsdp_over_packed_gate_and_up",
        "fsdp_over_packed_query_key_and_value",
        "fsdp_over_fewer_columns_than_ranks",
    ],
)
def test_fsdp_over_a_plan_that_cuts_its_dimension_arrives_bit_for_bit(eight: Ranks, case: str) -> None:
    seen = of(eight, case)
    manifest, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], manifest.tied)


@pytest.mark.parametrize("case", ["an_export_of_trained_shards", "an_export_by_transformers_own_conversion"])
def test_what_an_export_makes_of_trained_shards_arrives_bit_for_bit(four: Ranks, case: str) -> None:
    seen = of(four, case)
    manifest, values, _ = written(seen, seen[0]["collectives"])
    assert_is_gold(values, seen[0]["gold"], manifest.tied)


def test_every_rank_of_two_dimensions_sends_about_as_much(four: Ranks) -> None:
    manifest, values, sent = written(of(four, "fsdp_over_tensor_parallel"))
    assert values["model.embed_tokens.weight"].shape == (251, 36)
    assert min(sent) > 0.9 * manifest.nbytes / 4


def copied(seen: dict[str, Any]) -> dict[int, torch.Tensor]:
    """What a rank holds beside what it sends, by tensor; whole tensors and shards alike."""
    return {msgspec.convert(raw, Box).tensor: tensor for raw, tensor in seen["copies"]}


def test_norms_that_come_apart_are_known_as_copies_and_the_lowest_rank_sends(four: Ranks) -> None:
    seen = of(four, "trained_with_norms_that_come_apart")
    manifest, _, _ = written(seen)
    norms = {i for i, spec in enumerate(manifest.tensors) if "norm" in spec.name}
    assert [set(copied(rank)) for rank in seen] == [set(), norms, set(), norms]
    sent = {raw[0]: tensor for raw, tensor in seen[0]["slices"]}
    differ = {manifest.tensors[i].name for i, copy in copied(seen[1]).items() if not torch.equal(copy, sent[i])}
    assert differ == {spec.name for spec in manifest.tensors if "q_norm" in spec.name or "k_norm" in spec.name}


def test_plain_tensors_of_one_rank_are_sent_never_a_mixture(four: Ranks) -> None:
    seen = of(four, "copies_of_plain_tensors_that_come_apart")
    assert [len(rank["slices"]) for rank in seen] == [3, 1, 1, 1]
    assert [float(copied(rank)[1][0]) for rank in seen[1:]] == [1.5, 2.5, 3.5]


def test_a_shard_may_be_several_boxes(two: Ranks) -> None:
    boxes = [raw for raw, _ in of(two, "a_shard_of_several_boxes")[0]["slices"]]
    assert boxes == [[0, (0, 0), (2, 13)], [0, (4, 0), (2, 13)], [0, (8, 0), (2, 13)]]


def test_a_tensor_that_a_whole_mesh_copies_is_divided_by_bytes(four: Ranks) -> None:
    _, _, sent = written(of(four, "replicas_of_tensor_parallel_groups"))
    assert max(sent) - min(sent) <= 60


def test_a_process_group_makes_another_model_of_the_second_half(four: Ranks) -> None:
    assert [seen.get("second", 0) for seen in of(four, "one_model_on_each_half")] == [0, 0, 25, 16]


@pytest.mark.parametrize(
    ("case", "error", "parts"),
    [
        ("refuse_pending_sums", "ManifestMismatch", ["sum has placements (Partial", "redistribute it to Shard"]),
        ("refuse_ranks_in_another_order", "ManifestMismatch", ["sharded over ranks [3, 2, 1, 0]", "ascending ranks"]),
        ("refuse_a_model_on_the_meta_device", "ManifestMismatch", ["0.weight is on the meta device"]),
        ("refuse_the_first_fsdp", "ArgumentError", ["use FSDPAdapter"]),
        ("refuse_a_shard_of_another_shape", "ManifestMismatch", ["w holds a shard of shape [2, 3] where [23, 3]"]),
        (
            "refuse_shards_that_were_freed_since_the_last_update",
            "ManifestMismatch",
            ["w has no memory: it was freed"],
        ),
        ("refuse_an_export_of_pending_sums", "ManifestMismatch", ["sum has placements (Partial"]),
        (
            "refuse_an_export_that_shards_otherwise_the_second_time",
            "ManifestMismatch",
            ["tensor 0, w: torch.float32 [8, 8], lies in other shards than the first time"],
        ),
        ("refuse_a_function", "ArgumentError", ["ExportAdapter takes functions"]),
        (
            "refuse_while_a_layer_is_unsharded",
            "ManifestMismatch",
            ["unsharded at the moment in model.layers.1 (1 in all)"],
        ),
    ],
)
def test_what_cannot_be_sliced_rightly_is_refused_on_every_rank(
    four: Ranks, case: str, error: str, parts: list[str]
) -> None:
    for seen in of(four, case):
        assert seen["error"] == error, seen
        assert [part for part in parts if part not in seen["text"]] == [], seen["text"]


def test_parameters_that_come_go_and_tie_are_noticed(four: Ranks) -> None:
    for seen in of(four, "parameters_that_come_and_go"):
        appeared, vanished, newly_tied = seen["texts"]
        assert "extra appeared" in appeared and "extra vanished" in vanished
        assert "the model changed after its manifest was made" in newly_tied
        assert seen["counts"] == [25, 26, 24]
        assert seen["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}


# --- where a shard lies ------------------------------------------------------------------------------------

SIZES = st.integers(0, 40)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def held(shape: tuple[int, ...], mesh: tuple[int, ...], placements: list[Any], reading: int = 0) -> torch.Tensor:
    """How many ranks hold each element, counting only first copies."""
    count = torch.zeros(shape, dtype=torch.int64)
    for at in itertools.product(*map(range, mesh)):
        if any(i for i, placement in zip(at, placements, strict=True) if placement.is_replicate()):
            continue
        for part in shards_of(index_ranges(shape, mesh, at, placements)[reading]):
            count[tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))] += 1
    return count


@settings(max_examples=150, deadline=None)
@given(data=st.data(), mesh=MESHES, shape=st.lists(SIZES, min_size=1, max_size=3).map(tuple))
def test_shards_cover_every_element_once_and_lie_where_torch_says(
    data: st.DataObject, mesh: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    dims = st.one_of(st.just(None), st.integers(0, len(shape) - 1))
    placements: list[Any] = [Shard(d) if d is not None else Replicate() for d in (data.draw(dims) for _ in mesh)]
    assert bool((held(shape, mesh, placements) == 1).all())
    for at in itertools.product(*map(range, mesh)):
        (ranges,) = index_ranges(shape, mesh, at, placements)
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(at), placements)
        assert tuple(sum(size for _, size in dim) for dim in ranges) == sizes
        if 0 not in sizes:
            assert tuple(dim[0][0] for dim in ranges) == offsets


@settings(max_examples=150, deadline=None)
@given(size=SIZES, fsdp=st.integers(1, 5), plan=st.lists(st.integers(1, 5), min_size=1, max_size=2).map(tuple))
def test_fsdp_over_a_plan_is_read_as_fsdp_cuts_it(size: int, fsdp: int, plan: tuple[int, ...]) -> None:
    mesh, cuts = (fsdp, *plan), math.prod(plan)
    placements = [_StridedShard(0, split_factor=cuts), *(Shard(0) for _ in plan)]
    whole = torch.arange(size)
    for at in itertools.product(*map(range, mesh)):
        as_fsdp, as_torch = (shards_of(r) for r in index_ranges((size,), mesh, at, placements))
        rows = whole
        for dim in (*range(1, len(mesh)), 0):
            pieces = rows.chunk(mesh[dim])
            rows = pieces[at[dim]] if at[dim] < len(pieces) else rows[:0]
        found = [whole[p.offsets[0] : p.offsets[0] + p.sizes[0]] for p in as_fsdp]
        assert torch.equal(torch.cat(found) if found else whole[:0], rows)
        assert sum(p.sizes[0] for p in as_torch) == _compute_local_shape_and_global_offset(
            (size,), mesh, list(at), placements
        )[0][0]  # fmt: skip
    for reading in (0, 1):
        assert bool((held((size,), mesh, placements, reading) == 1).all())
