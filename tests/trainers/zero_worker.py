"""The cases of `test_zero.py`, run by torchrun (see `observing.py`) in `.venvs/megatron`, where the real DeepSpeed is.

Usage: zero_worker.py OUT_DIRECTORY, with an engine running that serves `tiny_qwen3()` in bfloat16.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import weightwire
from tests.support.deepspeed_loaded import deepspeed
from tests.trainers.observing import Result, main, observe, refused, state, tiny_qwen3, tiny_qwen3_moe
from trainer_adapters import DeepSpeedAdapter, ExportAdapter, ModuleAdapter, SyncManager
from trainer_adapters.sources.chosen import source_for

OUT = Path(sys.argv[1])
PERSISTENT = 40
"""Parameters of at most so many elements stay whole: the norms."""
DEADLINE_S = 300.0


def under_zero(model: nn.Module, stage: int = 3, *, bf16: bool = True, **options: Any) -> Any:
    """DeepSpeed's engine around the model."""
    zero = {"stage": stage, **options}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = PERSISTENT
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # which would be compiled
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


@functools.cache
def shared() -> tuple[Any, ModuleAdapter]:
    """An engine for several cases, as they take time to start; and a source that was made before."""
    model = tiny_qwen3()
    before = ModuleAdapter(model)
    return under_zero(model), before


def train(engine: Any) -> None:
    tokens = torch.arange(40).view(2, 20) * 7 % 51
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """What DeepSpeed itself gathers, by clean names."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name.removeprefix("module."): tensor for name, tensor in state(model).items()}


def kind_of(source: Any) -> str:
    return next(kind.__name__ for kind in type(source).__mro__ if kind.__name__ in weightwire.__all__)


def seen_of(model: Any, **options: Any) -> Result:
    source = source_for(model, **options)
    seen = {**observe(source), "kind": kind_of(source)}  # before parameters are gathered, and freed
    return {**seen, "gold": gathered(model)}


# --- into an engine -----------------------------------------------------------


def served() -> Result:
    """Two updates, each after a step; the test looks at the engine between them."""
    engine, _ = shared()
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2):
            train(engine)
            manager.update(engine)
            full = gathered(engine)
            if dist.get_rank() == 0:
                torch.save(full, OUT / "sent.tmp")
                (OUT / "sent.tmp").rename(OUT / f"sent{version}.pt")
                deadline_s = time.monotonic() + DEADLINE_S
                while not (OUT / f"compared{version}").exists():
                    assert time.monotonic() < deadline_s
                    time.sleep(0.01)
            dist.barrier()
        return {"verified": manager.verify(DeepSpeedAdapter(engine)).ok}


# --- cases that must arrive ---------------------------------------------------


def before_the_first_step() -> Result:
    return {**seen_of(shared()[0].module), "plain": state(tiny_qwen3().bfloat16())}


def after_two_steps() -> Result:
    """A source is used again: its values follow the training, its manifest stays the same object."""
    engine = under_zero(tiny_qwen3(tied=False), bf16=False)
    source = DeepSpeedAdapter(engine)
    manifest, claims = source.manifest(), source.claims()
    before = {piece.box: piece.tensor.clone() for piece in source.slices()}
    train(engine)
    train(engine)
    partitions = {parameter.ds_tensor.untyped_storage().data_ptr() for parameter in engine.parameters()}
    after = {piece.box: piece.tensor for piece in source.slices()}
    return {
        **seen_of(engine),
        "same": source.manifest() is manifest and source.claims() is claims,
        "changed": sum(not torch.equal(after[box], before[box]) for box in before) / len(before),
        "views": {tensor.untyped_storage().data_ptr() for tensor in after.values()} <= partitions,
        "held together": source.slices_last(),
    }


def after_a_forward_pass() -> Result:
    """The norms stay gathered then; and some parameters are frozen."""
    model: Any = tiny_qwen3()
    model.model.layers[0].requires_grad_(False)
    engine = under_zero(model)
    train(engine)
    engine(input_ids=torch.arange(8).view(1, 8))
    whole = sum(parameter.numel() > 0 for parameter in model.parameters())
    return {"whole": whole, **seen_of(engine)}


def offloaded() -> Result:
    engine = under_zero(tiny_qwen3(), offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"})
    train(engine)
    return seen_of(engine)


def stacked_experts() -> Result:
    engine = under_zero(tiny_qwen3_moe(), bf16=False)
    full = gathered(engine)
    gold = tiny_qwen3_moe()
    gold.load_state_dict(full)
    unstacked = ModuleAdapter(gold, rank=0, world_size=1)
    names = [spec.name for spec in unstacked.manifest().tensors]
    values = {names[piece.box.tensor]: piece.tensor.clone() for piece in unstacked.slices()}
    return observe(source_for(engine), values)


def stage_1() -> Result:
    return whole_parameters(1)


def stage_2() -> Result:
    return whole_parameters(2)


def whole_parameters(stage: int) -> Result:
    engine = under_zero(tiny_qwen3(), stage)
    train(engine)
    by_name = observe(DeepSpeedAdapter(engine))
    seen = seen_of(engine)
    return {**seen, "by name": by_name["manifest"] == seen["manifest"] and by_name["claims"] == seen["claims"]}


def with_adapters() -> Result:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model: Any = get_peft_model(tiny_qwen3(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    engine = under_zero(model)
    train(engine)
    alike: Any = get_peft_model(tiny_qwen3(), LoraConfig(r=2, target_modules=["q_proj"])).bfloat16()
    alike.load_state_dict(gathered(model))
    seen: Result = {}
    for kind, group in {"merged": "policy", "alone": "lora.policy"}.items():
        seen[kind] = observe(source_for(engine, group=group))
        seen[f"{kind} whole"] = observe(source_for(alike, group=group))
    return seen


# --- cases that must be refused -----------------------------------------------


def refuse_while_gathered() -> Result:
    engine, _ = shared()
    source = DeepSpeedAdapter(engine)
    source.manifest()
    named = dict(engine.module.named_parameters())
    seen: Result = {}
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        with deepspeed.zero.GatheredParameters(named[name], modifier_rank=0):
            if dist.get_rank() == 0:
                named[name].data.fill_(7)
            seen[name] = {**refused(source.manifest), "slices": refused(lambda: list(source.slices()))["error"]}
    return {"inside": seen, **observe(source, gathered(engine))}


def refuse_what_is_not_in_memory() -> Result:
    """No library reads from NVMe here, so a parameter is marked as DeepSpeed marks those."""
    engine, _ = shared()
    source = DeepSpeedAdapter(engine)
    source.manifest()
    partition = engine.module.lm_head.weight.ds_tensor
    ordinary, partition.final_location = partition.final_location, "nvme"
    seen = refused(source.manifest)
    partition.final_location = ordinary
    return {**seen, **observe(ExportAdapter(lambda: exported(engine)), gathered(engine))}


def exported(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            yield name, parameter


def refuse_quantised() -> Result:
    """DeepSpeed's quantiser needs a GPU, so a partition is marked as one that it made."""
    engine, _ = shared()
    partition = engine.module.lm_head.weight.ds_tensor
    partition.ds_quant_scale = torch.ones(1)
    seen = refused(DeepSpeedAdapter(engine).manifest)
    del partition.ds_quant_scale
    return seen


def refuse_other_partitions() -> Result:
    engine, _ = shared()
    partition = engine.module.lm_head.weight.ds_tensor
    whole, partition.data = partition.data, partition.data[:-1]
    seen = refused(DeepSpeedAdapter(engine).manifest)
    partition.data = whole
    return seen


def experts_of_each_rank(ep_size: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A mixture of four experts under ZeRO-2, with `4 // ep_size` of them on each rank, and its tensors by their own names."""
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as of_moe

    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(16, 16), MoE(16, nn.Linear(16, 16), num_experts=4, ep_size=ep_size))
    optimizer = torch.optim.AdamW(of_moe({"params": list(model.parameters()), "name": "all"}), lr=1e-2)  # type: ignore[arg-type]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    first = dist.get_rank() * 4 // ep_size if ep_size > 1 else 0
    own: dict[str, torch.Tensor] = {}
    for name, tensor in model.named_parameters():
        before, experts, number = name.partition("deepspeed_experts.")
        if experts:
            local, _, rest = number.partition(".")
            name = f"{before}{experts}{first + int(local)}.{rest}"
            with torch.no_grad():
                tensor.fill_(first + int(local))
        own[name] = tensor
    return engine, own


def experts_on_every_rank() -> Result:
    engine, own = experts_of_each_rank(1)
    return observe(source_for(engine), {name: tensor.detach().clone() for name, tensor in own.items()})


def refuse_experts_of_one_rank() -> Result:
    engine, own = experts_of_each_rank(2)
    seen = {kind.__name__: refused(kind(engine).manifest) for kind in (ModuleAdapter, DeepSpeedAdapter)}
    return {"refused": seen, **observe(ExportAdapter(lambda: own.items()))}


def refuse_another_adapter() -> Result:
    engine, before = shared()
    return {**refused(lambda: ModuleAdapter(engine)), "before": refused(before.manifest)}


CASES: list[Callable[[], Result]] = [
    before_the_first_step,
    served,
    after_two_steps,
    after_a_forward_pass,
    offloaded,
    stacked_experts,
    stage_1,
    stage_2,
    with_adapters,
    refuse_while_gathered,
    refuse_what_is_not_in_memory,
    refuse_quantised,
    refuse_other_partitions,
    experts_on_every_rank,
    refuse_experts_of_one_rank,
    refuse_another_adapter,
]

if __name__ == "__main__":
    main(CASES, [])
