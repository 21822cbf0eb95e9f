"""Megatron's marks, rules and architectures by themselves: no Megatron, no ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from inference_plugin.plugins import hookimpl, plugin_manager
from inference_plugin.wire.errors import ManifestMismatch
from trainer_adapters.sources.megatron import (
    QKV,
    Architecture,
    ColumnParallel,
    GatedMLP,
    InterleavedMLP,
    ModelDims,
    Norm,
    NotSent,
    Replicated,
    RowParallel,
    architectures,
    decoder_layer,
    megatron_architecture,
    stacked,
)
from trainer_adapters.sources.megatron.chunks import Chunk
from trainer_adapters.sources.megatron.dims import ParallelPlace, check_gathered, check_marks, partition_dim
from trainer_adapters.sources.megatron.held import boxes_of_parameters


class ColumnParallelLinear(nn.Module):
    pass


class TELayerNormColumnParallelLinear(nn.Module):
    parallel_mode = "column"


class TERowParallelGroupedLinear(nn.Module):
    parallel_mode = None


class TELinear(nn.Module):
    parallel_mode = None


class VocabParallelEmbedding(nn.Module):
    pass


class OfOnesOwn(nn.Module):
    pass


def weight(dims: int = 2, **marks: Any) -> torch.Tensor:
    parameter = nn.Parameter(torch.zeros((4,) * dims))
    for name, value in marks.items():
        setattr(parameter, name, value)
    return parameter


DIVIDED = {"tensor_model_parallel": True, "partition_stride": 1}


@pytest.mark.parametrize(
    ("layer", "name", "parameter", "expected"),
    [
        (OfOnesOwn(), "weight", weight(**DIVIDED, partition_dim=1), 1),
        (OfOnesOwn(), "weight", weight(tensor_model_parallel=False, partition_dim=-1), None),
        (OfOnesOwn(), "weight", weight(), None),
        # Of gated delta nets, as built and after Megatron has set what is missing; and of attention, which Megatron doesn't mark.
        (OfOnesOwn(), "A_log", weight(1, tensor_model_parallel=True), 0),
        (OfOnesOwn(), "A_log", weight(1, tensor_model_parallel=True, partition_dim=-1), 0),
        (OfOnesOwn(), "softmax_offset", weight(1), 0),
        (OfOnesOwn(), "softmax_offset", weight(1, tensor_model_parallel=False, partition_dim=-1), 0),
        (ColumnParallelLinear(), "weight", weight(), 0),
        (ColumnParallelLinear(), "bias", weight(1), 0),
        (VocabParallelEmbedding(), "weight", weight(), 0),
        # Megatron marks what it did not initialise like this, whether it is divided or not.
        (VocabParallelEmbedding(), "weight", weight(tensor_model_parallel=False, partition_dim=-1), 0),
        (ColumnParallelLinear(), "weight", weight(tensor_model_parallel=False, partition_dim=-1), 0),
        (TELayerNormColumnParallelLinear(), "weight", weight(**DIVIDED, partition_dim=0), 0),
        (TELayerNormColumnParallelLinear(), "layer_norm_weight", weight(1), None),
        # Transformer Engine marks these two as divided by dimension 0.
        (TELinear(), "weight", weight(**DIVIDED, partition_dim=0), None),
        (TERowParallelGroupedLinear(), "weight3", weight(**DIVIDED, partition_dim=0), 1),
        (TERowParallelGroupedLinear(), "bias3", weight(1), None),
    ],
)
def test_how_a_parameter_is_divided_is_taken_from_its_marks_and_else_from_its_layers_class(
    layer: nn.Module, name: str, parameter: torch.Tensor, expected: int | None
) -> None:
    assert partition_dim(layer, name, parameter) == expected


def test_marks_that_the_rule_does_not_know_are_refused_by_name() -> None:
    layer, strided = OfOnesOwn(), weight(tensor_model_parallel=True, partition_dim=0, partition_stride=2)
    with pytest.raises(ManifestMismatch, match="fc is divided with partition_stride 2, but its rule supports 1"):
        check_marks(layer, "fc", strided, strides=(1,), expert=False, ep_size=1)
    check_marks(layer, "fc", strided, strides=GatedMLP.strides, expert=False, ep_size=1)
    with pytest.raises(ManifestMismatch, match="fc has allreduce=False, so it is an expert's parameter"):
        check_marks(layer, "fc", weight(allreduce=False), strides=(1,), expert=False, ep_size=2)
    with pytest.raises(ManifestMismatch, match="fc has allreduce=True, so it is no expert's parameter"):
        check_marks(layer, "fc", weight(allreduce=True), strides=(1,), expert=True, ep_size=2)
    check_marks(layer, "fc", weight(allreduce=True), strides=(1,), expert=True, ep_size=1)


class Wrapper(nn.Module):
    """Megatron's `DistributedDataParallel`, as far as it is asked."""

    def __init__(self, **group: Any) -> None:
        super().__init__()
        self.module = nn.Module()
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=True, overlap_param_gather=True)
        self.bucket_groups = [SimpleNamespace(param_gather_handle=None, **group)]


def test_where_megatron_does_not_tell_whether_the_optimizer_has_stepped_it_counts_as_if_it_had() -> None:
    check_gathered(Wrapper(param_gather_dispatched=False, cached_grad_buffer_shard_list=[None]))
    check_gathered(Wrapper(param_gather_dispatched=True))
    with pytest.raises(ManifestMismatch, match="have not been gathered since the optimizer's step"):
        check_gathered(Wrapper(param_gather_dispatched=False))  # Megatron-Core 0.13


def test_of_several_rules_for_a_parameter_the_last_one_counts() -> None:
    first, second = Norm("decoder.final_layernorm.*", "norm.*"), Replicated("decoder.final_layernorm.weight", "n")
    match = Architecture((first,)).extended([second]).match("decoder.final_layernorm.weight")
    assert match is not None and match.rule is second
    match = Architecture((first,)).extended([second]).match("decoder.final_layernorm.bias")
    assert match is not None and match.rule is first and match.word == "bias"


def test_the_decoder_layer_inside_of_an_mtp_layer_has_the_rules_of_decoder_layers() -> None:
    deepseek = architectures()["deepseek_v3"]
    for inside in ("transformer_layer", "mtp_model_layer"):
        match = deepseek.match(f"mtp.layers.1.{inside}.mlp.experts.linear_fc1.weight3")
        assert match is not None and isinstance(match.rule, GatedMLP)
        assert (match.layer, match.mtp, match.expert) == (None, 1, 3)
    assert deepseek.match("mtp.layers.1.transformer_layer.unknown") is None


@pytest.mark.parametrize("inside", ["transformer_layer", "mtp_model_layer"])
def test_an_mtp_layer_may_lie_elsewhere_in_the_checkpoint(inside: str) -> None:
    match = architectures()["mimo"].match(f"mtp.layers.1.{inside}.mlp.linear_fc2.weight")
    assert match is not None and match.mtp == 1
    assert match.rule.names == ("model.mtp_layers.{mtp}.mlp.down_proj.*",)


def test_a_rule_that_cannot_be_meant_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="QKV of qkv takes 3 checkpoint names, not 2"):
        QKV("qkv", "q", "k")
    with pytest.raises(ValueError, match=r"the checkpoint names of fc have \{expert\}, which it lacks"):
        ColumnParallel("fc", "experts.{expert}.fc")


def test_gates_and_ups_of_all_ranks_are_all_rows() -> None:
    dims = ModelDims(SimpleNamespace(gated_linear_unit=True), vocab_size=0, ways=2)
    runs = list(GatedMLP("fc1", "gate", "up").runs(8, dims))
    assert [tuple(run) for run in runs] == [(0, 0, 2), (1, 0, 2), (0, 2, 2), (1, 2, 2)]


def chunk(architecture: Architecture, place: ParallelPlace, **config: Any) -> Chunk:
    model = nn.Module()
    model.config = SimpleNamespace(**config)
    return Chunk(model, architecture, vocab_size=0, tied=False, place=place, layer_offset=2, mtp_offset=0, adapted={})


def test_a_rank_holds_its_part_of_the_dimension_that_megatron_divides() -> None:
    own = Architecture(decoder_layer(RowParallel("proj.weight", "o_proj.weight"), NotSent("rotary.*")))
    second_of_two = ParallelPlace(
        tp_rank=1, tp_size=2, expert_tp_rank=0, expert_tp_size=1, ep_rank=0, ep_size=1, pp_rank=0
    )
    tensors = {
        (0, "decoder.layers.1.proj.weight"): weight(**DIVIDED, partition_dim=1),
        (0, "decoder.layers.1.rotary.weight"): weight(),
    }
    (held,) = boxes_of_parameters([chunk(own, second_of_two)], tensors)
    assert (held.box.name, held.box.shape) == ("model.layers.3.o_proj.weight", (4, 8))
    assert (held.box.offsets, held.box.sizes) == ((0, 4), (4, 4))


def test_experts_that_the_checkpoint_has_in_one_tensor_are_rearranged_into_their_part_of_it() -> None:
    own = Architecture((stacked(InterleavedMLP("fc1.weight{expert}", "gate_up"), transposed=True),))
    second_of_two = ParallelPlace(0, 1, expert_tp_rank=1, expert_tp_size=2, ep_rank=1, ep_size=2, pp_rank=0)
    model = chunk(own, second_of_two, num_moe_experts=6, gated_linear_unit=True)
    part = weight(**DIVIDED, partition_dim=0)
    part.data = torch.arange(12.0).view(4, 3)  # two rows of the gate, two of the up projection; three inputs
    (held,) = boxes_of_parameters([model], {(0, "fc1.weight2"): part})
    assert (held.box.name, held.box.shape) == ("gate_up", (6, 3, 8))
    assert (held.box.offsets, held.box.sizes) == ((5, 0, 4), (1, 3, 4)), "the second half of the last expert"
    assert held.rearranged is not None and torch.equal(held.rearranged(part.data)[0], part.data[[0, 2, 1, 3]].T)


def test_where_one_rank_holds_everything_it_does_not_matter_how_it_would_be_divided() -> None:
    own = Architecture((RowParallel("proj.weight", "o_proj.weight"),))
    alone, first_of_two = (ParallelPlace(0, size, 0, 1, 0, 1, 0) for size in (1, 2))
    tensors = {(0, "proj.weight"): weight(**DIVIDED, partition_dim=0)}
    (held,) = boxes_of_parameters([chunk(own, alone)], tensors)
    assert held.box.sizes == held.box.shape == (4, 4)
    with pytest.raises(
        ManifestMismatch, match=r"proj.weight \[4, 4\] is divided along dimension 0, but its rule RowParallel"
    ):
        list(boxes_of_parameters([chunk(own, first_of_two)], tensors))


# --- registering -----------------------------------------------------------------------------------------------------


class Adds:
    def __init__(self, **own: Architecture) -> None:
        self.own = own

    @hookimpl
    def weightwire_megatron_architectures(self) -> Mapping[str, Architecture]:
        return self.own


@pytest.fixture
def plugin() -> Iterator[Any]:
    registered: list[Adds] = []

    def add(**own: Architecture) -> None:
        registered.append(Adds(**own))
        plugin_manager().register(registered[-1])

    yield add
    for one in registered:
        plugin_manager().unregister(one)


def test_a_plug_in_adds_an_architecture_beside_ours(plugin: Any) -> None:
    own = Architecture(decoder_layer(Norm("norm.*", "norm.*")))
    assert "model_of_ones_own" not in architectures()
    plugin(model_of_ones_own=own)
    assert architectures()["model_of_ones_own"] is own
    assert {"llama", "qwen3_moe", "deepseek_v3", "kimi_k2"} < architectures().keys()


def test_a_model_type_that_has_an_architecture_gets_no_second_one(plugin: Any) -> None:
    with pytest.raises(ValueError, match="a Megatron architecture is registered already for llama"):
        megatron_architecture("new_model", "llama")(lambda: Architecture(()))
    assert "new_model" not in architectures()
    plugin(llama=Architecture(()))
    with pytest.raises(ManifestMismatch, match="registered already for model_type 'llama'"):
        architectures()
