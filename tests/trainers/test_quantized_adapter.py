"""Weights that are quantised as they are sent: equal, bit for bit, to the unsharded model's, quantised by others' code.

All cases of two ranks run in one launch (`quantized_worker.py`); each test below looks at one case.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from inference_plugin.wire.errors import ArgumentError, ManifestMismatch
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import TensorSpec
from tests.support.quantising import (
    INT4,
    KINDS,
    SIZES,
    as_vllm_quantises,
    config_of,
    large,
    quantised,
    write_checkpoint,
)
from tests.trainers.launching import Ranks, assert_is_gold, launch, of, written
from tests.trainers.observing import nudge, state, tiny_qwen3, tiny_qwen3_moe
from trainer_adapters import LocalSlice, ModuleAdapter, QuantizedAdapter
from trainer_adapters.sources import quantization
from trainer_adapters.sources.conversion import checkpoint_layout
from trainer_adapters.sources.quantization import (
    MXFP8,
    NVFP4,
    EightBits,
    FP8InBlocks,
    PackedInt4,
    Scheme,
    block_maxima,
    largest,
    quantize,
)
from trainer_adapters.sources.quantized_checkpoint import read_checkpoint

FP8 = torch.float8_e4m3fn


def dense(kind: str = "") -> dict[str, torch.Tensor]:
    model = tiny_qwen3(tied=False, key_heads=2, **SIZES.get(kind, {})).bfloat16()
    nudge(model)
    return state(model)


def experts() -> dict[str, torch.Tensor]:
    model = tiny_qwen3_moe().bfloat16()
    nudge(model)
    assert checkpoint_layout(model) is not None, "the experts are stacked in memory"
    source = ModuleAdapter(model)
    manifest = source.manifest()
    return {manifest.tensors[item.box.tensor].name: item.tensor.clone() for item in source.slices()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        write_checkpoint(directory / kind, quantised(dense(kind), kind), kind)
    made = quantised(large(), "fp8 in blocks", 128)
    write_checkpoint(directory / "large", made, "fp8 in blocks", 128)
    columns = {"down_proj.weight": torch.ones(4, 24).bfloat16()}
    write_checkpoint(directory / "words", quantised(columns, INT4, 24), INT4, 24)
    write_checkpoint(directory / "experts", quantised(experts(), "fp8 in blocks"), "fp8 in blocks")
    return directory


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Ranks:
    return launch("quantized_worker.py", 2, tmp_path_factory.mktemp("two"), checkpoints)


def assert_is_quantised(seen: list[dict[str, Any]], gold: dict[str, torch.Tensor], kind: str) -> None:
    manifest, values, sent = written(seen, collectives=seen[0]["collectives"])
    assert_is_gold(values, quantised(gold, kind), manifest.tied)
    assert all(sent), "each rank sends a part"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["each_kind_from_uneven_shards", "each_kind_from_columns_and_rows"])
def test_blocks_that_ranks_have_parts_of_are_quantised_as_the_whole_matrix_is(two: Ranks, case: str, kind: str) -> None:
    assert_is_quantised([seen[kind] for seen in of(two, case)], dense(kind), kind)


def test_shards_that_end_within_one_number_of_packed_values_are_refused(two: Ranks) -> None:
    for seen in of(two, "from_columns_that_share_a_number"):
        for one in (seen["claims"], seen["slices"]):
            assert one["error"] == "ManifestMismatch"
            assert "down_proj.weight_packed has columns" in one["text"] and "multiple of 8 columns" in one["text"]


@pytest.mark.parametrize(
    "case", ["from_copies_of_which_each_rank_sends_a_part", "from_an_export_that_the_ranks_make_together"]
)
def test_what_several_ranks_hold_whole_is_quantised_as_the_whole_matrix_is(two: Ranks, case: str) -> None:
    assert_is_quantised(of(two, case), dense(), "fp8 in blocks")


def test_each_expert_of_a_stack_is_quantised_under_its_checkpoint_name(two: Ranks) -> None:
    gold = experts()
    assert any(".experts.4.down_proj" in name for name in gold)
    assert_is_quantised(of(two, "experts"), gold, "fp8 in blocks")


def test_weights_are_quantised_from_their_values_in_the_dtype_that_they_would_travel_in(two: Ranks) -> None:
    gold = {name: tensor.bfloat16() for name, tensor in dense().items()}
    seen = of(two, "from_masters_in_float32_that_travel_in_bfloat16")
    assert_is_quantised(seen, gold, "fp8 in blocks")


def test_a_rank_that_fails_beforehand_fails_all_at_once_and_the_next_update_is_right(two: Ranks) -> None:
    seen = of(two, "a_rank_that_fails")
    assert [one["first"]["error"] for one in seen] == ["WeightwireError", "RuntimeError"]
    assert all("rank 1 has lost its weights" in one["first"]["text"] for one in seen)
    assert "rank=1" in seen[0]["first"]["text"]
    assert_is_quantised([one["then"] for one in seen], dense(), "fp8 in blocks")


def test_ranks_come_together_though_they_have_different_numbers_of_process_groups(two: Ranks) -> None:
    assert_is_quantised(of(two, "ranks_that_have_different_numbers_of_groups"), dense(), "fp8 in blocks")


def test_a_failed_export_reaches_its_caller_while_the_others_still_wait_in_it(two: Ranks) -> None:
    seen = of(two, "a_rank_that_fails_in_an_export")
    assert all("rank 1 can't convert its weights" in one["first"]["text"] for one in seen)
    assert_is_quantised([one["then"] for one in seen], dense(), "fp8 in blocks")


def test_after_a_rank_was_held_up_for_longer_than_the_limit_the_next_update_is_right(two: Ranks) -> None:
    seen = of(two, "a_rank_that_is_held_up")
    assert [one["first"]["error"] for one in seen] == ["PeerLost"] * 2
    assert "was held up" in seen[0]["first"]["text"]
    assert_is_quantised([one["then"] for one in seen], dense(), "fp8 in blocks")


def test_a_rank_that_has_no_such_checkpoint_fails_all_at_once(two: Ranks) -> None:
    for seen in of(two, "a_rank_without_the_checkpoint"):
        assert seen["error"] == "ArgumentError" and "nowhere' can't be read" in seen["text"], seen


def test_ranks_that_read_different_checkpoints_are_refused(two: Ranks) -> None:
    for seen in of(two, "a_rank_with_another_checkpoint"):
        assert (
            seen["error"] == "ArgumentError" and "trainer ranks [1] have another quantised checkpoint" in seen["text"]
        )


def test_the_beginning_of_a_copy_is_not_taken_for_another_ranks_weights(two: Ranks) -> None:
    seen = of(two, "from_copies_made_one_by_one")
    manifest, values, _ = written(seen, collectives=seen[0]["collectives"])
    assert_is_gold(values, quantised(large(), "fp8 in blocks", 128), manifest.tied)


def test_a_value_that_is_not_finite_shows_in_what_travels(two: Ranks) -> None:
    names = {name for seen in of(two, "not_finite") for name in seen["names"]}
    assert {f"model.layers.{layer}.mlp.up_proj.weight_scale_inv" for layer in (0, 1)} <= names


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_matrix_cut_anywhere_is_quantised_as_the_whole(data: st.DataObject) -> None:
    rows, columns = (data.draw(st.integers(1, 60)) for _ in range(2))
    block = data.draw(st.sampled_from([(16, 16), (1, columns), (8, 20), (64, 64)]))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float16]))
    whole = (torch.randn(rows, columns, generator=random) * 10 ** data.draw(st.integers(-6, 3))).to(dtype)
    power_of_two = data.draw(st.booleans())
    scheme = FP8InBlocks((rows, columns), block, kept_in("float8_e4m3fn", "float32"), power_of_two=power_of_two)
    expected, expected_scales = as_vllm_quantises(whole, list(block), power_of_two)
    scales = scheme.scales(block_maxima(whole, (0, 0), block))
    assert torch.equal(scales.stored, expected_scales)
    assert_any_part_is(whole, scheme, expected, scales.factors, data)


@pytest.mark.parametrize("kind", [INT4, "nvfp4", "modelopt nvfp4", "mxfp8"])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_matrix_in_groups_of_columns_cut_anywhere_is_quantised_as_the_whole(kind: str, data: st.DataObject) -> None:
    sizes = {INT4: [8, 16, 24, 32], "mxfp8": [32]}.get(kind, [16])
    rows, group = data.draw(st.integers(1, 40)), data.draw(st.sampled_from(sizes))
    columns = group * data.draw(st.integers(1, 5))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float16]))
    whole = (torch.randn(rows, columns, generator=random) * 10 ** data.draw(st.integers(-7, 3))).to(dtype)
    whole[data.draw(st.integers(0, rows - 1))] = 0
    whole[data.draw(st.integers(0, rows - 1)), :group] *= 10 ** data.draw(st.integers(-4, 1))
    made = quantised({(name := "mlp.a_proj.weight"): whole}, kind, group)
    scheme = SCHEMES[kind]((rows, columns), group, str(made[f"{name}_scale"].dtype).removeprefix("torch."))
    scales = scheme.scales(block_maxima(whole, (0, 0), scheme.block), largest(whole))
    assert torch.equal(scales.stored.view(torch.uint8), made[f"{name}_scale"].view(torch.uint8))
    if (of_matrix := made.get(f"{name}_global_scale", made.get(f"{name}_scale_2"))) is not None:
        assert scales.of_matrix is not None and torch.equal(scales.of_matrix.reshape(of_matrix.shape), of_matrix)
    values = made.get(f"{name}_packed", made.get(name))
    assert values is not None
    assert_any_part_is(whole, scheme, values, scales.factors, data)


SCHEMES: dict[str, Callable[[tuple[int, int], int, str], Scheme]] = {
    INT4: lambda shape, group, dtype: PackedInt4(shape, (1, group), kept_in("int32", dtype)),
    "mxfp8": lambda shape, group, dtype: MXFP8(shape, (1, group), kept_in("float8_e4m3fn", dtype)),
    "nvfp4": lambda shape, group, dtype: NVFP4(shape, (1, group), kept_in("uint8", dtype), divides=True),
    "modelopt nvfp4": lambda shape, group, dtype: NVFP4(shape, (1, group), kept_in("uint8", dtype)),
}


def kept_in(*dtypes: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"part {i}", dtype, ()) for i, dtype in enumerate(dtypes))


def assert_any_part_is(
    whole: torch.Tensor, scheme: Scheme, expected: torch.Tensor, factors: torch.Tensor, data: st.DataObject
) -> None:
    """However many rows of blocks are worked on at once."""
    (rows, columns), (height, width), of = scheme.shape, scheme.block, scheme.in_a_number
    top, left = data.draw(st.integers(0, rows - 1)), of * data.draw(st.integers(0, columns // of - 1))
    bottom, right = data.draw(st.integers(top + 1, rows)), of * data.draw(st.integers(left // of + 1, columns // of))
    part, at = whole[top:bottom, left:right], (top, left)
    touched = slice(top // height, math.ceil(bottom / height)), slice(left // width, math.ceil(right / width))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "ELEMENTS_AT_ONCE", data.draw(st.sampled_from([1, 300, 1 << 19])))
        maxima = block_maxima(part, at, scheme.block)
        made = quantize(part, at, scheme, factors[touched])
        standing = quantize(part.t().contiguous().t(), at, scheme, factors[touched])
    assert torch.equal(made.view(torch.uint8), expected[top:bottom, left // of : right // of].view(torch.uint8))
    assert torch.equal(standing.view(torch.uint8), made.view(torch.uint8))
    blocks = [
        [one.abs().amax().float() for one in torch.tensor_split(row, edges(left, right, width), 1)]
        for row in torch.tensor_split(part, edges(top, bottom, height), 0)
    ]
    assert maxima.tolist() == [[float(one) for one in row] for row in blocks]


def edges(first: int, last: int, width: int) -> list[int]:
    """Where blocks of `width` end within a range, counted from its beginning."""
    return [edge - first for edge in range(width, last, width) if edge > first]


class Operations(TorchDispatchMode):
    """Counts what would be launched on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("scheme", "most"),
    [
        (
            FP8InBlocks((4096, 4096), (128, 128), (TensorSpec("", "float8_e4m3fn", ()), TensorSpec("", "float32", ()))),
            20,
        ),
        (EightBits((4096, 4096), (1, 4096), (TensorSpec("", "int8", ()), TensorSpec("", "float32", ()))), 20),
        (PackedInt4((4096, 4096), (1, 32), (TensorSpec("", "int32", ()), TensorSpec("", "bfloat16", ()))), 20),
        (MXFP8((4096, 4096), (1, 32), (TensorSpec("", "float8_e4m3fn", ()), TensorSpec("", "uint8", ()))), 30),
        (NVFP4((4096, 4096), (1, 16), (TensorSpec("", "uint8", ()), TensorSpec("", "float8_e4m3fn", ()))), 45),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Scheme) else None,
)
def test_a_matrix_of_a_thousand_blocks_is_quantised_by_few_operations(scheme: Scheme, most: int) -> None:
    """On a device each costs a launch; it was one for each row of blocks and more. "meta" is a device that has no values."""
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    with Operations() as operations:
        scales = scheme.scales(block_maxima(weight, (0, 0), scheme.block), torch.empty((), device="meta"))
        quantize(weight, (0, 0), scheme, scales.factors)
    assert 0 < operations.count <= most


def sent(source: QuantizedAdapter) -> dict[str, torch.Tensor]:
    """What one rank that has the whole sends. Each tensor comes whole."""
    names = [spec.name for spec in source.manifest().tensors]
    return {names[item.box.tensor]: item.tensor.clone() for item in source.slices()}


def test_what_was_measured_is_sent_as_the_checkpoint_has_it_with_the_modules_that_the_source_has(
    tmp_path: Path,
) -> None:
    weights = dense("nvfp4")
    caches = {f"model.layers.{layer}.self_attn.k_scale": torch.tensor(0.5 + layer) for layer in (0, 1, 2)}
    path = write_checkpoint(tmp_path / "made", quantised(weights, "nvfp4") | caches, "nvfp4")
    found = sent(QuantizedAdapter(ModuleAdapter(weights), path))
    assert found["model.layers.1.self_attn.k_scale"] == 1.5 and "model.layers.2.self_attn.k_scale" not in found
    assert found["model.layers.0.mlp.up_proj.input_global_scale"].item() == pytest.approx(1 / 0.03)
    first = {name: tensor for name, tensor in weights.items() if ".layers.0.mlp." in name}
    found = sent(QuantizedAdapter(ModuleAdapter(first), path))
    assert {name.rpartition(".")[0] for name in found} == {
        f"model.layers.0.mlp.{one}_proj" for one in ("gate", "up", "down")
    }
    own = weights | {"model.layers.0.mlp.up_proj.input_global_scale": torch.tensor([7.0])}
    assert sent(QuantizedAdapter(ModuleAdapter(own), path))["model.layers.0.mlp.up_proj.input_global_scale"] == 7


UP, GATE, DOWN = (f"model.layers.0.mlp.{one}_proj.weight" for one in ("up", "gate", "down"))


def test_weights_that_an_engine_fuses_share_the_scale_of_the_matrix_in_nvfp4(tmp_path: Path) -> None:
    """Engines multiply fused layers by one of their scales: values made with another would be wrong. Checkpoints with two are
    published."""
    weights = dense("modelopt nvfp4")
    made = quantised(weights, "modelopt nvfp4") | {f"{UP}_scale_2": torch.tensor(1.0)}
    path = write_checkpoint(tmp_path / "made", made, "modelopt nvfp4")
    weights[GATE][0, 0] = 100.0
    found = sent(QuantizedAdapter(ModuleAdapter(weights), path))
    assert found[f"{UP}_scale_2"] == found[f"{GATE}_scale_2"] == torch.tensor(100.0) / 2688
    assert found[f"{DOWN}_scale_2"] == weights[DOWN].float().abs().amax() / 2688


def test_in_eight_bits_they_share_it_where_those_of_the_checkpoint_do(tmp_path: Path) -> None:
    """`down_proj` has the same by chance, and is fused with nothing."""
    weights = dense("modelopt fp8")
    made = quantised(weights, "modelopt fp8")
    made[f"{DOWN}_scale"] = made[f"{UP}_scale"].clone()
    path = write_checkpoint(tmp_path / "together", made, "modelopt fp8")
    apart = write_checkpoint(tmp_path / "apart", made | {f"{UP}_scale": torch.tensor(1.0)}, "modelopt fp8")
    weights[GATE][0, 0] = 100.0
    together, alone = (sent(QuantizedAdapter(ModuleAdapter(weights), one)) for one in (path, apart))
    assert (
        together[f"{UP}_scale"] == together[f"{GATE}_scale"] == torch.tensor(100.0) / 448 != together[f"{DOWN}_scale"]
    )
    assert alone[f"{UP}_scale"] == weights[UP].float().abs().amax() / 448 != alone[f"{GATE}_scale"]


def test_methods_and_scales_of_other_names_are_taken(checkpoints: Path, tmp_path: Path) -> None:
    """As engines take them; and FP8 per tensor as Mistral writes it."""
    shutil.copytree(checkpoints / "modelopt nvfp4", path := tmp_path / "nvfp4")
    for about in ({"quant_method": "modelopt_fp4"}, {"quant_algo": "NVFP4"}, {"quant_method": "NVFP4"}):
        (path / "config.json").write_text(json.dumps({"quantization_config": about}))
        assert read_checkpoint(path).schemes == read_checkpoint(checkpoints / "modelopt nvfp4").schemes
    (path / "config.json").write_text("{}")
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert read_checkpoint(path).schemes == read_checkpoint(checkpoints / "modelopt nvfp4").schemes
    made = {
        name.replace("weight_scale", "weight_scale_inv").replace("input_scale", "activation_scale"): tensor
        for name, tensor in quantised(dense(), "modelopt fp8").items()
    }
    write_checkpoint(tmp_path / "mistral", made, "modelopt fp8")
    about = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    (tmp_path / "mistral" / "config.json").write_text(json.dumps({"quantization_config": about}))
    assert_is_gold(sent(QuantizedAdapter(ModuleAdapter(dense()), tmp_path / "mistral")), made, {})


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_no_value_that_is_not_finite_is_hidden_by_quantising(kind: str, value: float, tmp_path: Path) -> None:
    weights = dense(kind)
    path = write_checkpoint(tmp_path / "made", quantised(weights, kind), kind)
    weights["model.layers.0.mlp.up_proj.weight"][17, 3] = value
    found = sent(QuantizedAdapter(ModuleAdapter(weights), path))
    strange = {
        name for name, tensor in found.items() if tensor.is_floating_point() and not tensor.float().isfinite().all()
    }
    assert any(name.startswith("model.layers.0.mlp.up_proj.") for name in strange), strange


# --- what is refused ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_has_what_cannot_be_made_of_weights_is_refused_by_name(tmp_path: Path) -> None:
    made = quantised(dense(), "fp8 per channel")
    name = "model.layers.0.mlp.up_proj"
    cases: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "asymmetric": ({f"{name}.weight_zero_point": torch.ones(130, 1)}, f"{name}.weight_zero_point"),
        "smoothed": ({f"{name}.pre_quant_scale": torch.ones(36)}, f"{name}.pre_quant_scale"),
        "two scales": ({f"{name}.weight_global_scale": torch.ones(1)}, f"{name}.weight"),
        "other rows": ({f"{name}.weight_scale": torch.ones(65, 1)}, f"{name}.weight"),
        "no scale": ({f"{name}.other_weight": torch.ones(2, 2).to(FP8)}, f"{name}.other_weight"),
        "bytes": ({f"{name}.weight": torch.ones(130, 18, dtype=torch.uint8)}, f"{name}.weight"),
        "mxfp4": (
            {
                f"{name}.weight_packed": torch.ones(2, 32, dtype=torch.uint8),
                f"{name}.weight_scale": torch.ones(2, 2, dtype=torch.uint8),
            },
            f"{name}.weight",
        ),
        "stacked": ({"experts.up_proj": torch.ones(2, 4, 4).to(FP8)}, "experts.up_proj"),
        "packed": ({f"{name}.weight_packed": torch.ones(2, 2, dtype=torch.int32)}, f"{name}.weight"),
    }
    for case, (more, named) in cases.items():
        path = write_checkpoint(tmp_path / case, made | more, "fp8 per channel")
        weights = dense() | {name: torch.ones(2, 4, 4) for name in more if name.startswith("experts")}
        with pytest.raises(ManifestMismatch, match=rf"can't be made of the trainer's weights: {named}"):
            QuantizedAdapter(ModuleAdapter(weights), path).manifest()
        others = {name: tensor for name, tensor in dense().items() if "layers.0.mlp" not in name}
        assert QuantizedAdapter(ModuleAdapter(others), path).manifest(), "of what it has not, nothing is asked"


def test_a_checkpoint_whose_weights_are_rotated_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoints / "nvfp4", path := tmp_path / "rotated")
    about = config_of("nvfp4") | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}
    (path / "config.json").write_text(json.dumps({"quantization_config": about}))
    with pytest.raises(ArgumentError, match="its weights are rotated"):
        read_checkpoint(path)


def test_four_bits_that_lie_in_bytes_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "four", quantised(dense(), "int8 per channel"), "int8 per channel")
    about = config_of("int8 per channel")
    about["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    (path / "config.json").write_text(json.dumps({"quantization_config": about}))
    with pytest.raises(ArgumentError, match=r"that can be made of the trainer's; it has model\.layers\.0\."):
        read_checkpoint(path)


def test_a_model_of_images_and_text_may_say_it_of_its_text_alone(checkpoints: Path, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "nested", quantised(dense(), "fp8 in blocks"), "fp8 in blocks")
    (path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": config_of("fp8 in blocks")}}))
    assert read_checkpoint(path) == read_checkpoint(checkpoints / "fp8 in blocks")


def test_a_checkpoint_that_is_not_quantised_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="can't be read"):
        read_checkpoint(tmp_path / "nowhere")
    path = write_checkpoint(tmp_path / "plain", dense(), "fp8 in blocks")
    with pytest.raises(ArgumentError, match="no weight in FP8, INT8, INT4, NVFP4 or MXFP8"):
        read_checkpoint(path)
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ArgumentError, match="quant_method 'awq'"):
        read_checkpoint(path)
    (path / "config.json").write_text(json.dumps({"quantization_config": ["fp8"]}))
    with pytest.raises(ArgumentError, match="can't be read"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("entry", "value", "where"),
    [
        ("weight_block_size", ["16", "16"], r"Expected `int`, got `str` - at `\$\.weight_block_size\[0\]`"),
        ("config_groups", ["group_0"], r"Expected `object \| null`, got `array` - at `\$\.config_groups`"),
        (
            "config_groups",
            {"a": {"weights": {"group_size": "32"}}},
            r"at `\$\.config_groups\[\.\.\.\]\.weights\.group_size`",
        ),
    ],
)
def test_a_config_of_another_form_is_refused_by_the_place_that_is_wrong(
    checkpoints: Path, tmp_path: Path, entry: str, value: Any, where: str
) -> None:
    shutil.copytree(path := checkpoints / "fp8 in blocks", tmp_path / "other")
    about = json.loads((path / "config.json").read_text())
    about["quantization_config"][entry] = value
    (tmp_path / "other" / "config.json").write_text(json.dumps(about))
    with pytest.raises(ArgumentError, match=rf"can't be read: ValidationError: .*{where}"):
        read_checkpoint(tmp_path / "other")


def test_a_model_that_is_not_the_checkpoints_is_refused_and_says_why(checkpoints: Path) -> None:
    path = checkpoints / "fp8 in blocks"
    weights = dense()
    name = "model.layers.0.mlp.up_proj.weight"
    for other, why in (
        (weights | {name: torch.ones(4, 4)}, rf"{name} is \[4, 4\] here and \[130, 36\] in the checkpoint"),
        (weights | {name: weights[name].to(FP8)}, f"{name} is float8_e4m3fn"),
        ({"other.weight": torch.ones(4, 4)}, "none of the source's tensors"),
        (weights | {"again": weights[name]}, f"{name} is tied"),
    ):
        with pytest.raises(ManifestMismatch, match=why):
            QuantizedAdapter(ModuleAdapter(other), path).manifest()
    with pytest.raises(ArgumentError, match="not a dict"):
        QuantizedAdapter(weights, path)  # type: ignore[arg-type]


def test_a_rank_that_knows_nothing_of_the_others_makes_no_scale_of_its_part_of_a_block(checkpoints: Path) -> None:
    source = QuantizedAdapter(ModuleAdapter(large(), rank=0, world_size=5), checkpoints / "large")
    with pytest.raises(ManifestMismatch, match=r"hold only parts of a_proj\.weight.*after torch\.distributed"):
        list(source.slices())


class Halves(ModuleAdapter):
    """Sends each matrix in two slices, which end within a block."""

    def claims(self) -> tuple[Box, ...]:
        return tuple(item.box for item in self.slices())

    def slices(self) -> Iterator[LocalSlice]:
        for item in super().slices():
            half = len(item.tensor) // 2
            for start, part in (0, item.tensor[:half]), (half, item.tensor[half:]):
                yield LocalSlice(Box(item.box.tensor, (start, 0), tuple(part.shape)), part)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_largest_values_are_compared_in_float32_whatever_torch_s_default_dtype_is(
    tmp_path: Path, default: torch.dtype
) -> None:
    weights = {"a_proj.weight": torch.randn(40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float32)}
    gold = quantised(weights, "fp8 in blocks")
    write_checkpoint(tmp_path / "served", gold, "fp8 in blocks")
    source = QuantizedAdapter(Halves(weights), tmp_path / "served")
    manifest, before = source.manifest(), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        sent = list(source.slices())
    finally:
        torch.set_default_dtype(before)
    for index, spec in enumerate(manifest.tensors):
        made = torch.cat([item.tensor for item in sent if item.box.tensor == index])
        assert torch.equal(made.view(torch.uint8), gold[spec.name].view(torch.uint8)), spec.name


def test_dtypes_that_the_engine_tells_reach_the_source_and_not_what_is_quantised(checkpoints: Path) -> None:
    source = QuantizedAdapter(ModuleAdapter(dense(), dtype_rules="engine"), checkpoints / "fp8 in blocks")
    manifest = source.manifest()
    assert source.follows_engine
    told = {spec.name: spec.dtype for spec in manifest.tensors} | {"model.norm.weight": "float32"}
    assert source.adopt_dtypes(told)
    now = {spec.name: spec.dtype for spec in source.manifest().tensors}
    assert now["model.norm.weight"] == "float32" and now["model.layers.0.mlp.up_proj.weight"] == "float8_e4m3fn"
