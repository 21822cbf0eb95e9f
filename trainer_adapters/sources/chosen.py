"""Chooses the source that fits a model, for `SyncManager.update` with a model instead of a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ArgumentError, ManifestMismatch
from trainer_adapters.sources.base import WeightSource
from trainer_adapters.sources.selection import DtypeRules, Rules
from trainer_adapters.sources.sharded import (
    has_lora_layers,
    has_partitions,
    is_dtensor,
    is_fsdp_alone,
    is_fully_sharded,
    is_wrapped_by_fsdp1,
)
from trainer_adapters.sources.streams import holds_its_tensors, pairs_of
from trainer_adapters.sources.vllm import VllmSourceAdapter, is_vllm_source

__all__ = ["Kind", "Sendable", "is_made_together", "kind_of", "source_for"]

Sendable: TypeAlias = (
    WeightSource
    | torch.nn.Module
    | Sequence[torch.nn.Module]
    | Mapping[str, torch.Tensor]
    | Sequence[tuple[str, torch.Tensor]]
    | Callable[[], Iterable[tuple[str, torch.Tensor]]]
)
"""A source, a model (for Megatron also the list of its chunks), or checkpoint tensors by name."""

Kind: TypeAlias = Literal["source", "vllm", "fsdp", "dtensor", "deepspeed", "megatron", "lora", "module", "tensors"]

TAKEN = (
    "a WeightSource, ours or vLLM's; a torch.nn.Module (plain, DistributedDataParallel, FSDP1, FSDP2, DTensors, DeepSpeed, a "
    "PEFT model); Megatron-Core's GPTModel or the list of its chunks; a mapping of names to tensors, a list of (name, tensor), "
    "DTensors too, or a callable that returns fresh pairs of them"
)

LORA_GROUP = "lora."
"""Prefix of the names of groups that hold one adapter for the engine's own LoRA slots, without the base model."""


def source_for(
    model: Sendable,
    *,
    dtype: torch.dtype | str | None = None,
    hf_config: Any = None,
    group: str = "policy",
    process_group: dist.ProcessGroup | None = None,
) -> WeightSource:
    """The adapter for `model`: `FSDPAdapter`, `DTensorAdapter`, `DeepSpeedAdapter`, `MegatronAdapter`, `MergedLoRAAdapter`
    (`LoRAAdapter` in a group named "lora.NAME"), `VllmSourceAdapter` or `ModuleAdapter`. A `WeightSource` is returned as it is.

    `dtype`: the dtype in which every tensor travels, as with `dtype_rules={"*": dtype}`; "engine" stands for the engine's own
    dtypes; default: the trainer's own. `hf_config`: for Megatron, the checkpoint's config. `process_group`: the trainer's ranks.
    For Megatron, LoRA and vLLM's sources the call is collective over these ranks.

    Raises `ArgumentError` for a model that cannot be sent, and what the adapter raises.
    """
    kind = kind_of(model)
    rules: Rules = None if dtype is None else _rules(dtype)
    if kind == "source":
        assert isinstance(model, WeightSource)
        if dtype is not None:
            raise ArgumentError(
                f"dtype={dtype!r} was given with a {type(model).__name__}, which decides by itself how its tensors travel",
                hint="give the adapter dtype_rules, or give update the model itself",
            )
        return model
    sendable: Any = model
    if group.startswith(LORA_GROUP) and kind not in ("lora", "megatron"):
        raise ArgumentError(
            f"group {group!r} is a LoRA adapter, whose B the engine needs multiplied by the scaling (alpha / r); a "
            f"{type(model).__name__} without LoRA layers does not tell the scaling",
            hint="give update the PEFT model, or LoRAAdapter(model, name); if B is multiplied already, ModuleAdapter(tensors)",
        )
    if kind == "vllm":
        return VllmSourceAdapter(sendable, dtype_rules=rules, process_group=process_group)
    if kind == "megatron":
        return _megatron(sendable, rules, hf_config, group, process_group)
    if kind == "lora":
        return _lora(sendable, rules, group, process_group)
    if kind == "fsdp":
        from trainer_adapters.sources.fsdp import FSDPAdapter

        return FSDPAdapter(sendable, dtype_rules=rules)
    if kind == "dtensor":
        from trainer_adapters.sources.dtensor import DTensorAdapter

        return DTensorAdapter(sendable, dtype_rules=rules, process_group=process_group)
    if kind == "deepspeed":
        from trainer_adapters.sources.zero import DeepSpeedAdapter

        return DeepSpeedAdapter(sendable, dtype_rules=rules)
    from trainer_adapters.sources.module import ModuleAdapter

    place: dict[str, int] = {}
    if process_group is not None:
        place = {"rank": dist.get_rank(process_group), "world_size": dist.get_world_size(process_group)}
    return ModuleAdapter(sendable, dtype_rules=rules, **place)  # type: ignore[arg-type]


def kind_of(model: object) -> Kind:
    """The kind of this model, by its class and its parameters' classes. Raises `ArgumentError` for a model that cannot be sent;
    the text lists what can."""
    if isinstance(model, WeightSource):
        return "source"
    if is_vllm_source(model):
        return "vllm"
    if isinstance(model, torch.nn.Module):
        return _kind_of_module(model)
    if isinstance(model, list | tuple) and model and all(isinstance(one, torch.nn.Module) for one in model):
        if all(_is_megatron(one) for one in model):
            return "megatron"
        raise _unknown(f"a list of {len(model)} modules that are not all Megatron-Core's", "send one model at a time")
    if isinstance(model, Mapping | list | tuple):
        if not holds_its_tensors(model):
            return "tensors"
        _check_pairs(pairs_of(model))
        return "dtensor" if any(is_dtensor(tensor) for _, tensor in pairs_of(model)) else "tensors"
    if isinstance(model, Iterator):
        raise _unknown(
            f"a {type(model).__name__}, which can be read only once, while every update reads it again",
            "pass a callable that returns a fresh one, for example `lambda: model.named_parameters()`",
        )
    if isinstance(model, type):
        raise _unknown(f"the class {model.__name__}", "pass an instance of it")
    if isinstance(model, str | bytes) or hasattr(model, "__fspath__"):
        raise _unknown(
            f"a path, {model!r}", "load the tensors of the checkpoint first, or use the command `weightwire push`"
        )
    if callable(model) and not isinstance(model, torch.Tensor):
        return "tensors"
    raise _unknown(f"an object of type {type(model).__name__}", "")


def is_made_together(kind: Kind, model: Any) -> bool:
    """Whether the ranks make the source of this model by a collective of the trainer's process group."""
    if kind == "lora":  # factors of shards are gathered, over a process group of their own
        return has_partitions(model) or any(map(is_dtensor, model.parameters()))
    return kind in ("megatron", "vllm")


def _kind_of_module(model: torch.nn.Module) -> Kind:
    if _is_megatron(model):
        return "megatron"
    if has_lora_layers(model):
        return "lora"
    parts = list(model.modules())
    if any(is_wrapped_by_fsdp1(part) for part in parts):
        return "fsdp"
    if is_fsdp_alone(model):
        return "fsdp"
    if has_partitions(model):
        return "deepspeed"
    spread = any(is_fully_sharded(part) for part in parts) or any(map(is_dtensor, model.parameters()))
    return "dtensor" if spread else "module"


def _is_megatron(model: Any) -> bool:
    """Whether the model, without its wrappers, is one of Megatron-Core's, or one around it, which its adapter refuses."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    ours = any(kind.__module__.partition(".")[0] == "megatron" for kind in type(model).__mro__)
    return ours and hasattr(model, "config") and (hasattr(model, "decoder") or hasattr(model, "language_model"))


def _megatron(
    model: Any, rules: Rules, hf_config: Any, group: str, process_group: dist.ProcessGroup | None
) -> WeightSource:
    from trainer_adapters.sources.megatron.lora_adapter import MegatronLoRAAdapter
    from trainer_adapters.sources.megatron.source import MegatronAdapter

    adapter = MegatronLoRAAdapter if group.startswith(LORA_GROUP) else MegatronAdapter
    return adapter(model, hf_config, dtype_rules=rules, process_group=process_group)


def _lora(model: Any, rules: Rules, group: str, process_group: dist.ProcessGroup | None) -> WeightSource:
    from trainer_adapters.sources.lora.adapter import LoRAAdapter
    from trainer_adapters.sources.lora.merged import MergedLoRAAdapter
    from trainer_adapters.sources.lora.peft_model import adapter_names

    if not group.startswith(LORA_GROUP):
        return MergedLoRAAdapter(model, dtype_rules=rules, process_group=process_group)
    names = adapter_names(model) or ["default"]
    own = group.removeprefix(LORA_GROUP)
    if len(names) > 1 and own not in names:
        raise ArgumentError(
            f"this model has the adapters {', '.join(map(repr, names))}, and group {group!r} is none of them",
            hint="pass LoRAAdapter(model, adapter)",
        )
    name = own if own in names else names[0]
    return LoRAAdapter(model, name, dtype_rules=rules, process_group=process_group)


def _rules(dtype: object) -> DtypeRules:
    if not isinstance(dtype, str | torch.dtype):
        raise ArgumentError(
            f"dtype={dtype!r} is a {type(dtype).__name__}",
            hint="a dtype is torch.bfloat16 or its name, 'bfloat16'; for several, give the adapter dtype_rules",
        )
    try:
        return DtypeRules(dtype)
    except ManifestMismatch as error:
        raise ArgumentError(
            f"dtype={dtype!r}: {error.message}", hint=f"{error.hint}, or 'engine' for the engine's own"
        ) from None


def _check_pairs(pairs: Iterable[Any]) -> None:
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _unknown(f"a list with a {type(pair).__name__} in it", "list pairs of (name, tensor)")
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise _unknown(
                f"a mapping or list with {name!r}: {type(tensor).__name__} in it",
                "names are strings, values are tensors; of a checkpoint with more in it, pass the model's part",
            )


def _unknown(what: str, hint: str) -> ArgumentError:
    return ArgumentError(f"{what} cannot be sent. What can: {TAKEN}", hint=hint)
