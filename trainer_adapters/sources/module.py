"""Sources whose ranks hold whole tensors: one process, or data parallel with a copy on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ArgumentError
from trainer_adapters.sources.plan import Rename, TensorInfo, whole_shard
from trainer_adapters.sources.scan import ScannedSource
from trainer_adapters.sources.selection import Rules
from trainer_adapters.sources.sharded import has_partitions, refuse_fsdp, refuse_lora_layers
from trainer_adapters.sources.slice_plan import LocalShards
from trainer_adapters.sources.streams import Buffers, Stream, holds_its_tensors, module_stream, stream_of

__all__ = ["ModuleAdapter"]


class ModuleAdapter(ScannedSource):
    """A source for tensors that each rank holds whole.

    `model` is one of
    - an unsharded `torch.nn.Module`: its parameters, frozen ones included, and its buffers, by state-dict
      names. Weights that share memory are sent once (`Manifest.tied`); `_tied_weights_keys` of transformers
      says which name travels, and weights that it calls tied but that are two tensors are refused;
    - a dict, or a list or tuple of `(name, tensor)`: read again for each update; tensors that share memory are tied;
    - any other mapping or iterable that can be iterated repeatedly (also a subclass of dict or list that iterates in its own
      way), or a callable that returns a fresh iterator of `(name, tensor)`: one tensor is held at a time. `manifest()` runs
      through it once and `slices()` on every update; all passes must yield the same names, shapes and dtypes in the same order.
      It must not use collectives, because a rank whose own part of an update fails stops in the middle: `ExportAdapter` takes
      those. Tied tensors are not recognised, because they look like a buffer that is reused.

    `dtype_rules`: see `DtypeRules`. `include_buffers`: "persistent" (those in the state dict), "all" or
    "none". `rename`: a function from a name to the name in the manifest, or a mapping of the names that differ; None as the
    new name leaves the tensor out. It receives names without `module.` of (Distributed)DataParallel and AveragedModel,
    `_orig_mod.` of torch.compile and `_checkpoint_wrapped_module.` of activation checkpointing. `include` and `exclude` leave
    tensors out by patterns on the new names (see `NameFilter`). A model of transformers has the names and tensors that its
    `save_pretrained` writes (`trainer_adapters.sources.conversion`); `rename` receives the names that it has in memory.

    If several ranks hold the same copy (data parallel), each sends about the same number of bytes: `rank` of `world_size`, by
    default those of `torch.distributed` if it is initialised, else 0 of 1. With `only_rank_0`, rank 0 sends everything.

    Raises `ArgumentError` (a TypeError) for a model of another kind, and `ManifestMismatch`, which names them, for tensors that
    are on the meta device, sparse, freed, of a dtype that can't travel or of a subclass with inner tensors (such as DTensor).
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Stream,
        *,
        dtype_rules: Rules = None,
        include_buffers: Buffers = "persistent",
        rename: Rename = None,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
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
            refuse_fsdp(module)
            _refuse_partitions(module)
            refuse_lora_layers(module, rename)
        in_memory = module is not None or holds_its_tensors(model)
        super().__init__(
            module_stream(module, include_buffers) if module is not None else stream_of(model),
            module=module,
            in_memory=in_memory,
            dtype_rules=dtype_rules,
            rename=rename,
            include=include,
            exclude=exclude,
        )
        self._rank = rank
        self._world_size = world_size
        self._only_rank_0 = only_rank_0

    def _local_shards(self, info: TensorInfo) -> LocalShards:
        rank, world_size = self._position()
        whole = (whole_shard(info.shape),)
        if self._only_rank_0:
            return LocalShards(whole if rank == 0 else ())
        return LocalShards(whole, tuple(range(world_size)), rank)

    def _position(self) -> tuple[int, int]:
        if self._rank is not None and self._world_size is not None:
            return self._rank, self._world_size
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1


def _refuse_partitions(module: torch.nn.Module) -> None:
    if has_partitions(module):
        raise ArgumentError("this module is partitioned by DeepSpeed's ZeRO-3: use DeepSpeedAdapter")
