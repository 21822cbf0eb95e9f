"""Reads the structure of a PEFT model: the base model's names, and what each adapter adds to a weight.

PEFT puts modules around modules: `PeftModel` and its tuner around the model, a LoRA layer around a layer (`base_layer`),
`ModulesToSaveWrapper` around a module and its trained copies. A name without these parts is the checkpoint's.

For a weight W of shape (out, in), with A (rank, in) and B (out, rank) of an adapter, the merged weight is
`W + scaling * (B @ A)`, transposed if the weight is (in, out), as an embedding's is. `scaling` is read from the layer:
PEFT keeps alpha / rank there, or alpha / sqrt(rank) with rsLoRA, or a value that the user set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from inference_plugin.wire.errors import ManifestMismatch, first_few
from trainer_adapters.sources.plan import unwrapped
from trainer_adapters.sources.sharded import shape_of
from trainer_adapters.sources.streams import module_ties, walk

__all__ = ["AddedBias", "AddedProduct", "Addition", "PeftStructure", "adapter_names", "base_changed_by", "structure_of"]

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights`, or their beginnings, with which PEFT takes a part of the base weights into the adapter."""

_QUANTISED = frozenset(f"peft.tuners.lora.{kind}" for kind in ("aqlm", "awq", "bnb", "eetq", "gptq", "hqq", "inc"))
"""Where PEFT has its LoRA layers over quantised linear layers, whose A and B are those of any linear layer."""


@dataclass(frozen=True, slots=True)
class AddedProduct:
    """`scaling * B @ A` of one adapter; `a` and `b` are names. For `experts` > 1, A (experts * rank, in) and B (out, rank
    * experts) hold the factors of all experts of a stacked weight. `magnitude`: name of DoRA's tensor, of shape (out,)."""

    a: str
    b: str
    scaling: float
    transposed: bool = False
    experts: int = 1
    magnitude: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether it is that of one linear layer, without DoRA."""
        return ".lora_A." in self.a and self.experts == 1 and not self.magnitude

    @property
    def names(self) -> tuple[str, ...]:
        return (self.a, self.b, self.magnitude) if self.magnitude else (self.a, self.b)


@dataclass(frozen=True, slots=True)
class AddedBias:
    """`scaling * bias`, of an adapter with a bias of its own."""

    bias: str
    scaling: float

    @property
    def names(self) -> tuple[str, ...]:
        return (self.bias,)


Addition = AddedProduct | AddedBias


@dataclass(frozen=True)
class PeftStructure:
    """The structure of a PEFT model.

    - `inside`: for each module that PEFT put around another, by its prefix, the attributes that lead to the inner one.
    - `additions`: by the weight's name in the base model, in the order in which they are added.
    - `ties`: those that the base model declares, by its own names.
    - `replaced`: modules and biases that the adapters train as a whole.
    """

    inside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    additions: Mapping[str, tuple[Addition, ...]] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()

    @property
    def factors(self) -> frozenset[str]:
        """Names of the adapters' own tensors that are in use."""
        return frozenset(name for own in self.additions.values() for addition in own for name in addition.names)

    def base_name(self, name: str) -> str | None:
        """The base model's name of a tensor; None for one that isn't the base model's."""
        return _without_wrappers(name, self.inside)


def structure_of(model: torch.nn.Module, *, only: str | None = None) -> PeftStructure:
    """Reads a PEFT model without reading values or communicating. `only`: the name of one adapter, active or not; by default all
    active adapters are read.

    Raises `ManifestMismatch`, which names them, for layers that can't be merged: already merged in place, disabled at the
    moment, or of a variant or kind without a rule here; and for an adapter's tensors that a module computes at each use.
    """
    parts = _parts_of(model, only)
    inside, problems = parts.inside, parts.problems
    additions: dict[str, tuple[Addition, ...]] = {}
    for prefix, layer in parts.layers:
        if (base := _without_wrappers(prefix, inside)) is None:
            continue  # inside a module that another one replaces
        active = [n for n in ([only] if only else layer.active_adapters) if _has(layer, n)]
        if problem := (_state_of(layer) if only is None else "") or _problem_of(layer, active, alone=only is not None):
            problems.append(f"{base[:-1]} {problem}")
            continue
        for name, added in _additions_of(prefix, layer, active):
            additions[base + name] = additions.get(base + name, ()) + added
    if problems:
        raise ManifestMismatch(
            f"adapters that can't be sent: {first_few(problems)}",
            hint="change these, or send an unsharded copy after merge_and_unload() with ModuleAdapter",
            side="trainer",
        )
    if not additions and only is not None:
        raise ManifestMismatch(
            f"no layer has an adapter named {only!r}", hint="name one of the model's", side="trainer"
        )
    if not additions:
        raise ManifestMismatch("no adapter is active", hint="call set_adapter(name) before the update", side="trainer")
    ties = {
        _without_wrappers(alias, inside, declared=True) or "": _without_wrappers(source, inside, declared=True) or ""
        for alias, source in module_ties(model).items()
    }
    structure = PeftStructure(inside, additions, ties, tuple(parts.replaced))
    if computed := sorted(structure.factors - parts.held):
        raise ManifestMismatch(
            f"tensors of adapters that are no parameters: {first_few(computed)}",
            hint="a module that computes them at each use (a parametrization, weight norm) must hold them as parameters: call "
            "remove_parametrizations() or remove_weight_norm() first",
            side="trainer",
        )
    return structure


def base_changed_by(model: torch.nn.Module, adapter: str) -> str:
    """The initialisation by which PEFT changed the base weights as it made this adapter; "" if it did not."""
    for part in model.modules():
        configs = getattr(part, "peft_config", None)
        kind = getattr(configs.get(adapter), "init_lora_weights", "") if isinstance(configs, dict) else ""
        if isinstance(kind, str) and kind.lower().startswith(_CHANGES_BASE):
            return kind
    return ""


def adapter_names(model: torch.nn.Module) -> list[str]:
    """The names of a model's LoRA adapters, active or not, as its layers have them: wrappers, such as DistributedDataParallel,
    don't show PEFT's own list."""
    layers: list[Any] = [
        part for part in model.modules() if hasattr(part, "lora_A") and hasattr(part, "lora_embedding_A")
    ]
    return list(dict.fromkeys(name for layer in layers for name in (*layer.lora_A, *layer.lora_embedding_A)))


@dataclass
class _Parts:
    """What PEFT put into a model. `inside` and `replaced` are those of `PeftStructure`; `layers`: LoRA layers by prefix;
    `held`: the names of the parameters of adapters; `problems`: parts that can't be sent, in words."""

    inside: dict[str, tuple[str, ...]] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    layers: list[tuple[str, Any]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def _parts_of(model: torch.nn.Module, only: str | None) -> _Parts:
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    found = _Parts()
    for raw_prefix, module in walk(model):
        part: Any = module
        prefix = unwrapped(raw_prefix)
        if ".lora_" in f".{prefix}":
            found.held.update(prefix + name for name in part._parameters)
        if isinstance(part, PeftModel | PeftMixedModel):
            found.inside[prefix] = ("base_model",)
            bias = getattr(part.peft_config.get(only or ""), "bias", "none")
            found.replaced += [f"biases ({bias!r})"] if bias != "none" else []
        elif isinstance(part, BaseTuner):
            found.inside[prefix] = ("model",)
        elif isinstance(part, ModulesToSaveWrapper):
            active = part.active_adapters
            found.inside[prefix] = ("modules_to_save", active[0]) if active else ("original_module",)
            if only is not None and only in part.modules_to_save:
                found.replaced.append(prefix[:-1])
            if part.disable_adapters and only is None:
                found.problems.append(f"{prefix[:-1]} is disabled at the moment: update outside of disable_adapter()")
        elif isinstance(part, AuxiliaryTrainingWrapper):
            found.problems.append(f"{prefix[:-1]} is a {type(part).__name__}, which has no rule here")
        elif isinstance(part, LoraLayer):
            found.inside[prefix] = ("base_layer",)
            found.layers.append((prefix, part))
        elif isinstance(part, BaseTunerLayer):
            found.problems.append(f"{prefix[:-1]} is a {type(part).__name__}, not a LoRA layer")
    return found


def _state_of(layer: Any) -> str:
    """Why a LoRA layer's weight can't be merged at the moment; "" if it can."""
    if layer.merged:
        return f"has {', '.join(layer.merged_adapters)} merged into its weight: call unmerge_adapter() first"
    if layer.disable_adapters:
        return "is disabled at the moment: update outside of disable_adapter()"
    return ""


def _problem_of(layer: Any, active: Sequence[str], *, alone: bool) -> str:
    """Why a LoRA layer's adapters can't be sent; "" if they can. `alone`: without the base, which may be quantised then."""
    from peft.tuners.lora import layer as kinds

    quantised = alone and type(layer).__module__ in _QUANTISED
    if not isinstance(layer, kinds.Linear | kinds.Embedding | kinds.ParamWrapper) and not quantised:
        return f"is a lora.{type(layer).__name__}, which has no rule here"
    for adapter in active:
        variant = type(layer.lora_variant.get(adapter)).__name__
        if variant == "DoraLinearVariant" and len(active) == 1 and not layer.fan_in_fan_out:
            continue
        if variant == "DoraLinearVariant":
            return f"has DoRA adapter {adapter} beside another, or on a transposed weight: merge it with merge_and_unload()"
        if variant != "NoneType":
            return f"has adapter {adapter} of variant {variant}, which has no rule here"
    base = layer.get_base_layer()
    if getattr(base, "bias", None) is None and any(layer.lora_bias.get(adapter) for adapter in active):
        return "has an adapter with a bias (lora_bias=True), and no bias of its own to which that could be added"
    weight = getattr(base, getattr(layer, "parameter_name", "weight"))
    if active and not alone and weight.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return f"adapts a weight of {weight.dtype}: quantised weights have no rule here"
    for a, b in () if quantised else [_factors_of(layer, adapter) for adapter in active]:
        size = shape_of(b)[0], shape_of(a)[-1]
        if sorted(size) != sorted(shape_of(weight)[-2:]):
            return (
                f"has a weight {list(shape_of(weight))} and an adapter for {list(size)}, which no layer of this size takes: PEFT "
                "makes such for a layer that tensor parallelism divides and gathers (lm_head); don't target it"
            )
    return ""


def _factors_of(layer: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of an adapter."""
    if adapter in layer.lora_embedding_A:
        return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    return layer.lora_A[adapter].weight, layer.lora_B[adapter].weight


def _has(layer: Any, adapter: str) -> bool:
    return adapter in layer.lora_A or adapter in layer.lora_embedding_A


def _additions_of(prefix: str, layer: Any, active: Sequence[str]) -> list[tuple[str, tuple[Addition, ...]]]:
    """The layer's adapted weights: name in the layer, its additions."""
    products: list[Addition] = []
    biases: list[Addition] = []
    for adapter in active:
        scaling = float(layer.scaling[adapter])
        if adapter in layer.lora_embedding_A:
            a, b = f"{prefix}lora_embedding_A.{adapter}", f"{prefix}lora_embedding_B.{adapter}"
            products.append(AddedProduct(a, b, scaling, transposed=True))
            continue
        a, b = f"{prefix}lora_A.{adapter}.weight", f"{prefix}lora_B.{adapter}.weight"
        magnitude = f"{prefix}lora_magnitude_vector.{adapter}.weight" if adapter in layer.lora_variant else ""
        experts = getattr(layer, "num_experts", 1)
        transposed = layer.fan_in_fan_out or (experts > 1 and not layer._did_swap_in_out_features)
        products.append(AddedProduct(a, b, scaling, transposed, experts, magnitude))
        if layer.lora_bias[adapter]:
            biases.append(AddedBias(f"{prefix}lora_B.{adapter}.bias", scaling))
    found = [(getattr(layer, "parameter_name", "weight"), tuple(products))] if products else []
    return [*found, ("bias", tuple(biases))] if biases else found


def _without_wrappers(name: str, inside: Mapping[str, Sequence[str]], *, declared: bool = False) -> str | None:
    """`name` (or a prefix that ends with a dot) without the parts that PEFT added; None if it belongs to PEFT's own modules.

    `declared`: the model declared the name before PEFT changed it, so it has none of those parts, or only the first.
    """
    parts = name.split(".")
    kept: list[str] = []
    at = 0
    while at < len(parts):
        own = inside.get("".join(f"{part}." for part in parts[:at]))
        if own is not None and parts[at:] != [""]:
            if tuple(parts[at : at + len(own)]) == tuple(own):
                at += len(own)
                continue
            if not declared:
                return None
        kept.append(parts[at])
        at += 1
    return ".".join(kept)
