"""Where the tensors of a transformers model's checkpoint lie in memory, as transformers' own conversion says.

transformers 5 holds weights otherwise than checkpoints have them: experts are stacked, projections are split or fused, parts have
other names. `save_pretrained` turns this back by `revert_weight_conversion`. Here that function runs once over stand-ins without
values (`tracing`), which shows for each checkpoint tensor the boxes of memory that it consists of: shards are cut along them, and
nothing is gathered. A checkpoint tensor that doesn't consist of boxes (its rows are permuted, say) has a problem, which is an
error if it is sent. transformers 4, and models of other libraries, have the same tensors in memory as in checkpoints.

One model is sent otherwise than `save_pretrained` writes it. Published checkpoints of Qwen3-VL-MoE have the experts transposed;
transformers reads them either way and writes them as it holds them, but vLLM reads the published form alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from inference_plugin.wire.errors import ManifestMismatch, first_few
from trainer_adapters.sources.plan import CheckpointLayout, Target, TensorInfo, unwrapped, whole_target
from trainer_adapters.sources.sharded import class_before_sharding
from trainer_adapters.sources.streams import walk, wrapped
from trainer_adapters.sources.tracing import Trace

__all__ = ["checkpoint_layout"]

HINT = (
    "if save_pretrained can, send what it would save: docs/trainers.md has the lines, with ExportAdapter and "
    "revert_weight_conversion"
)


class _Member(NamedTuple):
    """A tensor of a transformers model: its number, its name in that model, and what precedes that name in the checkpoint."""

    position: int
    name: str
    front: str


def checkpoint_layout(module: torch.nn.Module) -> CheckpointLayout | None:
    """The layout of a module that is a transformers model, or has some in it. None for any other module."""
    revert: Any = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    models = _transformers_models(module) if revert is not None else {}
    if not models:
        return None

    def layout(names: Sequence[str | None], infos: Sequence[TensorInfo]) -> list[tuple[Target, ...]]:
        targets: list[tuple[Target, ...]] = [
            () if name is None else (whole_target(name, info.shape),) for name, info in zip(names, infos, strict=True)
        ]
        for prefix, model in models.items():
            members = _members(prefix, names, infos)
            for position, own in _converted(revert, model, members, infos).items():
                targets[position] = own
        return targets

    return layout


def _transformers_models(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The transformers models in a module, without those that are parts of others, by the prefixes of their tensors' names."""
    kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    found: dict[str, torch.nn.Module] = {}
    for prefix, part in walk(module):
        name = unwrapped(prefix)
        if isinstance(part, kind) and not any(name.startswith(above) for above in found):
            found[name] = part
    return found


def _members(prefix: str, names: Sequence[str | None], infos: Sequence[TensorInfo]) -> list[_Member]:
    """The tensors of the model with this prefix that have a name. One that was renamed to more than another prefix goes by its
    new name. PEFT's A and B are not among them: no checkpoint has them, but rules may match their names ("model." in
    "base_model.", "attn.q_proj" in "attn.q_proj.lora_A")."""
    members: dict[str, _Member] = {}
    for position, (name, info) in enumerate(zip(names, infos, strict=True)):
        own = unwrapped(info.name)
        if name is None or not own.startswith(prefix) or ".lora_A." in own or ".lora_B." in own:
            continue
        own = own.removeprefix(prefix)
        member = _Member(position, own, name.removesuffix(own)) if name.endswith(own) else _Member(position, name, "")
        members.setdefault(member.name, member)
    return list(members.values())


@torch.inference_mode(mode=False)  # in it torch would take `contiguous` and `reshape` for computations of their own
def _converted(
    revert: Callable[..., Any], model: torch.nn.Module, members: Sequence[_Member], infos: Sequence[TensorInfo]
) -> dict[int, tuple[Target, ...]]:
    """The checkpoint tensors in each member, by its number; nothing if transformers converts nothing.

    Raises `ManifestMismatch` if transformers can't say what it would write."""
    trace = Trace()
    own = {one.position: one for one in members}
    stand_ins = {one.name: trace.stand_in(i, infos[i].shape, infos[i].dtype) for i, one in own.items()}
    skeleton = _skeleton(model, "", stand_ins)
    skeleton.__dict__["get_parameter"] = _no_parameter
    try:
        with trace:
            made = revert(skeleton, stand_ins)
    except Exception as error:
        raise ManifestMismatch(
            f"transformers can't say how a checkpoint of this {type(model).__name__} looks: {type(error).__name__}: {error}",
            hint=HINT,
            side="trainer",
        ) from error
    if made is stand_ins:
        return {}
    found: dict[int, list[Target]] = {i: [] for i in own}
    for name, tensor in made.items():
        pieces = trace.pieces(tensor)
        sources = {piece.source for piece in pieces} if pieces else trace.sources(tensor)
        fronts = {own[i].front for i in sources}
        if pieces and len(fronts) == 1:
            full_name, shape = fronts.pop() + name, tuple(tensor.shape)
            for one in pieces:
                found[one.source].append(Target(full_name, one.offsets, one.sizes, one.dims, one.at, shape))
            continue
        memory = first_few([own[i].name for i in sorted(sources)])
        problem = f"has its elements in another order or with other values than {memory}"
        for i in sources:
            found[i].append(whole_target(own[i].front + name, infos[i].shape, problem))
    twins = Counter(info.twin for info in infos)
    for i, member in own.items():
        if not found[i] and twins[infos[i].twin] == 1:
            problem = "is in no checkpoint that transformers would write"
            found[i].append(whole_target(member.front + member.name, infos[i].shape, problem))
    return {i: tuple(sorted(targets, key=lambda target: target.offsets)) for i, targets in found.items()}


def _no_parameter(name: str) -> torch.Tensor:
    """Stands in for a model's `get_parameter`. `Transpose(check_dims=True)` of transformers leaves a tensor as it is if the
    parameter has the same shape. No tensor has the shape of this one, so each is transposed."""
    return torch.empty(0, device="meta")


def _skeleton(part: torch.nn.Module, prefix: str, stand_ins: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A copy of a module as transformers made it: without wrappers, of its own class, which `fully_shard` changes, and with whole
    parameters, on which a conversion may decide."""
    while inner := wrapped(part) or next((name for name in part._modules if not unwrapped(f"{name}.")), ""):
        part = part._modules[inner]  # type: ignore[assignment]
    made: torch.nn.Module = object.__new__(class_before_sharding(part))
    made.__dict__.update(part.__dict__)
    made.__dict__["_modules"] = {
        name: None if child is None else _skeleton(child, f"{prefix}{name}.", stand_ins)
        for name, child in part._modules.items()
    }
    made.__dict__["_parameters"] = {
        name: torch.nn.Parameter(stand_ins[prefix + name], requires_grad=False) if prefix + name in stand_ins else own
        for name, own in part._parameters.items()
    }
    return made
