"""Placement plans: which strided region of which checkpoint tensor lands where in which parameter.

A plan is recorded once, from a run of the engine's own ``load_weights`` on a *skeleton*: a second instance of
the model's class on the ``meta`` device, never the live model. Every ``aten.copy_`` from a checkpoint tensor
into a parameter or buffer becomes a `Placement`; whatever else writes to a destination makes that destination
*refused*, with the reason in words, and it then has to go through the engine's own loader. What cannot be
attributed to one destination refuses the whole plan. Nothing is guessed; `proof.prove_plan` compares the plan
with a real load.

Tensors are told apart by their storage, not by their name: tied parameters are one destination, which bears
the first of its names in the order of ``named_parameters`` and then ``named_buffers``.

What tracing cannot see, and the proof is for: loaders that copy in other threads, that branch on the device,
or that read memory by its address.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inference_plugin.install.coverage import Destination, coverage_of
from inference_plugin.install.regions import (
    Box,
    Fill,
    Image,
    Placement,
    Region,
    bounding_box,
    c_strides,
    may_overlap,
    merge_dims,
    region_of,
    seen_through,
    union_box,
)

__all__ = [
    "LoadWeights",
    "PlacementPlan",
    "TensorInfo",
    "named_tensors",
    "storage_id",
    "storage_views",
    "trace_plan",
    "written_tensors",
]


TensorInfo = tuple[str, tuple[int, ...], torch.dtype]
"""Checkpoint name, shape and dtype of a tensor that the trainer sends."""


LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], object]
"""The engine's own loader, bound to the model that it loads."""


@dataclass(frozen=True)
class PlacementPlan:
    """What a load does to a model, as copies.

    - ``placements``: in the order of destinations in the model, then of offsets; destinations in ``doubled``
      keep the order in which the loader wrote them.
    - ``fills``: constants, to be written before the placements.
    - ``refused``: destination -> reason why it must go through the engine's own loader; ``refused_sources``
      says which checkpoint tensors that loader needs for it (none known: empty).
    - ``refusal``: why the whole plan is unusable; everything else is then empty.
    - ``unused``: checkpoint names that no placement and no refused write used, such as an ``lm_head`` that is
      tied.
    - ``uncovered``: parameter -> number of its elements that neither a placement nor a fill writes. Exact;
      never buffers, never refused ones. ``padding`` names those of them where what is left is one trailing
      block.
    - ``doubled``: destinations where placements overlap: which one wins depends on the order of names.
    - ``dtype_conflicts``: checkpoint name -> what differs. Nothing is cast: such destinations are refused
      too.
    - ``extents``: planned destination -> elements of its storage.
    """

    placements: tuple[Placement, ...] = ()
    fills: tuple[Fill, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    refused_sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refusal: str | None = None
    unused: tuple[str, ...] = ()
    uncovered: Mapping[str, int] = field(default_factory=dict)
    padding: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()
    dtype_conflicts: Mapping[str, str] = field(default_factory=dict)
    extents: Mapping[str, int] = field(default_factory=dict)

    def needs(self) -> dict[str, Box]:
        """Per checkpoint tensor that is read: the smallest box (offsets, sizes) around all that is read."""
        boxes: dict[str, Box] = {}
        for placement in self.placements:
            name = placement.source.tensor
            box, _ = bounding_box(placement.source, placement.shape)
            boxes[name] = union_box(boxes[name], box) if name in boxes else box
        return boxes

    def without(self, names: Iterable[str], reason: str) -> PlacementPlan:
        """The plan with these destinations refused too; their sources become ``refused_sources``."""
        dropped = set(names) & set(self.extents)
        sources: dict[str, set[str]] = defaultdict(set)
        for placement in self.placements:
            if placement.dest.tensor in dropped:
                sources[placement.dest.tensor].add(placement.source.tensor)
        return replace(
            self,
            placements=tuple(p for p in self.placements if p.dest.tensor not in dropped),
            fills=tuple(f for f in self.fills if f.dest.tensor not in dropped),
            refused={**self.refused, **dict.fromkeys(sorted(dropped), reason)},
            refused_sources={
                **self.refused_sources,
                **{n: tuple(sorted(sources[n])) for n in sorted(dropped)},
            },
            uncovered={n: count for n, count in self.uncovered.items() if n not in dropped},
            padding=tuple(n for n in self.padding if n not in dropped),
            doubled=tuple(n for n in self.doubled if n not in dropped),
            extents={n: extent for n, extent in self.extents.items() if n not in dropped},
        )


def trace_plan(model: nn.Module, load_weights: LoadWeights, tensors: Sequence[TensorInfo]) -> PlacementPlan:
    """Record what ``load_weights`` does to ``model``, a skeleton, with checkpoint tensors like ``tensors``.

    Nothing that the loader does raises here: it is in the plan, as a refusal. `ValueError` if a name occurs
    twice.
    """
    if len({name for name, _, _ in tensors}) != len(tensors):
        raise ValueError("a checkpoint name occurs twice in tensors")
    try:
        recorder = _Recorder(model, tensors)
    except (NotImplementedError, RuntimeError) as error:  # sparse or wrapper tensors have no storage
        return PlacementPlan(refusal=f"the model holds a tensor without a plain storage: {error}")
    recorder.record(load_weights)
    return recorder.plan()


def storage_views(model: nn.Module) -> dict[str, Tensor]:
    """Canonical destination name -> flat tensor over the whole storage, for every parameter and buffer."""
    views: dict[int, tuple[str, Tensor]] = {}
    for name, tensor, _ in named_tensors(model):
        if storage_id(tensor) not in views:
            views[storage_id(tensor)] = (name, _flat(tensor))
    return dict(views.values())


def storage_id(tensor: Tensor) -> int:
    """Identity of the memory behind ``tensor``; unique as long as somebody holds it."""
    return int(tensor.untyped_storage()._cdata)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, is a parameter) of all parameters, then all buffers, under every name that they have."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, buffer, False


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that ``func`` writes in place, by its schema; empty tensors left out."""
    positions, names = _written_arguments(func)
    values = [args[i] for i in positions if i < len(args)] + [kwargs[name] for name in names if name in kwargs]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel()]


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    schema = getattr(func, "_schema", None)
    arguments = schema.arguments if schema is not None else []
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return tuple(written), tuple(arguments[i].name for i in written)


@dataclass
class _Derived:
    """A tensor that the loader made from others: ``image`` if it is nothing but a rearranged copy of a
    source."""

    origins: frozenset[str]
    how: str
    image: Image | None = None


class _Refused(Exception):
    """Why a write cannot be a placement."""


_ATEN = torch.ops.aten


_CLONES = {_ATEN.clone.default, _ATEN._to_copy.default}


_STATE = "the model's own state"


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """Watches one load. Tracked copies are noted and not done; all else is done, on meta tensors."""

    def __init__(self, model: nn.Module, tensors: Sequence[TensorInfo]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._placeholders = {n: torch.empty(shape, dtype=dtype, device="meta") for n, shape, dtype in tensors}
        self._sources = {storage_id(tensor): name for name, tensor in self._placeholders.items()}
        self._dests: dict[int, Destination] = {}
        for name, tensor, is_parameter in named_tensors(model):
            dest = self._dests.setdefault(storage_id(tensor), _destination(name, tensor, order=len(self._dests)))
            if is_parameter and region_of(name, tensor) not in (
                replace(r, tensor=name) for r in dest.parameters.values()
            ):
                dest.parameters[name] = region_of(name, tensor)
        self._before = _bindings(model)
        self._kept: list[Any] = [tensor.untyped_storage() for _, tensor, _ in named_tensors(model)]
        self._derived: dict[int, _Derived] = {}
        self._fresh: set[int] = set()
        self._constants: dict[int, Any] = {}
        self._handed_out = ""
        self._written: list[tuple[Destination, Placement | Fill]] = []
        self._mutated: dict[str, str] = {}
        self._used: set[str] = set()
        self._refused: dict[str, str] = {}
        self._refused_sources: dict[str, set[str]] = defaultdict(set)
        self._refusal: str | None = None
        self._casts: dict[str, str] = {}

    def record(self, load_weights: LoadWeights) -> None:
        def placeholders() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._placeholders.items():
                self._handed_out = name
                yield name, tensor

        try:
            with torch.no_grad(), self:
                load_weights(placeholders())
        except Exception as error:  # noqa: BLE001 - whatever a loader raises is its answer: the plan is refused
            last = f" (the last tensor handed out was {self._handed_out})" if self._handed_out else ""
            self._refuse_all(f"the loader raised {type(error).__name__}: {error}{last}")
            return
        self._check_bindings()
        self._check_attributes()

    def plan(self) -> PlacementPlan:
        if self._refusal is not None:
            return PlacementPlan(refusal=self._refusal)
        for dest, write in self._written:
            if isinstance(write, Placement) and write.source.tensor in self._mutated:
                self._refuse(dest.name, self._mutated[write.source.tensor], {write.source.tensor})
        by_dest: dict[int, list[Placement | Fill]] = defaultdict(list)
        dests = {dest.order: dest for dest in self._dests.values()}
        for dest, write in self._written:
            by_dest[dest.order].append(write)
        for order, writes in by_dest.items():
            self._check_fills(dests[order], writes)
        placements: list[Placement] = []
        fills: list[Fill] = []
        extents: dict[str, int] = {}
        uncovered: dict[str, int] = {}
        padding: list[str] = []
        doubled: list[str] = []
        for order, dest in sorted(dests.items()):
            copies = [write for write in by_dest[order] if isinstance(write, Placement)]
            if dest.name in self._refused:
                self._refused_sources[dest.name].update(copy.source.tensor for copy in copies)
                continue
            constants = [write for write in by_dest[order] if isinstance(write, Fill)]
            cover = coverage_of(dest, [c.dest for c in copies], [c.dest for c in constants])
            uncovered.update(cover.uncovered)
            padding.extend(cover.padding)
            if cover.doubled:
                doubled.append(dest.name)
            else:
                copies.sort(key=lambda copy: copy.dest.offset)
            if copies:
                extents[dest.name] = dest.numel
            placements += copies
            fills += constants
        placed = {placement.source.tensor for placement in placements}
        used = self._used.union(placed, *self._refused_sources.values())
        return PlacementPlan(
            placements=tuple(placements),
            fills=tuple(fills),
            refused=dict(self._refused),
            refused_sources={name: tuple(sorted(self._refused_sources[name])) for name in self._refused},
            unused=tuple(name for name in self._placeholders if name not in used),
            uncovered=uncovered,
            padding=tuple(padding),
            doubled=tuple(doubled),
            dtype_conflicts=dict(self._casts),
            extents=extents,
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.copy_.default and self._copy(args[0], args[1]):
            return args[0]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {storage_id(tensor) for tensor in inputs}
        origins = frozenset().union(*map(self._origins, inputs)) if inputs else frozenset()
        if origins and torch.Tag.data_dependent_output in getattr(func, "tags", ()):
            self._refuse_all(f"{func} reads the values of {_words(origins)}")
        for target in written_tensors(func, args, kwargs):
            self._write(func, target, args, origins)
            if storage_id(target) in self._dests and not target.is_meta:
                return target  # real memory in a skeleton may be the live model's: never written here
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if origins:  # noted here because a loader may swallow it and go another way
                self._refuse_all(f"{func} on {_words(origins)} cannot be traced: {error}")
            raise
        for output in tree_leaves(result):
            if isinstance(output, Tensor) and storage_id(output) not in known:
                self._made(func, output, args, origins)
        return result

    # -- what an operation does

    def _copy(self, target: Tensor, source: Tensor) -> bool:
        """Note a copy; True if it concerns us and must not be done."""
        origins = self._origins(source)
        into = storage_id(target)
        if into not in self._dests and into not in self._sources and not origins:
            return False
        source = source.expand(target.shape)  # raises what the copy would raise
        if into in self._sources:
            self._mutate(self._sources[into], "copy_")
        elif not target.numel():
            self._used |= origins - {_STATE}
        elif into in self._dests:
            self._copy_to(self._dests[into], target, source, origins)
        elif into in self._derived or into in self._fresh:
            read = self._image(source)
            whole = target.nbytes == target.untyped_storage().nbytes() and target.dtype == source.dtype
            plain = read is not None and whole and into not in self._derived
            image = Image(read, tuple(target.stride()), target.dtype) if read is not None and plain else None
            self._derive(target, origins | self._origins(target), "copies into a tensor of the loader's own", image)
        else:
            self._refuse_all(
                f"the loader copies {_words(origins)} to a tensor that is neither a parameter nor a buffer"
            )
        return True

    def _copy_to(self, dest: Destination, target: Tensor, source: Tensor, origins: frozenset[str]) -> None:
        if _STATE in origins:
            self._refuse_all(f"{dest.name} is written from another parameter or buffer")
            return
        if storage_id(source) in self._constants:
            self._fill(dest, target, self._constants[storage_id(source)])
            return
        try:
            if not origins:
                raise _Refused("copied from a tensor that doesn't come from the checkpoint")
            placement = self._placement(dest, target, source)
        except _Refused as reason:
            self._refuse(dest.name, str(reason), origins)
        else:
            self._written.append((dest, placement))

    def _placement(self, dest: Destination, target: Tensor, source: Tensor) -> Placement:
        if source.dtype != target.dtype:
            for name in self._origins(source):
                self._casts.setdefault(name, f"{source.dtype} in the checkpoint, {target.dtype} in {dest.name}")
            raise _Refused(f"cast from {source.dtype} to {target.dtype}")
        _check_plain(target, dest.dtype)
        read = self._image(source)
        if read is None:
            derived = self._derived.get(storage_id(source))
            raise _Refused(derived.how if derived else "read through a view of another dtype, or conjugated or negated")
        order = _outermost_first(target)
        sizes, (written, from_) = merge_dims(
            [target.shape[d] for d in order],
            [target.stride(d) for d in order],
            [read.strides[d] for d in order],
        )
        return Placement(
            Region(read.tensor, read.offset, sizes, from_),
            Region(dest.name, int(target.storage_offset()), sizes, written),
            target.dtype,
            tuple(self._placeholders[read.tensor].shape),
        )

    def _write(self, func: Any, target: Tensor, args: Sequence[Any], origins: frozenset[str]) -> None:
        """Note any write but a tracked copy."""
        into = storage_id(target)
        if into in self._sources:
            self._mutate(self._sources[into], str(func))
        elif into in self._dests:
            dest = self._dests[into]
            if func is _ATEN.zero_.default:
                self._fill(dest, target, 0)
            elif func is _ATEN.fill_.Scalar:
                self._fill(dest, target, args[1])
            elif func is _ATEN.fill_.Tensor and storage_id(args[1]) in self._constants:
                self._fill(dest, target, self._constants[storage_id(args[1])])
            else:
                self._refuse(dest.name, f"written by {func}", origins)
        elif origins:
            if into in self._fresh or into in self._derived:
                self._derive(target, origins, f"computed by {func}")
            else:
                self._refuse_all(
                    f"{func} writes {_words(origins)} to a tensor that is neither a parameter nor a buffer"
                )
        self._constants.pop(into, None)

    def _made(self, func: Any, output: Tensor, args: Sequence[Any], origins: frozenset[str]) -> None:
        """Note a tensor that an operation returned in new memory."""
        if storage_id(output) in self._derived or storage_id(output) in self._constants:
            return
        self._fresh.add(storage_id(output))
        if func is _ATEN.scalar_tensor.default:
            self._constants[storage_id(output)] = args[0]
            self._kept.append(output.untyped_storage())
        if not origins:
            return
        image = None
        if func in _CLONES and output.dtype == args[0].dtype and not output.storage_offset():
            region = self._image(args[0])
            image = Image(region, tuple(output.stride()), output.dtype) if region is not None else None
        self._derive(output, origins, f"computed by {func}", image)

    def _fill(self, dest: Destination, target: Tensor, value: Any) -> None:
        try:
            _check_plain(target, dest.dtype)
        except _Refused as reason:
            self._refuse(dest.name, f"filled with a constant: {reason}", ())
            return
        order = _outermost_first(target)
        sizes, (strides,) = merge_dims([target.shape[d] for d in order], [target.stride(d) for d in order])
        region = Region(dest.name, int(target.storage_offset()), sizes, strides)
        self._written.append((dest, Fill(region, value, target.dtype)))

    # -- where a tensor comes from

    def _origins(self, tensor: Tensor) -> frozenset[str]:
        """Names of the checkpoint tensors that ``tensor`` was made from, and `_STATE` if a destination was
        read."""
        key = storage_id(tensor)
        if key in self._sources:
            return frozenset((self._sources[key],))
        if key in self._dests:
            return frozenset((_STATE,))
        return self._derived[key].origins if key in self._derived else frozenset()

    def _image(self, tensor: Tensor) -> Region | None:
        """The region of a checkpoint tensor that ``tensor`` is a view or a plain copy of; not normalised."""
        key = storage_id(tensor)
        view = region_of("", tensor)
        if tensor.is_conj() or tensor.is_neg():
            return None
        if key in self._sources:
            name = self._sources[key]
            return replace(view, tensor=name) if tensor.dtype == self._placeholders[name].dtype else None
        image = self._derived[key].image if key in self._derived else None
        return seen_through(view, image) if image is not None and image.dtype == tensor.dtype else None

    def _derive(self, tensor: Tensor, origins: frozenset[str], how: str, image: Image | None = None) -> None:
        self._derived[storage_id(tensor)] = _Derived(origins, how, image)
        self._kept.append(tensor.untyped_storage())

    # -- refusals

    def _refuse(self, name: str, reason: str, origins: Iterable[str]) -> None:
        self._refused.setdefault(name, reason)
        self._refused_sources[name].update(set(origins) - {_STATE})

    def _refuse_all(self, reason: str) -> None:
        self._refusal = self._refusal or reason

    def _mutate(self, source: str, how: str) -> None:
        self._mutated.setdefault(source, f"the loader writes to the checkpoint tensor {source} ({how})")
        self._used.add(source)

    def _check_bindings(self) -> None:
        """Refuse names whose tensor was replaced, moved, made or dropped: no operation shows that."""
        after = _bindings(self._model)
        canonical = {name: self._dests[key].name for name, (key, *_) in self._before.items()}
        for name in self._before.keys() | after.keys():
            if self._before.get(name) == after.get(name):
                continue
            origins: frozenset[str] = frozenset()
            if name in after:
                key = after[name][0]
                origins = self._derived[key].origins if key in self._derived else origins
                origins = frozenset((self._sources[key],)) if key in self._sources else origins
            how = "replaced" if name in self._before and name in after else "made" if name in after else "removed"
            self._refuse(canonical.get(name, name), f"{name} is {how} by the loader, not written in place", origins)

    def _check_attributes(self) -> None:
        """Refuse the plan if a module keeps something of the checkpoint outside parameters and buffers."""
        for path, module in self._model.named_modules():
            for attribute, value in vars(module).items():
                if attribute in ("_parameters", "_buffers", "_modules"):
                    continue
                values = (
                    value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
                )
                for held in values:
                    if isinstance(held, Tensor) and storage_id(held) not in self._dests and self._origins(held):
                        self._refuse_all(
                            f"{path or 'the model'} keeps a tensor of the load in its attribute {attribute}"
                        )

    def _check_fills(self, dest: Destination, writes: Sequence[Placement | Fill]) -> None:
        """Fills are replayed first and need a placement beside them: refuse a destination where that isn't
        the load."""
        if not any(isinstance(write, Placement) for write in writes):
            self._refuse(dest.name, "only ever filled with a constant", ())
        earlier: list[Region] = []
        for write in writes:
            if isinstance(write, Placement):
                earlier.append(write.dest)
            elif any(may_overlap(write.dest, region, dest.frame) for region in earlier):
                self._refuse(dest.name, "filled with a constant after it was copied to", ())


def _check_plain(target: Tensor, dtype: torch.dtype) -> None:
    """`_Refused` unless ``target`` is an ordinary view that names each of its elements once."""
    if not target.is_meta:
        raise _Refused("real memory in the skeleton, which may be the live model's")
    if target.dtype != dtype or target.is_conj() or target.is_neg():
        raise _Refused("written through a view of another dtype, or conjugated or negated")
    reach = 0
    for size, stride in sorted(zip(target.shape, target.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride <= reach:
            raise _Refused("written through a view that overlaps itself")
        reach += (size - 1) * stride


def _bindings(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (storage_id(t), t.storage_offset(), tuple(t.shape), tuple(t.stride()), t.dtype)
        for name, t, _ in named_tensors(model)
    }


def _destination(name: str, tensor: Tensor, order: int) -> Destination:
    numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    dims = [d for d in _outermost_first(tensor) if tensor.shape[d] > 1]
    shape = tuple(tensor.shape[d] for d in dims)
    dense = tensor.numel() == numel and tuple(tensor.stride(d) for d in dims) == c_strides(shape)
    return Destination(name, tensor.dtype, numel, shape if dense else (numel,), order=order)


def _outermost_first(tensor: Tensor) -> list[int]:
    strides = tuple(tensor.stride())
    return sorted(range(tensor.dim()), key=lambda d: -strides[d])


def _words(origins: frozenset[str]) -> str:
    names = sorted(origins)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _flat(tensor: Tensor) -> Tensor:
    numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.detach().as_strided((numel,), (1,), 0).as_subclass(Tensor)
