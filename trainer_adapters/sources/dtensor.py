"""DTensors: each rank sends its shards from where they lie, for any meshes and placements. Nothing is gathered.

Private parts of torch used here: a DTensor's `_spec` and `_local_tensor` (`to_local()` adds a record for autograd to each), and
`FSDPModule._get_fsdp_state()`, whose groups know whether parameters are sharded at the moment.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias, Unpack

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from inference_plugin.wire.errors import ArgumentError, ManifestMismatch, first_few
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.sources.inspection import Inspection, Memory, mark_of, why_not_plain
from trainer_adapters.sources.placements import Mesh, Spread
from trainer_adapters.sources.plan import Dims, Rename, TensorInfo, whole_shard
from trainer_adapters.sources.scan import ScannedSource, ScanOptions
from trainer_adapters.sources.selection import Rules
from trainer_adapters.sources.sharded import refuse_lora_layers
from trainer_adapters.sources.slice_plan import LocalShards
from trainer_adapters.sources.streams import Buffers, holds_its_tensors, module_stream, stream_of

__all__ = ["DTensorAdapter", "ShardedSource"]

Named: TypeAlias = Mapping[str, torch.Tensor] | Sequence[tuple[str, torch.Tensor]]
"""Tensors by name, as a state dict has them."""

FREED_HINT = (
    "call reshard() on the modules named here (the root's covers only parameters of its own), or update "
    "after backward(), which reshards: after a forward pass alone the root stays unsharded"
)


class ShardedSource(ScannedSource):
    """The common base of sources of DTensors: inspects them, and finds the boxes of this rank's shards."""

    def __init__(
        self, model: torch.nn.Module | Named, *, include_buffers: Buffers = "persistent", **options: Unpack[ScanOptions]
    ) -> None:
        module = model if isinstance(model, torch.nn.Module) else None
        if module is not None:
            if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
                raise ArgumentError("parts of this model are sharded by FullyShardedDataParallel: use FSDPAdapter")
            refuse_lora_layers(module, options.get("rename"))
        elif not holds_its_tensors(model):
            raise ArgumentError(
                f"a {type(model).__name__} may make its tensors anew each time it is read",
                hint="give a module, a dict or a list of pairs; ExportAdapter takes functions that return DTensors",
            )
        stream = stream_of(model) if module is None else module_stream(module, include_buffers)
        super().__init__(stream, module=module, in_memory=True, **options)
        self._mesh = cache(Mesh)  # queries of a mesh are slow
        self._spread = cache(Spread.of)  # models repeat their shapes
        self._known: dict[int, tuple[Any, Dims, Dims, Any, str]] = {}

    def _scan(self, keep: list[Any] | None = None) -> tuple[TensorInfo, ...]:
        infos = super()._scan(keep)
        if len(self._known) > 2 * len(infos):  # mostly of parameters that no longer exist
            self._known.clear()
        # The planned parameters lay in shards: only a different model may have unsharded ones at the moment.
        is_new = self._plan is None or infos != self._plan.infos
        if is_new and self._module is not None and (unsharded := _unsharded(self._module)):
            raise ManifestMismatch(
                f"parameters are unsharded at the moment in {first_few(unsharded)}", hint=FREED_HINT, side="trainer"
            )
        return infos

    def _inspect(self, thing: Any) -> Inspection:
        if not isinstance(thing, DTensor):
            return super()._inspect(thing)
        local = thing._local_tensor
        spec = thing._spec
        known = self._known.get(id(spec))
        if known is None or known[0] is not spec or known[1] != local.shape:
            known = self._known[id(spec)] = (spec, local.shape, *self._spread_of(thing, local))
        _, _, shape, spread, problem = known
        if not problem and spread.mesh.coordinate is not None:
            problem = why_not_plain(local)
        return Inspection(shape, thing.dtype, spread, problem, None if problem else self._memory_of(thing))

    def _memory_of(self, thing: DTensor) -> Hashable:
        """Equal for tied DTensors: in a module the same one, in a state dict two that share their shard's memory."""
        local = thing._local_tensor
        if self._module is not None or not local.numel():
            return id(thing)
        return Memory(local.device, local.data_ptr(), (thing.shape, thing.placements, local.dtype, local.stride()))

    def _mark(self, thing: Any) -> Hashable:
        if not isinstance(thing, DTensor):
            return super()._mark(thing)
        local = mark_of(thing._local_tensor)
        return None if local is None else (id(thing), thing.dtype, thing._spec, local)

    def _spread_of(self, thing: DTensor, local: torch.Tensor) -> tuple[Dims, Any, str]:
        """The DTensor's shape, its spread over the mesh, and why it can't be sent."""
        mesh = self._mesh(thing.device_mesh, tuple(thing.placements))
        shape = tuple(thing.shape)
        if problem := mesh.problem or self._problem_of(mesh):
            return shape, mesh, problem
        spread = self._spread(mesh, shape, tuple(local.shape))
        return shape, spread, spread.problem

    def _local(self, thing: Any) -> torch.Tensor:
        if not isinstance(thing, DTensor):
            return super()._local(thing)
        local = thing._local_tensor
        return local.detach() if local.requires_grad else local

    def _problem_of(self, mesh: Mesh) -> str:
        """Why this source can't send a tensor on this mesh; "" if it can."""
        return ""


class DTensorAdapter(ShardedSource):
    """A source for a model of DTensors: tensor-parallel plans, `fully_shard` over them, expert-parallel meshes. It takes the
    module, or its tensors by name (a state dict, or a list of pairs), which have the same names on all ranks.

    Every rank makes one and sends its own shards, which are views of the parameters' memory. Meshes and placements may
    differ from parameter to parameter; `_StridedShard` and uneven shards are supported. The ranks that hold the same copy
    according to a mesh (`Replicate`) each send a share of its bytes; a few of these copies are compared like the following.

    Copies that no mesh describes may differ after training: each tensor-parallel rank holds plain tensors and parameters on
    the data-parallel submesh, and nothing sums their gradients over these ranks. The copy of the lowest rank is sent. The
    others' digests are compared with it in updates 1, 2, 4, 8, ... and in `verify`; a difference is logged as a warning.

    `process_group`: the trainer's ranks, as for `SyncManager`; default all of torch.distributed. The other options are as in
    `ModuleAdapter`, the parameters' dtype as in `FSDPAdapter`.

    Raises TypeError for a model that FSDP1 wraps, and `ManifestMismatch`, which names them, for parameters that have pending
    sums (`Partial`) or an unknown kind of placement, or that are unsharded at the moment.
    """

    def __init__(
        self,
        model: torch.nn.Module | Named,
        *,
        dtype_rules: Rules = None,
        include_buffers: Buffers = "persistent",
        rename: Rename = None,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            model,
            dtype_rules=dtype_rules,
            include_buffers=include_buffers,
            rename=rename,
            include=include,
            exclude=exclude,
        )
        self._ranks = tuple(sorted(dist.get_process_group_ranks(process_group or dist.group.WORLD)))

    def copies(self) -> Iterator[LocalSlice]:
        """Copies that no mesh describes, and a few that a mesh describes: tensor-parallel ranks may each compute the gradient by
        themselves, and then the last bits may differ."""
        yield from super().copies()
        yield from super().kept_equal()

    def kept_equal(self) -> Iterator[LocalSlice]:
        return iter(())

    def _local_shards(self, info: TensorInfo) -> LocalShards:
        if not isinstance(info.spread, Spread):
            role: Any = "send" if dist.get_rank() == self._ranks[0] else "copy"
            return LocalShards((whole_shard(info.shape),), role=role)
        mesh = info.spread.mesh
        # Each submesh of one root mesh holds a copy; the submesh with the lowest rank sends.
        if min(set(mesh.family) & set(self._ranks), default=-1) in mesh.ranks:
            return info.spread.local_shards()
        return LocalShards(info.spread.shards if mesh.is_first_copy else (), role="copy")


def _unsharded(model: torch.nn.Module) -> list[str]:
    """Names of the FSDP2 modules whose parameters are unsharded at the moment."""
    return [
        name or "the root"
        for name, part in model.named_modules()
        if isinstance(part, FSDPModule)
        and any(parameter.sharded_state.name != "SHARDED" for group in _groups(part) for parameter in group.fsdp_params)
    ]


def _groups(part: FSDPModule) -> list[Any]:
    state: Any = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
