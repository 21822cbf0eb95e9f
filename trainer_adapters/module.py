"""Sources whose ranks hold whole tensors: one process, or data parallel with a copy on every rank.

How a source here works, `FSDPAdapter` included:
1. a *stream* yields `(name, tensor)` in the trainer's words; for a module it is its state dict, without the
   copies;
2. a *scan* of the stream turns it into heads: name, shape, dtype, and which tensors are one and the same
   memory;
3. a *plan* turns heads into the manifest: names cleaned of wrappers and renamed, twins tied, dtype rules
   applied;
4. `slices()` runs over the stream again, holds it against the heads, and cuts out this rank's boxes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.manifest import MAX_DIMS, Box, Manifest, TensorSpec
from inference_plugin.wire.tensors import dtype_name
from trainer_adapters.source import DtypeRules, LocalSlice, WeightSource, share_by_bytes

__all__ = [
    "Head",
    "ModuleAdapter",
    "Plan",
    "Rename",
    "ScannedSource",
    "Stream",
    "module_stream",
    "module_ties",
]

Pairs: TypeAlias = Iterable[tuple[str, Any]]
Stream: TypeAlias = Callable[[], Pairs]
Rename: TypeAlias = Callable[[str], str | None] | Mapping[str, str | None] | None
Buffers: TypeAlias = Literal["persistent", "all", "none"]
Rules: TypeAlias = DtypeRules | Mapping[str, torch.dtype | str] | Iterable[tuple[str, torch.dtype | str]] | None

MAX_NAME_BYTES = 1024
NOT_SENT = -1


@dataclass(frozen=True, slots=True)
class Head:
    """What a scan keeps of one tensor. `twin` is the position of the first tensor that is the same memory
    (often its own); `layout` is how it is spread over ranks, None where every rank holds all of it; `problem`
    is why it can't be sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    twin: int
    layout: Hashable = None
    problem: str = ""


@dataclass(frozen=True)
class Plan:
    """A scan and the manifest made from it. `places[i]` is the manifest's index of `heads[i]`, or
    `NOT_SENT`."""

    heads: tuple[Head, ...]
    manifest: Manifest
    places: tuple[int, ...]


class ScannedSource(WeightSource):
    """What the sources of this package share: scanning, planning, and holding slices against the plan.

    `stream` is called anew for each pass. With `rescan` each `manifest()` scans; without, one scan lasts
    until the stream stops agreeing with it. `twins` says that tensors of a stream live at the same time, so
    that equal memory means tied weights.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        ties: Callable[[], dict[str, str]],
        rescan: bool,
        twins: bool,
        dtype_rules: Rules,
        rename: Rename,
    ) -> None:
        self._stream = stream
        self._ties = ties
        self._rescan = rescan
        self._twins = twins
        self._rules = DtypeRules(dtype_rules)
        self._rename = rename
        self._plan: Plan | None = None

    def manifest(self) -> Manifest:
        if self._plan is None or self._rescan:
            heads = self._scan()
            if self._plan is None or heads != self._plan.heads:
                plan = make_plan(heads, ties=self._ties(), rename=self._rename, rules=self._rules)
                self._check_plan(plan)
                if self._plan is not None and plan.manifest == self._plan.manifest:
                    plan = Plan(plan.heads, self._plan.manifest, plan.places)
                self._plan = plan
        return self._plan.manifest

    def slices(self) -> Iterator[LocalSlice]:
        if self._plan is None:
            self.manifest()
        assert self._plan is not None
        plan = self._plan
        if not self._rescan:
            return self._cut(plan, self._boxes(plan))
        tensors: list[torch.Tensor] = []
        if (heads := self._scan(tensors)) != plan.heads:
            raise _disagreement(plan.heads, heads)
        boxes = self._boxes(plan)
        return (
            LocalSlice(box, self._local(tensor, box))
            for place, tensor in zip(plan.places, tensors, strict=True)
            if (box := boxes.get(place)) is not None
        )

    @abstractmethod
    def _boxes(self, plan: Plan) -> Mapping[int, Box]:
        """By index of the manifest: the box that this rank sends."""

    @abstractmethod
    def _local(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """The values of `box`, a view of what this rank holds of `tensor`."""

    def _look(self, tensor: torch.Tensor) -> tuple[Hashable, str]:
        """How a tensor is spread over ranks, and why it can't be sent."""
        return None, why_not_plain(tensor)

    def _check_plan(self, plan: Plan) -> None:
        """Raises for what only the whole model shows."""

    def _scan(self, keep: list[torch.Tensor] | None = None) -> tuple[Head, ...]:
        """Heads of what the stream yields now; the tensors themselves go to `keep`."""
        heads: list[Head] = []
        first_with: dict[Hashable, int] = {}
        for name, tensor in self._stream():
            position = len(heads)
            if keep is not None:
                keep.append(tensor)
            if not isinstance(tensor, torch.Tensor) or is_lazy(tensor):
                why = f"is a {type(tensor).__name__}, which has no values"
                heads.append(Head(name, (), torch.uint8, position, problem=why))
                continue
            layout, problem = self._look(tensor)
            twin = position
            if self._twins and not problem:
                twin = first_with.setdefault(_memory(tensor), position)
            heads.append(Head(name, tuple(tensor.shape), tensor.dtype, twin, layout, problem))
            del tensor
        return tuple(heads)

    def _cut(self, plan: Plan, boxes: Mapping[int, Box]) -> Iterator[LocalSlice]:
        # Counted by hand, and deleted: `enumerate` and the loop's variable would keep the last tensor alive.
        position = 0
        for name, tensor in self._stream():
            head = plan.heads[position] if position < len(plan.heads) else None
            place = plan.places[position] if head else NOT_SENT
            position += 1
            if head is None or head.name != name or (place != NOT_SENT and not _fits(head, tensor)):
                self._plan = None
                found = f"{name}: {getattr(tensor, 'dtype', type(tensor))} {list(getattr(tensor, 'shape', ()))}"
                raise ManifestMismatch(
                    f"tensor {position - 1} is {found}, the manifest was made from {_describe(head)}",
                    hint="names, shapes, dtypes and order must stay the same; the next update looks again",
                    side="trainer",
                )
            if (box := boxes.get(place)) is not None:
                yield LocalSlice(box, self._local(tensor, box))
            del tensor
        if position != len(plan.heads):
            self._plan = None
            raise ManifestMismatch(
                f"{position} tensors came, the manifest was made from {len(plan.heads)}; the first that is "
                f"missing is {_describe(plan.heads[position])}",
                hint="a callable must return a fresh iterator each time; the next update looks again",
                side="trainer",
            )


class ModuleAdapter(ScannedSource):
    """A source for tensors that each rank holds whole.

    `model` is one of
    - an unsharded `torch.nn.Module`: its parameters, frozen ones included, and its buffers, by state-dict
      names. Weights that share memory are sent once (`Manifest.tied`); `_tied_weights_keys` of transformers
      says which name travels, and weights that it calls tied but that are two tensors are refused;
    - a dict, or a list or tuple of `(name, tensor)`: read anew for each update; tensors of the same memory
      are tied;
    - any other mapping or iterable that can be iterated again and again, or a callable that returns a fresh
      iterator of `(name, tensor)`: one tensor is held at a time. `manifest()` runs through it once and
      `slices()` on every update, to the end on every rank (so that a producer may talk to the other ranks);
      all passes must yield the same names, shapes and dtypes in the same order. Nothing is tied: it can't be
      told from a buffer that is reused.

    `dtype_rules`: see `DtypeRules`. `include_buffers`: "persistent" (those in the state dict), "all" or
    "none". `rename`: a function from a name to the name in the manifest, or a mapping of those that differ;
    None as the new name leaves the tensor out. Names come to it without `module.` of
    (Distributed)DataParallel, `_orig_mod.` of torch.compile and `_checkpoint_wrapped_module.` of activation
    checkpointing.

    Where several ranks hold the same copy (data parallel), each sends a share of about the same number of
    bytes: `rank` of `world_size`, by default those of `torch.distributed` if it is initialised, else 0 of 1.
    `only_rank_0` lets rank 0 send everything.

    Raises TypeError for a model of another kind, and `ManifestMismatch`, which names them, for tensors that
    are on the meta device, sparse, freed, of a dtype that can't travel or of a subclass with inner tensors
    (DTensors among them).
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Stream,
        *,
        dtype_rules: Rules = None,
        include_buffers: Buffers = "persistent",
        rename: Rename = None,
        rank: int | None = None,
        world_size: int | None = None,
        only_rank_0: bool = False,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError("give rank and world_size together, or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..{world_size - 1}, not {rank}")
        module = model if isinstance(model, torch.nn.Module) else None
        if module is not None:
            _refuse_sharded(module)
        in_memory = module is not None or isinstance(model, dict | list | tuple)
        super().__init__(
            module_stream(module, include_buffers) if module is not None else _stream_of(model),
            ties=(lambda: module_ties(module)) if module is not None else dict,
            rescan=in_memory,
            twins=in_memory,
            dtype_rules=dtype_rules,
            rename=rename,
        )
        self._rank = rank
        self._world_size = world_size
        self._only_rank_0 = only_rank_0

    def _boxes(self, plan: Plan) -> Mapping[int, Box]:
        rank, world_size = self._position()
        if self._only_rank_0:
            if rank:
                return {}
            world_size = 1
        return share_by_bytes(plan.manifest, range(len(plan.manifest.tensors)), rank, world_size)

    def _local(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        return cut_box(tensor, box)

    def _position(self) -> tuple[int, int]:
        if self._rank is not None and self._world_size is not None:
            return self._rank, self._world_size
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1


def module_stream(module: torch.nn.Module, include_buffers: Buffers = "persistent") -> Stream:
    """The module's parameters and buffers in the order of its state dict, every name of a tied one, no hooks
    run."""
    if include_buffers not in ("persistent", "all", "none"):
        raise ValueError(f"include_buffers is 'persistent', 'all' or 'none', not {include_buffers!r}")

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, part in _walk(module, "", set()):
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    yield prefix + name, parameter
            for name, buffer in part._buffers.items():
                temporary = name in part._non_persistent_buffers_set
                if buffer is None or include_buffers == "none" or (temporary and include_buffers == "persistent"):
                    continue
                yield prefix + name, buffer

    return stream


def module_ties(module: torch.nn.Module) -> dict[str, str]:
    """Names, as the stream has them, that transformers declares tied, to the name each is tied to ("" where
    only an older list is there)."""
    ties: dict[str, str] = {}
    for prefix, part in _walk(module, "", set()):
        declared = getattr(part, "all_tied_weights_keys", None)
        if declared is None:
            declared = dict.fromkeys(getattr(part, "_tied_weights_keys", None) or (), "")
        for name, source in declared.items():
            ties[prefix + name] = prefix + source if source else ""
    return ties


def make_plan(heads: tuple[Head, ...], *, ties: Mapping[str, str], rename: Rename, rules: DtypeRules) -> Plan:
    """The manifest of what was scanned. A pure function of its arguments. Raises `ManifestMismatch`.

    `ties` are declared ones, by the heads' names: of tensors that are one memory the name that isn't declared
    a copy of another travels, else the first.
    """
    names = _renamed(_unwrapped([head.name for head in heads]), rename)
    _check_names(names, heads)
    _check_ties(ties, names, heads)
    speakers: dict[int, int] = {}
    for i, head in enumerate(heads):
        if names[i] is None:
            continue
        chosen = speakers.setdefault(head.twin, i)
        if heads[chosen].name in ties and head.name not in ties:
            speakers[head.twin] = i
    order = sorted(speakers.values())
    index = {i: place for place, i in enumerate(order)}
    tied = {
        name: str(names[speakers[head.twin]])
        for i, (name, head) in enumerate(zip(names, heads, strict=True))
        if name is not None and i not in index
    }
    dtypes = rules.resolve({str(names[i]): heads[i].dtype for i in order}, tied)
    specs = tuple(
        TensorSpec(name, _traveling(name, dtype), heads[i].shape)
        for i, (name, dtype) in zip(order, dtypes.items(), strict=True)
    )
    return Plan(heads, Manifest(specs, tied).check(), tuple(index.get(i, NOT_SENT) for i in range(len(heads))))


def cut_box(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """`box` of a whole tensor, a view without gradient."""
    ranges = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return tensor.detach()[ranges]


def _walk(module: torch.nn.Module, prefix: str, above: set[int]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each submodule with its prefix, at every place that it is used, without the `module.` of data parallel
    wrappers."""
    if id(module) in above:
        raise ManifestMismatch(f"{prefix}: the module contains itself", side="trainer")
    yield prefix, module
    if module._modules:
        wraps = isinstance(module, DataParallel | DistributedDataParallel)
        above.add(id(module))
        for name, child in module._modules.items():
            if child is not None:
                yield from _walk(child, prefix if wraps and name == "module" else f"{prefix}{name}.", above)
        above.discard(id(module))


def _unwrapped(names: list[str]) -> list[str]:
    """Names without the parts that wrappers add. A leading `module.` goes if all names have it."""
    names = [name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "") for name in names]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return names


def _renamed(names: list[str], rename: Rename) -> list[str | None]:
    if rename is None:
        return list(names)
    if isinstance(rename, Mapping):
        if unused := sorted(set(rename) - set(names)):
            raise ManifestMismatch(
                f"rename has names that the model doesn't: {first_few(unused)}",
                hint="names are given without wrappers such as module. and _orig_mod.",
                side="trainer",
            )
        return [rename.get(name, name) for name in names]
    return [rename(name) for name in names]


def _check_names(names: list[str | None], heads: tuple[Head, ...]) -> None:
    origins: dict[str, list[str]] = {}
    for name, head in zip(names, heads, strict=True):
        if name is not None:
            origins.setdefault(name, []).append(head.name)
    if doubled := [f"{name} (from {', '.join(raw)})" for name, raw in origins.items() if len(raw) > 1]:
        raise ManifestMismatch(
            f"duplicate names: {first_few(doubled)}",
            hint="give each tensor one name; rename=... can tell them apart or leave one out",
            side="trainer",
        )
    if problems := [
        f"{head.name} {head.problem}" for name, head in zip(names, heads, strict=True) if name and head.problem
    ]:
        raise ManifestMismatch(
            f"tensors that can't be sent: {first_few(problems)}",
            hint="change them as it says, or leave them out with rename={name: None}",
            side="trainer",
        )
    if unusable := [repr(name) for name in origins if not name or len(name.encode()) > MAX_NAME_BYTES]:
        raise ManifestMismatch(f"names that are empty or too long: {first_few(unusable)}", side="trainer")


def _check_ties(ties: Mapping[str, str], names: list[str | None], heads: tuple[Head, ...]) -> None:
    sent = {head.name: head for name, head in zip(names, heads, strict=True) if name is not None}
    apart = [
        f"{name} and {source}"
        for name, source in ties.items()
        if name in sent and source in sent and sent[name].twin != sent[source].twin
    ]
    if apart:
        raise ManifestMismatch(
            f"declared tied, but two tensors each, which training may have moved apart: {first_few(apart)}",
            hint="call tie_weights() before wrapping, and shard tied weights in one fully_shard group; or "
            "correct the config's tie_word_embeddings, or leave one out with rename={name: None}",
            side="trainer",
        )


def why_not_plain(tensor: torch.Tensor) -> str:
    """Why a tensor's values can't be read where they are; "" if they can."""
    if isinstance(tensor, DTensor):
        return "is a DTensor: ModuleAdapter takes whole tensors, use FSDPAdapter"
    if tensor.is_meta:
        return "is on the meta device: it has no values"
    if bool(is_traceable_wrapper_subclass(tensor)):
        return f"is a {type(tensor).__name__}, which wraps other tensors: convert it to a plain one"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is {tensor.layout} {tensor.dtype}: convert it to a plain tensor"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "has no memory: it was freed, or moved away by an offloader"
    if tensor.dim() > MAX_DIMS:
        return f"has {tensor.dim()} dimensions, {MAX_DIMS} can travel"
    return ""


def _traveling(name: str, dtype: torch.dtype) -> str:
    try:
        return dtype_name(dtype)
    except ManifestMismatch as error:
        raise ManifestMismatch(
            f"{name}: {error.message}", hint="a dtype rule for this name can say what to send", side="trainer"
        ) from None


def _fits(head: Head, tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and head.shape == tensor.shape and head.dtype == tensor.dtype


def _memory(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are the same elements of the same memory, on all ranks alike."""
    if isinstance(tensor, DTensor) or not tensor.numel():
        return id(tensor)
    reading = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), reading


def _refuse_sharded(module: torch.nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            raise TypeError("this module is sharded by fully_shard: use FSDPAdapter")
        if isinstance(part, FullyShardedDataParallel):
            raise TypeError("FSDP1 isn't supported: shard the module with fully_shard and use FSDPAdapter")


def _stream_of(model: Any) -> Stream:
    if isinstance(model, Mapping):
        return lambda: model.items()
    if isinstance(model, Iterator):
        raise TypeError(
            f"a {type(model).__name__} can be read only once, and every update reads it anew: pass a "
            "callable that returns a fresh one, e.g. `lambda: model.named_parameters()`"
        )
    if isinstance(model, Iterable):
        return lambda: model
    if callable(model):
        return lambda: _pairs(model())
    raise TypeError(f"expected a module, a mapping, a callable or an iterable of pairs, not {type(model).__name__}")


def _pairs(produced: Any) -> Pairs:
    pairs: Pairs = produced.items() if isinstance(produced, Mapping) else produced
    return pairs


def _disagreement(old: tuple[Head, ...], new: tuple[Head, ...]) -> ManifestMismatch:
    before = {head.name: head for head in old}
    after = {head.name: head for head in new}
    changes = [f"{name} appeared" for name in after if name not in before]
    changes += [f"{name} vanished" for name in before if name not in after]
    changes += [
        f"{_describe(head)} is now {_describe(after[name])}"
        for name, head in before.items()
        if name in after and (head.shape, head.dtype) != (after[name].shape, after[name].dtype)
    ]
    changes = changes or ["its order, ties or sharding"]
    return ManifestMismatch(
        f"the model changed after its manifest was made: {first_few(changes)}",
        hint="start the update again: each one makes a manifest of its own",
        side="trainer",
    )


def _describe(head: Head | None) -> str:
    return f"{head.name}: {head.dtype} {list(head.shape)}" if head else "nothing more"
