"""The cases of `test_lora.py`, run by torchrun (see `observing.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peft import IA3Config, LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from inference_plugin.wire.config import Config
from tests.trainers.observing import Result, main, observe, refused, state, tiny_qwen3, tiny_qwen3_moe, train
from tests.trainers.tiny_models import checkpoint_of, tiny
from trainer_adapters import FSDPAdapter, LoRAAdapter, MergedLoRAAdapter
from trainer_adapters.sources.lora import factors as lora

ATTENTION = ["q_proj", "v_proj", "down_proj"]


def adapted(model: Any, **options: Any) -> Any:
    """The model with an adapter; the same on every call."""
    torch.manual_seed(17)
    return get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 10, "target_modules": ATTENTION} | options))


def shard(model: Any, **options: Any) -> Any:
    base = model.get_base_model()
    for layer in base.model.layers if hasattr(base, "model") else base.transformer.h:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def push(model: nn.Module) -> nn.Module:
    """A real optimizer step of what PEFT trains, with gradients that no sharding can change."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for parameter in trained:
        parameter.grad = parameter.detach() * 0.5 + 1
    optimizer.step()
    optimizer.zero_grad()
    return model


def merged(model: Any) -> dict[str, torch.Tensor]:
    """What PEFT itself makes of an unsharded model."""
    return state(model.merge_and_unload())


def compared(make: Callable[[], Any], step: Callable[[Any], object] = push, **options: Any) -> Result:
    gold = make()
    step(gold)
    model = shard(make())
    step(model)
    return observe(MergedLoRAAdapter(model, **options), merged(gold))


def tiny_gpt2() -> Any:
    """Conv1D layers hold their weights transposed, and have biases."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    config = GPT2Config(
        vocab_size=51, n_positions=16, n_embd=18, n_layer=2, n_head=2, n_inner=34, tie_word_embeddings=False
    )
    return GPT2LMHeadModel(config)


def two_adapters(model: Any, **options: Any) -> Any:
    model = adapted(model, **options)
    model.add_adapter("second", LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "o_proj"]))
    model.base_model.set_adapter(["default", "second"])
    for module in model.modules():  # else nothing of the second's A @ B is there to see
        if hasattr(module, "lora_B") and "second" in module.lora_B:
            nn.init.ones_(module.lora_B["second"].weight)
    return model


# --- cases that must arrive ---------------------------------------------------


def trained_by_real_steps() -> Result:
    return compared(lambda: adapted(tiny_qwen3()), lambda model: train(model, steps=2))


def unsharded_on_every_rank() -> Result:
    gold, model = (push(adapted(tiny_qwen3())) for _ in range(2))
    return observe(MergedLoRAAdapter(nn.parallel.DistributedDataParallel(model)), merged(gold))


def rank_stabilised_with_patterns() -> Result:
    return compared(
        lambda: adapted(tiny_qwen3(), use_rslora=True, rank_pattern={"q_proj": 6}, alpha_pattern={"v_proj": 3})
    )


def two_active_adapters() -> Result:
    return compared(lambda: two_adapters(tiny_qwen3()))


def one_of_two_adapters() -> Result:
    def make() -> Any:
        model = two_adapters(tiny_qwen3())
        model.set_adapter("second")
        return model

    return compared(make)


def base_in_bf16() -> Result:
    return compared(lambda: adapted(tiny_qwen3().bfloat16()))


def sent_as_bf16() -> Result:
    return compared(lambda: adapted(tiny_qwen3()), dtype_rules={"*norm.weight": torch.float32, "*": torch.bfloat16})


def transposed_with_biases() -> Result:
    return compared(lambda: adapted(tiny_gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, bias="all"))


def biases_of_adapted_layers_and_of_adapters() -> Result:
    options = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "bias": "lora_only", "lora_bias": True}
    return compared(lambda: adapted(tiny_gpt2(), **options))


def modules_to_save() -> Result:
    return compared(lambda: adapted(tiny_qwen3(tied=False), modules_to_save=["lm_head", "norm"]))


def adapted_embeddings() -> Result:
    return compared(lambda: adapted(tiny_qwen3(tied=False), target_modules=["embed_tokens", "lm_head", "k_proj"]))


def row_norms_of_dora() -> Result:
    return compared(lambda: adapted(tiny_qwen3(), use_dora=True))


def stacked_experts() -> Result:
    def make() -> Any:
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        return push(adapted(tiny_qwen3_moe(), target_modules=["q_proj"], target_parameters=targets))

    saved = checkpoint_of(make().merge_and_unload())
    return observe(MergedLoRAAdapter(shard(make())), saved)


def fused_projections() -> Result:
    """The checkpoint has one tensor where memory has four, two of them with adapters."""

    def make() -> Any:
        return push(adapted(tiny("hrm_text"), target_modules=["q_proj", "v_proj"]))

    saved = checkpoint_of(make().merge_and_unload())
    return observe(MergedLoRAAdapter(fully_shard(make())), saved)


def renamed_and_filtered() -> Result:
    gold = {
        f"policy.{n}": t
        for n, t in merged(push(adapted(tiny_qwen3()))).items()
        if ".layers.0." in n and "norm" not in n
    }
    model = shard(push(adapted(tiny_qwen3())))
    source = MergedLoRAAdapter(
        model, rename=lambda n: f"policy.{n}", include=["policy.model.layers.0.*"], exclude=["*norm*"]
    )
    return observe(source, gold)


def filtered_to_norms() -> Result:
    """No adapter changes what is left."""
    gold = {n: t for n, t in merged(push(adapted(tiny_qwen3()))).items() if "norm" in n}
    return observe(MergedLoRAAdapter(shard(push(adapted(tiny_qwen3()))), include=["*norm*"]), gold)


# --- an adapter alone, for an engine's own slots ------------------------------


def alone(make: Callable[[], Any], adapter: str = "default", **options: Any) -> Result:
    """Against PEFT's own checkpoint of an unsharded model, with B times the scaling that its layers have."""
    gold = push(make())
    scaling = {
        f"base_model.model.{name}.lora_B.weight": layer.scaling[adapter]
        for name, layer in gold.get_base_model().named_modules()  # type: ignore[operator]
        if hasattr(layer, "lora_B") and adapter in layer.lora_B
    }
    saved = get_peft_model_state_dict(gold, adapter_name=adapter)
    exact = {name: t.float() * scaling[name] if name in scaling else t for name, t in saved.items()}
    dtype = torch.bfloat16 if options else torch.float32
    model = shard(push(make()))
    return observe(LoRAAdapter(model, adapter, **options), {name: t.to(dtype) for name, t in exact.items()})


def alone_rank_stabilised_with_patterns() -> Result:
    options = {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"v_proj": 3}}
    return alone(lambda: adapted(tiny_qwen3(), **options))


def alone_and_not_active() -> Result:
    def make() -> Any:
        model = two_adapters(tiny_qwen3())
        model.set_adapter("default")
        return model

    return alone(make, "second")


def alone_as_bf16() -> Result:
    return alone(lambda: adapted(tiny_qwen3()), dtype_rules={"*": torch.bfloat16})


def alone_transposed() -> Result:
    return alone(lambda: adapted(tiny_gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))


def refused_alone(model: Any, adapter: str = "default") -> Result:
    return refused(LoRAAdapter(shard(model), adapter).manifest)


def refuse_alone_dora() -> Result:
    return refused_alone(adapted(tiny_qwen3(), use_dora=True))


def refuse_alone_biases_of_adapters() -> Result:
    return refused_alone(adapted(tiny_gpt2(), target_modules=["c_attn"], fan_in_fan_out=True, lora_bias=True))


def refuse_alone_biases_of_the_base() -> Result:
    return refused_alone(adapted(tiny_gpt2(), target_modules=["c_attn"], fan_in_fan_out=True, bias="all"))


def refuse_alone_biases_beside_no_bias() -> Result:
    return refused_alone(adapted(tiny_qwen3(), lora_bias=True))


def refuse_alone_modules_to_save() -> Result:
    return refused_alone(adapted(tiny_qwen3(tied=False), modules_to_save=["lm_head"]))


def refuse_alone_embeddings() -> Result:
    return refused_alone(adapted(tiny_qwen3(tied=False), target_modules=["embed_tokens", "q_proj"]))


def refuse_alone_stacked_experts() -> Result:
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    return refused_alone(adapted(tiny_qwen3_moe(), target_modules=["q_proj"], target_parameters=targets))


def refuse_alone_another_name() -> Result:
    return refused_alone(adapted(tiny_qwen3()), "policy")


class Wide(nn.Module):
    """Weights of several tiles."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.up = nn.Linear(36, 2603, bias=False)
        self.down = nn.Linear(2603, 307, bias=False)


def wide(sharded: bool) -> dict[str, torch.Tensor]:
    """What all ranks send of it, put together."""
    model = push(adapted(Wide(), r=16, target_modules=["up", "down"]))
    if sharded:
        fully_shard(model)
    source = MergedLoRAAdapter(model)
    manifest = source.manifest()
    whole = {spec.name: torch.zeros(spec.shape) for spec in manifest.tensors}
    for piece in source.slices():
        spec = manifest.tensors[piece.box.tensor]
        where = tuple(slice(o, o + s) for o, s in zip(piece.box.offsets, piece.box.sizes, strict=True))
        whole[spec.name][where] = piece.tensor
    for tensor in whole.values():
        dist.all_reduce(tensor)
    return whole


def of_many_tiles() -> Result:
    gold = merged(push(adapted(Wide(), r=16, target_modules=["up", "down"])))
    return {"gold": gold, "whole": wide(sharded=False), "rows": wide(sharded=True)}


def tensor_parallel_of_many_tiles() -> Result:
    """The base cut by columns and rows, A and B whole on each rank."""
    model = push(adapted(Wide(), r=16, target_modules=["up", "down"]))
    gold = merged(push(adapted(Wide(), r=16, target_modules=["up", "down"])))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up.base_layer": ColwiseParallel(), "down.base_layer": RowwiseParallel()}
    parallelize_module(model.get_base_model(), mesh, plan)
    return observe(MergedLoRAAdapter(model), gold)


def several_updates() -> Result:
    model = shard(two_adapters(tiny_qwen3()))
    source = MergedLoRAAdapter(model)
    manifest = source.manifest()
    name = "model.layers.1.self_attn.q_proj.weight"
    index = manifest.index[name]

    def own() -> torch.Tensor:
        return torch.cat([p.tensor.flatten() for p in source.slices() if p.box.tensor == index] or [torch.empty(0)])

    before = own()
    base = {n: p.to_local().clone() for n, p in model.named_parameters() if "base_layer" in n}
    push(model)
    untouched = all(torch.equal(base[n], p.to_local()) for n, p in model.named_parameters() if n in base)
    same = source.manifest() is manifest
    changed = not torch.equal(before, own())
    model.set_adapter("second")
    switched = refused(lambda: next(source.slices()))
    source.manifest()
    second = own()
    return {"untouched": untouched, "same": same, "changed": changed, "first": before, "second": second, **switched}


# --- cases that must be refused -----------------------------------------------


def refuse_merged_in_place() -> Result:
    model = adapted(tiny_qwen3())
    source = MergedLoRAAdapter(model)
    model.merge_adapter()
    first = refused(source.manifest)
    model.unmerge_adapter()
    return first | {"after": refused(source.manifest)["error"]}


def refuse_disabled() -> Result:
    model = shard(adapted(tiny_qwen3()))
    source = MergedLoRAAdapter(model)
    with model.disable_adapter():
        first = refused(source.manifest)
    return first | {"after": refused(source.manifest)["error"]}


def refuse_dora_by_columns() -> Result:
    model = adapted(tiny_qwen3(), use_dora=True)
    columns = shard(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else None)
    return refused(MergedLoRAAdapter(columns).manifest)


def refuse_two_adapters_with_dora() -> Result:
    return refused(MergedLoRAAdapter(two_adapters(tiny_qwen3(), use_dora=True)).manifest)


def refuse_a_variant_without_a_rule() -> Result:
    return refused(MergedLoRAAdapter(adapted(tiny_qwen3(), alora_invocation_tokens=[1, 2])).manifest)


def refuse_biases_beside_no_bias() -> Result:
    return refused(MergedLoRAAdapter(shard(adapted(tiny_qwen3(), lora_bias=True))).manifest)


def refuse_convolutions() -> Result:
    model = nn.Sequential(nn.Conv2d(2, 4, 3))
    return refused(MergedLoRAAdapter(adapted(model, target_modules=["0"])).manifest)


def refuse_tied_weights_adapted_in_one_place() -> Result:
    return refused(MergedLoRAAdapter(shard(adapted(tiny_qwen3(), target_modules=["embed_tokens"]))).manifest)


def refuse_tied_weights_saved_in_one_place() -> Result:
    return refused(MergedLoRAAdapter(shard(adapted(tiny_qwen3(), modules_to_save=["embed_tokens"]))).manifest)


def refuse_other_adapters_than_lora() -> Result:
    config = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    return refused(lambda: MergedLoRAAdapter(get_peft_model(tiny_qwen3(), config)))


def unsharded_in_a_part_of_the_world() -> Result:
    """Each rank is a trainer of its own."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = groups[dist.get_rank()]
    models = [adapted(tiny_qwen3()) for _ in range(2)]
    one, alone = MergedLoRAAdapter(models[0], process_group=own), MergedLoRAAdapter(models[1])
    sent = sum(piece.tensor.numel() for piece in one.slices())
    share = sum(piece.tensor.numel() for piece in alone.slices())
    return {"sent": sent, "all": sum(math.prod(spec.shape) for spec in one.manifest().tensors), "share": share}


def refuse_a_model_without_adapters() -> Result:
    return refused(lambda: MergedLoRAAdapter(tiny_qwen3()))


def refuse_an_adapter_for_a_part_of_a_layer() -> Result:
    """PEFT makes B for the rows of one rank where transformers' own tensor parallelism gathers a layer's output."""
    model = adapted(tiny_qwen3(tied=False), target_modules=["lm_head"])
    factor = model.get_base_model().lm_head.lora_B["default"]
    factor.weight = nn.Parameter(factor.weight[:125])
    return refused(lambda: list(MergedLoRAAdapter(model).slices()))


def refuse_fsdp1() -> Result:
    model = FullyShardedDataParallel(adapted(tiny_qwen3()), use_orig_params=True, device_id=torch.device("cpu"))
    return refused(lambda: MergedLoRAAdapter(model))


def refuse_a_typo_in_rename() -> Result:
    return refused(MergedLoRAAdapter(adapted(tiny_qwen3()), rename={"model.norm": "norm"}).manifest)


def refuse_another_rank_of_the_adapter_on_one_trainer_rank() -> Result:
    model = shard(adapted(tiny_qwen3(), r=4 + dist.get_rank() % 2))
    source = MergedLoRAAdapter(model)
    source.manifest()
    return refused(lambda: next(source.slices()))


def refuse_a_plain_adapter() -> Result:
    return refused(lambda: FSDPAdapter(shard(adapted(tiny_qwen3()))))


def gathered_as_the_manager_says() -> Result:
    """The configuration that a manager gives its source: how much at a time, and how long a lost rank holds the others."""
    source = MergedLoRAAdapter(shard(adapted(tiny_qwen3())))
    sizes = []
    gathered = lora.gathered
    lora.gathered = lambda *of, **how: sizes.append(how["bucket_bytes"]) or gathered(*of, **how)  # type: ignore[func-returns-value]
    try:
        source.configure(Config(bucket_bytes=5 << 20, timeout_s=77))
        source.manifest()
        count = len(list(source.slices()))
    finally:
        lora.gathered = gathered
    options = source.factors.own.group._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
    return {"sizes": sizes, "timeout_s": options._timeout.total_seconds(), "all": count == len(source.claims() or ())}  # noqa: SLF001


CASES = [
    gathered_as_the_manager_says,
    trained_by_real_steps,
    unsharded_on_every_rank,
    rank_stabilised_with_patterns,
    two_active_adapters,
    one_of_two_adapters,
    base_in_bf16,
    sent_as_bf16,
    transposed_with_biases,
    biases_of_adapted_layers_and_of_adapters,
    modules_to_save,
    adapted_embeddings,
    row_norms_of_dora,
    stacked_experts,
    fused_projections,
    renamed_and_filtered,
    filtered_to_norms,
    of_many_tiles,
    tensor_parallel_of_many_tiles,
    several_updates,
    refuse_merged_in_place,
    refuse_disabled,
    refuse_dora_by_columns,
    refuse_two_adapters_with_dora,
    refuse_a_variant_without_a_rule,
    refuse_biases_beside_no_bias,
    refuse_convolutions,
    refuse_tied_weights_adapted_in_one_place,
    refuse_tied_weights_saved_in_one_place,
    refuse_other_adapters_than_lora,
    unsharded_in_a_part_of_the_world,
    refuse_a_model_without_adapters,
    refuse_an_adapter_for_a_part_of_a_layer,
    refuse_fsdp1,
    refuse_a_typo_in_rename,
    refuse_another_rank_of_the_adapter_on_one_trainer_rank,
    refuse_a_plain_adapter,
    alone_rank_stabilised_with_patterns,
    alone_and_not_active,
    alone_as_bf16,
    alone_transposed,
    refuse_alone_dora,
    refuse_alone_biases_of_adapters,
    refuse_alone_biases_beside_no_bias,
    refuse_alone_biases_of_the_base,
    refuse_alone_modules_to_save,
    refuse_alone_embeddings,
    refuse_alone_stacked_experts,
    refuse_alone_another_name,
]


if __name__ == "__main__":
    main(CASES, [])
