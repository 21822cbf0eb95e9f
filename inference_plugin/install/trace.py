"""Records a placement plan from one run of the engine's own `load_weights`.

The load runs on a *skeleton*: a second instance of the model's class on the `meta` device, never the live model. Every
`aten.copy_` from a checkpoint tensor into a parameter or buffer becomes a `Placement`. Any other write to a destination
makes that destination *refused*, with the reason in words: the engine's own loader then has to fill it. A write that
cannot be attributed to one destination invalidates the whole plan. `proof.prove_plan` compares the plan with a real load.

Tracing cannot see loaders that copy in other threads, that branch on the device, or that read memory by its address:
the proof finds those.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from inference_plugin.install.coverage import Destination
from inference_plugin.install.findings import LoadFindings
from inference_plugin.install.graph import Boundary
from inference_plugin.install.plan import Fill, LoadWeights, Placement, PlacementPlan, TensorInfo
from inference_plugin.install.storages import named_tensors, storage_id, tensors_among, written_tensors
from inference_plugin.install.traced import (
    NOTHING,
    OWN,
    CopiedRegion,
    Derived,
    Joined,
    Refused,
    bindings,
    check_plain,
    destination,
    floats_among,
    names_among,
    outermost_first,
    plain_numbers,
    reading,
    sent_among,
)
from inference_plugin.wire.errors import lacks_resources
from inference_plugin.wire.geometry import Region, merge_dims, region_of, through_copy

__all__ = ["trace_plan"]


def trace_plan(
    model: nn.Module, load_weights: LoadWeights, tensors: Sequence[TensorInfo], boundary: Boundary | None = None
) -> PlacementPlan:
    """Records what `load_weights` does to `model`, a skeleton, with checkpoint tensors like `tensors`. `boundary`: what is no
    part of the model, where numbers are looked for that the loader keeps.

    If the loader raises, the plan holds the error as its refusal. Raises ValueError if a name occurs twice.
    """
    if len({name for name, _, _ in tensors}) != len(tensors):
        raise ValueError("a checkpoint name occurs twice in tensors")
    try:
        recorder = _Recorder(model, tensors, boundary or Boundary())
    except (NotImplementedError, RuntimeError) as error:  # sparse or wrapper tensors have no storage
        return PlacementPlan(refusal=f"the model holds a tensor without a plain storage: {error}")
    recorder.record(load_weights)
    return recorder.findings.plan()


_ATEN = torch.ops.aten

_CLONES = {_ATEN.clone.default, _ATEN._to_copy.default}
_EMPTY = {
    *(_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default),
    *(_ATEN.new_empty.default, _ATEN.new_empty_strided.default),
}

_numbering = itertools.count()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """Watches one load. Notes tracked copies instead of making them; all other operations run, on meta tensors."""

    def __init__(self, model: nn.Module, tensors: Sequence[TensorInfo], boundary: Boundary) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._placeholders = {n: torch.empty(shape, dtype=dtype, device="meta") for n, shape, dtype in tensors}
        self._sources = {storage_id(tensor): name for name, tensor in self._placeholders.items()}
        self._dests: dict[int, Destination] = {}
        for name, tensor, is_parameter in named_tensors(model):
            dest = self._dests.setdefault(storage_id(tensor), destination(name, tensor))
            if is_parameter and region_of(name, tensor) not in (r.named(name) for r in dest.parameters.values()):
                dest.parameters[name] = region_of(name, tensor)
        self._before = bindings(model)
        # Storages are identified by address: none may be freed and reused by another tensor while the load runs.
        self._kept: list[Any] = [tensor.untyped_storage() for _, tensor, _ in named_tensors(model)]
        self._derived: dict[int, Derived] = {}
        self._fresh: set[int] = set()
        self._unfilled: dict[int, int] = {}
        """Memory that the loader took as it came: at least how many bytes of it are unwritten, by storage."""
        self._constants: dict[int, Any] = {}
        self._numbers: dict[float, Tensor] = {}
        """The tensor of one element that each number stands for, by the number that the loader read."""
        self._unused_numbers: set[float] = set()
        self._boundary = boundary
        self._floats_before: dict[tuple[str, str], tuple[float, ...]] = {}
        """The numbers that modules held before the loader read any, by place."""
        self._handed_out = ""
        self.findings = LoadFindings(list(self._dests.values()), list(self._placeholders))

    def record(self, load_weights: LoadWeights) -> None:
        def placeholders() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._placeholders.items():
                self._handed_out = name
                yield name, tensor

        try:
            with torch.no_grad(), self:
                load_weights(placeholders())
        except Exception as error:  # any exception of a loader refuses the plan
            if lacks_resources(error):
                raise
            last = f" (the last tensor handed out was {self._handed_out})" if self._handed_out else ""
            self.findings.broke(f"the loader raised {type(error).__name__}: {error}{last}", self._handed_out, error)
            return
        self._check_bindings()
        self._check_attributes()
        if origins := frozenset().union(*(self._origins(self._numbers[number]) for number in self._unused_numbers)):
            self.findings.refuse_all(reading(_ATEN._local_scalar_dense.default, origins))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.copy_.default and self._copy(args[0], args[1]):
            return args[0]
        inputs = tensors_among((*args, *kwargs.values()))
        known = {storage_id(tensor) for tensor in inputs}
        written = written_tensors(func, args, kwargs)
        for target in written:
            self._written_to(target)
        origins = frozenset().union(*map(self._origins, inputs)) if inputs else frozenset()
        if func is _ATEN._local_scalar_dense.default and self._is_number(args[0]):
            return self._number(args[0])
        if origins and torch.Tag.data_dependent_output in getattr(func, "tags", ()):
            self.findings.refuse_all(reading(func, origins))
        for target in written:
            self._write(func, target, args, origins)
            if storage_id(target) in self._dests and not target.is_meta:
                return target  # real memory in a skeleton may be the live model's: never written here
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if origins:  # note it here: a loader may catch the exception and do something else
                self.findings.untraceable(f"{func} on {names_among(origins)} cannot be traced: {error}", error)
            raise
        for output in tensors_among((result,)):
            if storage_id(output) not in known:
                self._made(func, output, args, origins)
        return result

    # -- what an operation does

    def _copy(self, target: Tensor, source: Tensor) -> bool:
        """Notes a copy. Returns whether it is tracked, so that it must not be made."""
        origins = self._origins(source)
        into = storage_id(target)
        self._written_to(target)
        if into not in self._dests and into not in self._sources and not origins:
            return False
        source = source.expand(target.shape)  # raises what the copy would raise
        if into in self._sources:
            self.findings.mutated(self._sources[into], "copy_")
        elif not target.numel():
            self.findings.used(sent_among(origins))
        elif into in self._dests:
            self._copy_to(self._dests[into], target, source, origins)
        elif into in self._derived or into in self._fresh:
            read = self._region_shown(source)
            whole = target.nbytes == target.untyped_storage().nbytes() and target.dtype == source.dtype
            plain = read is not None and whole and into not in self._derived
            copied = CopiedRegion(read, tuple(target.stride()), target.dtype) if read is not None and plain else None
            self._derive(target, origins | self._origins(target), "copies into a tensor of the loader's own", copied)
        else:
            self.findings.wrote_elsewhere(f"the loader copies {names_among(origins)}", into)
        return True

    def _copy_to(self, dest: Destination, target: Tensor, source: Tensor, origins: frozenset[str]) -> None:
        if read := origins - sent_among(origins):
            if NOTHING in read:
                self.findings.made_of_nothing(dest.name)
            made_of = self.findings.reads_back(dest, [name.removeprefix(OWN) for name in read - {NOTHING}])
            how = NOTHING if NOTHING in read else "what its module holds"
            self.findings.refuse(dest.name, f"computed from {how}", made_of | sent_among(origins))
            return
        if storage_id(source) in self._constants:
            self._fill(dest, target, self._constants[storage_id(source)])
            return
        if (derived := self._derived.get(storage_id(source))) is not None and (parts := derived.parts_of(source)):
            for dim, start, part in parts:
                self._copy_to(dest, target.narrow(dim, start, part.shape[dim]), part, self._origins(part))
            return
        try:
            if not origins:
                raise Refused("copied from a tensor that doesn't come from the checkpoint")
            placement = self._placement(dest, target, source)
        except Refused as reason:
            self.findings.refuse(dest.name, str(reason), sent_among(origins))
        else:
            self.findings.wrote(dest, placement)

    def _placement(self, dest: Destination, target: Tensor, source: Tensor) -> Placement:
        if source.dtype != target.dtype:
            for name in self._origins(source):
                if name in self._placeholders:
                    self.findings.cast(name, source.dtype, target.dtype, dest.name)
            raise Refused(f"cast from {source.dtype} to {target.dtype}")
        check_plain(target, dest.dtype)
        read = self._region_shown(source)
        if read is None:
            derived = self._derived.get(storage_id(source))
            raise Refused(derived.how if derived else "read through a view of another dtype, or conjugated or negated")
        order = outermost_first(target)
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
        """Notes any write except a tracked copy."""
        into = storage_id(target)
        if into in self._sources:
            self.findings.mutated(self._sources[into], str(func))
        elif into in self._dests:
            dest = self._dests[into]
            if func is _ATEN.fill_.Scalar and args[1] in self._numbers:
                read = self._numbers[args[1]]
                self._unused_numbers.discard(args[1])
                self._copy_to(dest, target, read.reshape(()).expand(target.shape), self._origins(read))
            elif func is _ATEN.zero_.default:
                self._fill(dest, target, 0)
            elif func is _ATEN.fill_.Scalar:
                self._fill(dest, target, args[1])
            elif func is _ATEN.fill_.Tensor and storage_id(args[1]) in self._constants:
                self._fill(dest, target, self._constants[storage_id(args[1])])
            else:
                if NOTHING in origins:
                    self.findings.made_of_nothing(dest.name)
                self.findings.refuse(dest.name, f"written by {func}", sent_among(origins))
        elif into in self._fresh or into in self._derived:
            if origins:
                self._derive(target, origins, f"computed by {func}")
        elif origins or (func is _ATEN.fill_.Scalar and args[1] in self._numbers):
            self.findings.wrote_elsewhere(f"{func} writes {names_among(origins) or 'a number of the checkpoint'}", into)
        self._constants.pop(into, None)

    def _made(self, func: Any, output: Tensor, args: Sequence[Any], origins: frozenset[str]) -> None:
        """Notes a tensor that an operation returned in new memory."""
        if storage_id(output) in self._derived or storage_id(output) in self._constants:
            return
        self._fresh.add(storage_id(output))
        if func in _EMPTY:
            self._unfilled[storage_id(output)] = output.untyped_storage().nbytes()
            self._kept.append(output.untyped_storage())
            return
        if func is _ATEN.scalar_tensor.default:
            self._constants[storage_id(output)] = args[0]
            self._kept.append(output.untyped_storage())
        if not origins:
            return
        copied = None
        if func in _CLONES and output.dtype == args[0].dtype and not output.storage_offset():
            region = self._region_shown(args[0])
            copied = CopiedRegion(region, tuple(output.stride()), output.dtype) if region is not None else None
        self._derive(output, origins, f"computed by {func}", copied)
        if func is _ATEN.cat.default:
            self._join(output, args[0], args[1] if len(args) > 1 else 0)

    def _join(self, output: Tensor, parts: Sequence[Tensor], dim: int) -> None:
        """Notes that a tensor is a concatenation, if all its parts are copies of checkpoint tensors."""
        if all(part.dim() == output.dim() and self._region_shown(part) is not None for part in parts):
            self._derived[storage_id(output)].joined = Joined(output.shape, dim % output.dim(), tuple(parts))

    def _fill(self, dest: Destination, target: Tensor, value: Any) -> None:
        try:
            check_plain(target, dest.dtype)
        except Refused as reason:
            self.findings.refuse(dest.name, f"filled with a constant: {reason}", ())
            return
        order = outermost_first(target)
        sizes, (strides,) = merge_dims([target.shape[d] for d in order], [target.stride(d) for d in order])
        region = Region(dest.name, int(target.storage_offset()), sizes, strides)
        self.findings.wrote(dest, Fill(region, value, target.dtype))

    def _is_number(self, tensor: Tensor) -> bool:
        """Whether this is one element of a checkpoint tensor, all of it or all of a rank's part of it, of a dtype that holds
        the numbers of `_number`."""
        has_room = tensor.is_floating_point() or tensor.dtype in (torch.int32, torch.int64)
        return storage_id(tensor) in self._sources and has_room and tensor.numel() == 1

    def _number(self, tensor: Tensor) -> float:
        """A number that no other load was given, in place of the value of `tensor`. If the loader fills something with it, this
        is a copy. If it fills nothing with it, the plan is refused, because the number may decide something. The number is
        negative, and numbers in the proof are not: a loader that treats them differently fails the trace or the proof."""
        if not self._numbers:
            self._floats_before = {at: floats_among(found) for at, found in plain_numbers(self._model, self._boundary)}
        step = next(_numbering)
        number = -731.0 - step * 2.0**-20 if tensor.is_floating_point() else -731_000_000 - step
        self._numbers[number] = tensor
        self._unused_numbers.add(number)
        return number

    # -- where a tensor comes from

    def _origins(self, tensor: Tensor) -> frozenset[str]:
        """Names of the checkpoint tensors and of the model's storages (after `OWN`) from which `tensor` was made."""
        return self._origins_at(storage_id(tensor))

    def _origins_at(self, key: int) -> frozenset[str]:
        if key in self._sources:
            self.findings.touched(self._sources[key])
            return frozenset((self._sources[key],))
        if key in self._dests:
            return frozenset((OWN + self._dests[key].name,))
        made_of = self._derived[key].origins if key in self._derived else frozenset[str]()
        return made_of | {NOTHING} if key in self._unfilled else made_of

    def _written_to(self, target: Tensor) -> None:
        key = storage_id(target)
        if key in self._unfilled:
            self._unfilled[key] -= target.nbytes
            if self._unfilled[key] <= 0:
                del self._unfilled[key]

    def _region_shown(self, tensor: Tensor) -> Region | None:
        """The region of a checkpoint tensor of which `tensor` is a view or a plain copy; not normalised."""
        key = storage_id(tensor)
        view = region_of("", tensor)
        if tensor.is_conj() or tensor.is_neg():
            return None
        if key in self._sources:
            name = self._sources[key]
            return view.named(name) if tensor.dtype == self._placeholders[name].dtype else None
        copied = self._derived[key].copied if key in self._derived else None
        return (
            through_copy(view, copied.region, copied.strides)
            if copied is not None and copied.dtype == tensor.dtype
            else None
        )

    def _derive(self, tensor: Tensor, origins: frozenset[str], how: str, copied: CopiedRegion | None = None) -> None:
        if storage_id(tensor) in self._unfilled:
            origins -= {NOTHING}  # the rest may be written before anything reads it
        self._derived[storage_id(tensor)] = Derived(origins, how, copied)
        self._kept.append(tensor.untyped_storage())

    def _check_bindings(self) -> None:
        """Refuses names whose tensor was replaced, moved, made or removed: no traced operation shows that."""
        after = bindings(self._model)
        canonical = {name: self._dests[key].name for name, (key, *_) in self._before.items()}
        for name in self._before.keys() | after.keys():
            if self._before.get(name) == after.get(name):
                continue
            origins = self._origins_at(after[name][0]) if name in after else frozenset[str]()
            how = "replaced" if name in self._before and name in after else "made" if name in after else "removed"
            self.findings.refuse(
                canonical.get(name, name), f"{name} is {how} by the loader, not written in place", sent_among(origins)
            )

    def _check_attributes(self) -> None:
        """Refuses the plan if a module keeps tensors of the checkpoint, or their values, outside parameters and buffers."""
        if self._numbers:
            held = dict(plain_numbers(self._model, self._boundary))
            self.findings.read_numbers(held)
            for place, numbers in held.items():
                if floats_among(numbers) != self._floats_before.get(place, ()):
                    self._unused_numbers.update(self._numbers)
                    self.findings.kept(*place)
        for path, module in self._model.named_modules():
            for attribute, value in vars(module).items():
                if attribute in ("_parameters", "_buffers", "_modules"):
                    continue
                values = (
                    value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
                )
                for held in values:
                    if isinstance(held, Tensor) and storage_id(held) not in self._dests and self._origins(held):
                        self.findings.refuse_all(
                            f"{path or 'the model'} keeps a tensor of the load in its attribute {attribute}"
                        )
