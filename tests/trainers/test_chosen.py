"""A model is sent by the adapter that its sharding needs, on real gloo ranks, and every byte of it arrives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from inference_plugin.wire.errors import ArgumentError
from tests.trainers.launching import Ranks, assert_is_gold, launch, of, on, written
from trainer_adapters import DeepSpeedAdapter, FSDPAdapter, LoRAAdapter, MergedLoRAAdapter, ModuleAdapter, WeightSource
from trainer_adapters.sources.chosen import kind_of, source_for


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ranks]:
    return functools.cache(lambda count: launch("chosen_worker.py", count, tmp_path_factory.mktemp("chosen")))


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest, launched: Callable[[int], Ranks]) -> Ranks:
    return launched(request.param)


@on(
    "case,kind",
    both=[
        ("fsdp2", "FSDPAdapter"),
        ("fsdp1", "FSDPAdapter"),
        ("tensor_parallel", "DTensorAdapter"),
        ("data_parallel", "ModuleAdapter"),
        ("mapping", "ModuleAdapter"),
        ("state_dict", "DTensorAdapter"),
        ("state_dict_of_a_plan", "DTensorAdapter"),
    ],
    four=[("hybrid", "FSDPAdapter"), ("fsdp2_over_tensor_parallel", "DTensorAdapter")],
)
def test_the_adapter_follows_from_the_model_and_every_byte_arrives(ranks: Ranks, case: str, kind: str) -> None:
    seen = of(ranks, case)
    assert [rank["kind"] for rank in seen] == [kind] * len(seen)
    manifest, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], manifest.tied)
    if case == "mapping":
        assert {spec.dtype for spec in manifest.tensors} == {"float64"}


def test_every_adapter_of_a_sharded_model_adopts_the_dtypes_of_the_engine_where_it_is_told_to(ranks: Ranks) -> None:
    for seen in of(ranks, "in_engine_dtypes"):
        for kind in ("fsdp2", "fsdp1", "tensor parallel", "merged", "adapter alone"):
            assert seen[kind] == (True, True, [{"float32"}, {"bfloat16"}], {"*": "bfloat16"}), kind


@pytest.mark.parametrize("case", ["adapters", "adapters_of_a_model_that_was_sharded_after_an_update"])
def test_a_peft_model_is_merged_whenever_it_was_sharded(ranks: Ranks, case: str) -> None:
    seen = of(ranks, case)
    assert {rank["kind"] for rank in seen} == {"MergedLoRAAdapter"}
    assert len({rank["manifest"] for rank in seen}) == 1
    manifest, values, _ = written(seen, seen[0]["collectives"])
    whole = {name: value for name, value in values.items() if "q_proj" not in name}
    assert_is_gold(whole, seen[0]["gold"], manifest.tied)
    assert len(values) - len(whole) == 2 and all("lora" not in name for name in values)


def test_in_a_lora_group_the_adapter_of_a_peft_model_goes_alone(ranks: Ranks) -> None:
    alone = of(ranks, "adapters_alone")
    assert {rank["kind"] for rank in alone} == {"LoRAAdapter"}
    assert all(".lora_A." in name or ".lora_B." in name for rank in alone for name in rank["names"])


def test_other_adapters_refuse_a_peft_model_and_name_the_right_one(ranks: Ranks) -> None:
    for rank in of(ranks, "refuse_adapters_in_other_sources"):
        for seen in rank["seen"]:
            assert seen["error"] == "ArgumentError"
            assert "MergedLoRAAdapter" in seen["text"] and "LoRAAdapter" in seen["text"]


def test_in_a_lora_group_the_adapter_of_that_name_goes_also_where_the_model_is_wrapped() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=1, target_modules=["0"], init_lora_weights=False)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), config)  # type: ignore[arg-type]
    model.add_adapter("policy", config)
    for wrapped in (model, torch.nn.DataParallel(model)):
        sent = dict(sent_by(source_for(wrapped, group="lora.policy")))
        (first,) = (tensor for name, tensor in sent.items() if "lora_A" in name)
        assert torch.equal(first, model.get_parameter("base_model.model.0.lora_A.policy.weight"))
        with pytest.raises(ArgumentError, match="has the adapters 'default', 'policy'"):
            source_for(wrapped, group="lora.other")


@pytest.mark.parametrize("given", ["tensors by name", "a function", "a model without adapters"])
def test_in_a_lora_group_what_does_not_tell_the_scaling_is_refused(given: str) -> None:
    """As PEFT saves them, B is not multiplied by the scaling: the engine would serve a weaker adapter."""
    adapter = {f"base_model.model.0.lora_{factor}.weight": torch.zeros(2, 2) for factor in "AB"}
    model = {
        "tensors by name": adapter,
        "a function": lambda: adapter,
        "a model without adapters": torch.nn.Linear(2, 2),
    }
    with pytest.raises(ArgumentError, match=r"does not tell the scaling.*ModuleAdapter") as refused:
        source_for(model[given], group="lora.policy")  # type: ignore[arg-type]
    assert "whose B the engine needs multiplied" in str(refused.value)
    assert isinstance(source_for(ModuleAdapter(adapter), group="lora.policy"), ModuleAdapter)


def sent_by(source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    """What the source of a process of its own sends."""
    manifest = source.manifest()
    return ((manifest.tensors[item.box.tensor].name, item.tensor) for item in source.slices())


def test_a_peft_model_is_sent_under_other_names_if_the_caller_renames_them() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(r=1, target_modules=["0"]))
    assert kind_of(model) == "lora"
    with pytest.raises(ArgumentError):
        ModuleAdapter(model)
    assert ModuleAdapter(model, rename=lambda name: name if "base_layer" in name else None).manifest().tensors


def test_a_megatron_model_without_the_checkpoints_config_is_told_what_to_pass() -> None:
    kind = type("GPTModel", (torch.nn.Module,), {"__module__": "megatron.core.models.gpt", "config": 1, "decoder": 2})
    model = kind()
    assert kind_of(model) == kind_of([model, model]) == kind_of(torch.nn.DataParallel(model)) == "megatron"
    with pytest.raises(ArgumentError, match="hf_config"):
        source_for(model)


def test_one_dtype_is_a_rule_for_all_names() -> None:
    model = torch.nn.Linear(2, 2)
    rules: list[object] = ["bfloat16", torch.bfloat16, {"*": torch.bfloat16}]
    manifests = [ModuleAdapter(model, dtype_rules=rule).manifest() for rule in rules]  # type: ignore[arg-type]
    assert manifests == [manifests[0]] * 3
    assert source_for(model, dtype="bfloat16").manifest() == manifests[0]
    with pytest.raises(ArgumentError, match=r"torch\.bfloat16 or its name"):
        source_for(model, dtype=16)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"dtype='bf16': unknown .* use one of .*bfloat16.*, or 'engine'"):
        source_for(model, dtype="bf16")


@pytest.mark.parametrize("adapter", [FSDPAdapter, DeepSpeedAdapter, LoRAAdapter, MergedLoRAAdapter])
def test_an_adapter_that_takes_a_module_refuses_anything_else_and_names_its_type(adapter: Any) -> None:
    for wrong in (torch.nn.Linear(2, 2).state_dict(), [torch.ones(2)], None):
        with pytest.raises(ArgumentError, match=f"expected a torch.nn.Module, not a {type(wrong).__name__} "):
            adapter(wrong)
