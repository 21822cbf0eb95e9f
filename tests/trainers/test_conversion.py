"""Models of transformers: what is sent is what `save_pretrained` writes, name by name, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3ForCausalLM, core_model_loading
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.tensors import bytes_view
from tests.trainers.test_module_adapter import received
from tests.trainers.tiny_models import MODELS, WITH_IMAGES, checkpoint_of, tiny
from trainer_adapters import ModuleAdapter
from trainer_adapters.sources.conversion import checkpoint_layout
from trainer_adapters.sources.plan import TensorInfo
from trainer_adapters.sources.tracing import Trace


def assert_is_what_save_pretrained_writes(model: Any) -> None:
    saved = checkpoint_of(model)
    sources = [ModuleAdapter(model, rank=rank, world_size=3) for rank in range(3)]
    for source in sources:
        boxes = tuple(item.box for item in source.slices())
        assert boxes == source.claims() and [box.tensor for box in boxes] == sorted(box.tensor for box in boxes)
    arrived = received(*sources)
    assert sorted(arrived) == sorted(saved)
    for name, tensor in saved.items():
        assert arrived[name].dtype == tensor.dtype and arrived[name].shape == tensor.shape, name
        assert torch.equal(bytes_view(arrived[name]), bytes_view(tensor)), name


@pytest.mark.parametrize("model_type", [*MODELS, *WITH_IMAGES])
def test_names_and_values_are_those_that_save_pretrained_writes(model_type: str) -> None:
    assert_is_what_save_pretrained_writes(tiny(model_type))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_model_may_be_read_without_autograd(mode: Callable[[], Any]) -> None:
    model = tiny("qwen3_moe")
    with mode():
        assert_is_what_save_pretrained_writes(model)


@pytest.mark.parametrize("moe_intermediate_size", [10, 8, 16], ids=["oblong", "square gate and up", "square down"])
@pytest.mark.parametrize("loaded", [False, True], ids=["made", "loaded"])
def test_experts_that_published_checkpoints_have_transposed_are_sent_transposed(
    tmp_path: Path, moe_intermediate_size: int, loaded: bool
) -> None:
    """transformers reads them either way and writes them as it holds them; vLLM reads them transposed only."""
    model = tiny("qwen3_vl_moe", moe_intermediate_size=moe_intermediate_size)
    if loaded:
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path)
    arrived = received(*(ModuleAdapter(model, rank=rank, world_size=3) for rank in range(3)))
    held = model.state_dict()
    turned = [name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(turned) == 4 and sorted(arrived) == sorted(held)
    for name, tensor in held.items():
        assert torch.equal(arrived[name], tensor.transpose(1, 2) if name in turned else tensor), name


def test_dtype_rules_and_filters_see_each_expert() -> None:
    model = tiny("deepseek_v3").to(torch.bfloat16)
    source = ModuleAdapter(
        model,
        dtype_rules={"*.experts.0.*": torch.float32},
        include=["*.mlp.*"],
        exclude=["*.experts.[12].*", "*.shared_experts.*"],
    )
    dtypes = {spec.name: spec.dtype for spec in source.manifest().tensors}
    assert {name.split("mlp.")[1]: dtype for name, dtype in dtypes.items() if "layers.1." in name} == {
        "gate.weight": "bfloat16",
        "gate.e_score_correction_bias": "bfloat16",
        **{
            f"experts.{i}.{p}_proj.weight": d
            for i, d in ((0, "float32"), (3, "bfloat16"))
            for p in ("gate", "up", "down")
        },
    }
    arrived = received(source)
    stacked = model.model.layers[1].mlp.experts.gate_up_proj
    assert torch.equal(arrived["model.layers.1.mlp.experts.0.up_proj.weight"], stacked[0, 10:].float())


def test_a_router_bias_that_is_kept_in_fp32_stays_so() -> None:
    model = tiny("deepseek_v3").to(torch.bfloat16)
    gate = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias = torch.randn(4)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    arrived = received(ModuleAdapter(model, dtype_rules={"*bias": torch.float32, "*": torch.bfloat16}))
    assert arrived[bias].dtype == torch.float32
    assert torch.equal(arrived[bias], gate.e_score_correction_bias)


def test_a_wrapper_around_the_model_and_a_rename_change_nothing_about_its_experts() -> None:
    wrapper = nn.Module()
    wrapper.policy = tiny("qwen3_moe")
    arrived = received(ModuleAdapter(wrapper, rename=lambda name: name.removeprefix("policy.")))
    assert sorted(arrived) == sorted(received(ModuleAdapter(wrapper.policy)))


@pytest.mark.parametrize("model_type", ["mixtral", "llava"])
def test_a_loaded_model_has_the_names_of_the_checkpoint_that_it_was_loaded_from(
    model_type: str, tmp_path: Path
) -> None:
    model = tiny(model_type)
    model.save_pretrained(tmp_path)
    assert_is_what_save_pretrained_writes(type(model).from_pretrained(tmp_path))


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_wrappers_change_nothing(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = tiny("llava")
    assert sorted(received(ModuleAdapter(wrap(model)))) == sorted(received(ModuleAdapter(model)))


@pytest.mark.parametrize("shape", [(3, 16, 20), (3, 21, 16)])
def test_experts_of_another_shape_are_cut_where_save_pretrained_cuts_them(shape: tuple[int, ...]) -> None:
    model = tiny("qwen3_moe")
    model.model.layers[1].mlp.experts.gate_up_proj = nn.Parameter(torch.randn(shape))
    assert_is_what_save_pretrained_writes(model)


def test_without_transformers_own_conversion_names_are_those_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 4 has none: its models have the checkpoint's tensors in memory."""
    monkeypatch.delattr(core_model_loading, "revert_weight_conversion")
    names = [spec.name for spec in ModuleAdapter(tiny("qwen3_moe")).manifest().tensors]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names


class Reversed(ConversionOps):
    """Rows of the checkpoint in the other order."""

    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {name: tensors[0].flip(0) for name, tensors in input_dict.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class Unknown(Reversed):
    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {name: tensors[0] if tensors[0].sum() > 0 else None for name, tensors in input_dict.items()}


def converted_by(operation: ConversionOps) -> nn.Module:
    kind = type(f"Qwen3{type(operation).__name__}", (Qwen3ForCausalLM,), {})
    converter = WeightConverter("self_attn.o_proj.weight", "self_attn.o_proj.weight", operations=[operation])
    register_checkpoint_conversion_mapping(kind.__name__, [converter], overwrite=True)
    return kind(tiny("qwen3").config)


def test_a_tensor_that_the_checkpoint_has_in_another_order_is_refused_by_name_and_may_be_left_out() -> None:
    model = converted_by(Reversed())
    with pytest.raises(
        ManifestMismatch, match=r"layers.0.self_attn.o_proj.weight has its elements in another"
    ) as caught:
        ModuleAdapter(model).manifest()
    assert "docs/trainers.md" in str(caught.value) and "revert_weight_conversion" in str(caught.value)
    left = [spec.name for spec in ModuleAdapter(model, exclude=["*.o_proj.*"]).manifest().tensors]
    assert "model.layers.1.self_attn.q_proj.weight" in left


def test_a_conversion_that_depends_on_values_is_refused() -> None:
    with pytest.raises(
        ManifestMismatch, match=r"how a checkpoint of this Qwen3Unknown looks.*revert_weight_conversion"
    ):
        ModuleAdapter(converted_by(Unknown())).manifest()


def test_weights_of_any_size_are_traced_without_memory_for_them() -> None:
    with torch.device("meta"):
        model = tiny("deepseek_v3")
        experts = model.model.layers[1].mlp.experts
        experts.gate_up_proj = nn.Parameter(torch.empty(256, 2 << 20, 4 << 20))  # 8 PB
    names = [name for name, _ in model.named_parameters()]
    infos = [TensorInfo(n, tuple(p.shape), p.dtype, i) for i, (n, p) in enumerate(model.named_parameters())]
    layout = checkpoint_layout(model)
    assert layout is not None
    last = layout(names, infos)[names.index("model.layers.1.mlp.experts.gate_up_proj")][-1]
    assert last.name == "model.layers.1.mlp.experts.255.up_proj.weight"
    assert (last.offsets, last.sizes, last.shape) == ((255, 1 << 20, 0), (1, 1 << 20, 4 << 20), (1 << 20, 4 << 20))


# --- the trace itself --------------------------------------------------------------------------------------

COPIES = ["chunk", "chunk", "transpose", "squeeze", "contiguous", "cat"]
OTHERS = ["stack", "flatten", "add in place", "flip", "expand", "unfold"]


@given(st.data())
def test_what_a_trace_calls_boxes_are_the_elements_that_the_same_code_puts_there(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple), min_size=1, max_size=2))
    real = [torch.arange(math.prod(shape)).view(shape) + 1000 * i for i, shape in enumerate(shapes)]
    names = data.draw(st.lists(st.sampled_from(COPIES), min_size=1, max_size=5))
    names += data.draw(st.lists(st.sampled_from(OTHERS), max_size=1))
    dims = [data.draw(st.integers(0, 2)) for _ in names]
    result = carried_out(real, names, dims)
    trace = Trace()
    with trace:
        made = carried_out([trace.stand_in(i, shape, torch.int64) for i, shape in enumerate(shapes)], names, dims)
    assert made.shape == result.shape
    pieces = trace.pieces(made)
    if pieces is None:
        assert names[-1] in OTHERS
        return
    rebuilt = torch.full_like(result, -1)
    for piece in pieces:
        box = real[piece.source][tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))]
        others = [dim for dim in range(box.dim()) if dim not in piece.dims]
        part = box.permute(*others, *piece.dims)[(0,) * len(others)]
        rebuilt[tuple(slice(a, a + n) for a, n in zip(piece.at, part.shape, strict=True))] = part
    assert torch.equal(rebuilt, result)


def carried_out(tensors: list[torch.Tensor], names: list[str], dims: list[int]) -> torch.Tensor:
    """These operations one after the other, each on the last result and, if their shapes are the same, another one."""
    made = list(tensors)
    for name, number in zip(names, dims, strict=True):
        last = made[-1]
        dim = number % max(last.dim(), 1)
        beside = next(one for one in made if one.shape == last.shape)
        if name == "stack":
            made.append(torch.stack([beside, last], dim))
        elif name == "contiguous":
            made.append(last.contiguous())
        elif name == "squeeze":
            made.append(last.squeeze())
        elif name == "flatten":
            made.append(last.reshape(-1))
        elif name == "add in place":
            made.append(last.clone().add_(1))
        elif not last.dim():
            continue
        elif name == "chunk":
            made.append(last.chunk(2, dim)[-1])
        elif name == "transpose":
            made.append(last.transpose(0, dim))
        elif name == "cat":
            made.append(torch.cat([beside, last], dim))
        elif name == "flip":
            made.append(last.flip(0))
        elif name == "expand":
            made.append(last.narrow(dim, 0, 1).expand(last.shape))
        elif name == "unfold" and last.shape[dim] > 1:
            made.append(last.unfold(dim, 2, 1))
    return made[-1]
