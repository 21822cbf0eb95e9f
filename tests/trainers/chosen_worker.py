"""The cases of `test_chosen.py`, run by torchrun (see `observing.py`): models as training programs have them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weightwire
from tests.trainers.observing import Result, main, nudge, observe, refused, state, tiny_qwen3
from trainer_adapters.sources.chosen import source_for
from trainer_adapters.update.given import GivenModels

PLAN = {"model.layers.*.self_attn.q_proj": ColwiseParallel(), "model.layers.*.self_attn.o_proj": RowwiseParallel()}


def chosen(model: Any, gold: dict[str, torch.Tensor], **options: Any) -> Result:
    source = source_for(model, **options)
    return observe(source, gold) | {"kind": kind_of(source)}


def kind_of(source: Any) -> str:
    """The adapter as users know it."""
    return next(kind.__name__ for kind in type(source).__mro__ if kind.__name__ in weightwire.__all__)


def shard(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2() -> Result:
    return chosen(shard(tiny_qwen3()), state(tiny_qwen3()))


def fsdp1() -> Result:
    model = FullyShardedDataParallel(tiny_qwen3(), use_orig_params=True, device_id=torch.device("cpu"))
    return chosen(model, state(tiny_qwen3()))


def tensor_parallel() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return chosen(parallelize_module(tiny_qwen3(key_heads=2), mesh, PLAN), state(tiny_qwen3(key_heads=2)))


def data_parallel() -> Result:
    return chosen(nn.parallel.DistributedDataParallel(tiny_qwen3()), state(tiny_qwen3()))


def mapping() -> Result:
    tensors = state(tiny_qwen3(tied=False))
    return chosen(tensors, tensors, dtype="float64")


def state_dict() -> Result:
    model, gold = shard(tiny_qwen3()), tiny_qwen3()
    nudge(model)
    nudge(gold)
    return chosen(model.state_dict(), state(gold))


def state_dict_of_a_plan() -> Result:
    """Pairs, of which a tensor-parallel plan has sharded two in each layer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(tiny_qwen3(key_heads=2), mesh, PLAN)
    return chosen(list(model.state_dict().items()), state(tiny_qwen3(key_heads=2)))


def adapters() -> Result:
    return chosen(shard(adapted()), merged())


def adapters_of_a_model_that_was_sharded_after_an_update() -> Result:
    given, model = GivenModels("policy", None), adapted()
    given.source_of(model, None, None, timeout_s=60).manifest()
    source = given.source_of(shard(model), None, None, timeout_s=60)
    return observe(source, merged()) | {"kind": kind_of(source)}


def adapters_alone() -> Result:
    source = source_for(shard(adapted()), group="lora.policy")
    return {"kind": kind_of(source), "names": [spec.name for spec in source.manifest().tensors]}


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(tiny_qwen3(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return model.base_model.model


def merged() -> dict[str, torch.Tensor]:
    """Where nothing is adapted: the sum's own bits are tested in `test_lora.py`."""
    return {name: tensor for name, tensor in state(tiny_qwen3()).items() if "q_proj" not in name}


def in_engine_dtypes() -> Result:
    """The dtypes of a manifest before and after the source adopted those of an engine, by kind of model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = {
        "fsdp2": shard(tiny_qwen3()),
        "fsdp1": FullyShardedDataParallel(tiny_qwen3(), use_orig_params=True, device_id=torch.device("cpu")),
        "tensor parallel": parallelize_module(tiny_qwen3(key_heads=2), mesh, PLAN),
        "merged": shard(adapted()),
    }
    seen: Result = {}
    for name, model in [*models.items(), ("adapter alone", models["merged"])]:
        source = source_for(model, group="lora.policy" if name == "adapter alone" else "policy", dtype="engine")
        dtypes = [{spec.dtype for spec in source.manifest().tensors}]
        adopted = source.adopt_dtypes({"*": "bfloat16"})
        dtypes.append({spec.dtype for spec in source.manifest().tensors})
        seen[name] = source.follows_engine, adopted, dtypes, dict(source.engine_dtypes)
    return seen


def refuse_adapters_in_other_sources() -> Result:
    from trainer_adapters import DTensorAdapter, ModuleAdapter

    seen = [refused(lambda: ModuleAdapter(adapted())), refused(lambda: DTensorAdapter(shard(adapted())))]
    return {"seen": seen}


def hybrid() -> Result:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    return chosen(shard(tiny_qwen3(), mesh=mesh), state(tiny_qwen3()))


def fsdp2_over_tensor_parallel() -> Result:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(tiny_qwen3(key_heads=2), mesh["tp"], PLAN)
    return chosen(shard(model, mesh=mesh["dp"]), state(tiny_qwen3(key_heads=2)))


if __name__ == "__main__":
    main(
        [
            fsdp2,
            fsdp1,
            tensor_parallel,
            data_parallel,
            mapping,
            state_dict,
            state_dict_of_a_plan,
            adapters,
            adapters_of_a_model_that_was_sharded_after_an_update,
            adapters_alone,
            in_engine_dtypes,
            refuse_adapters_in_other_sources,
        ],
        [hybrid, fsdp2_over_tensor_parallel],
    )
