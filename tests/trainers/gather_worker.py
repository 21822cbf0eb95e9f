"""The cases of `test_gather.py`, run by torchrun (see `observing.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard

from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest
from tests.support.memory import peak_bytes
from tests.trainers.dtensor_worker import parallel_qwen3, two_dimensions
from tests.trainers.fsdp1_worker import CPU, Images, wrap
from tests.trainers.fsdp_worker import Odd, shard_layers, shard_odd
from tests.trainers.observing import Result, main, observe, refused, tiny_qwen3, tiny_qwen3_moe
from trainer_adapters import (
    DTensorAdapter,
    ExportAdapter,
    FSDPAdapter,
    LocalSlice,
    ModuleAdapter,
    SyncManager,
    WeightSource,
)
from trainer_adapters.sources.gather import gathered

MIB = 1 << 20


def both_ways(source: WeightSource, bucket_bytes: int) -> Result:
    """What the ranks would write, and what each rank has in the end when all of it is gathered."""
    result = observe(source)
    whole = {name: tensor.clone() for name, tensor in gathered(source, bucket_bytes=bucket_bytes)}
    return {**result, "gathered": whole}


def fsdp_in_small_buckets() -> Result:
    return both_ways(FSDPAdapter(shard_layers(tiny_qwen3()), dtype_rules={"*": torch.bfloat16}), 1000)


def odd_parts_in_tiny_buckets() -> Result:
    return both_ways(FSDPAdapter(shard_odd(Odd()), exclude=["ignored"]), 7)


def hybrid_in_one_bucket() -> Result:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return both_ways(FSDPAdapter(shard_odd(Odd(), mesh=mesh)), 8 * MIB)


def flat_parameters() -> Result:
    return both_ways(FSDPAdapter(wrap(tiny_qwen3(), use_orig_params=False)), 4096)


def two_dimensions_of_shards() -> Result:
    return both_ways(DTensorAdapter(parallel_qwen3(two_dimensions())), 4096)


def stacked_experts_by_columns() -> Result:
    options = {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 3 else None}
    return both_ways(FSDPAdapter(shard_layers(tiny_qwen3_moe(), **options)), 4096)


def summoned_units() -> Result:
    model = Images()
    model.second = FullyShardedDataParallel(model.second, device_id=CPU, use_orig_params=True)
    model = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True, ignored_modules=[model.ignored])
    return both_ways(FSDPAdapter(model), 128)


def one_at_a_time() -> Result:
    """A stream of tensors of every kind: the iterator holds one, and each rank sends a share."""
    torch.manual_seed(0)
    kinds = [torch.float64, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]
    tensors = [(torch.randn(5, 3) * 3).to(kind) for kind in kinds]
    tensors += [torch.tensor(3.5), torch.empty(0, 2), torch.randn(600, 500), torch.empty(3, 0)]
    return both_ways(ModuleAdapter(lambda: ((f"t{i}", t.clone()) for i, t in enumerate(tensors))), 100_000)


class Refilled(ModuleAdapter):
    """The ranks make the first tensor together; each then fills one buffer with the others, one after the other."""

    def made_together(self) -> frozenset[int]:
        return frozenset([0])

    def slices(self) -> Iterator[LocalSlice]:
        buffer = torch.empty(0)
        for item in super().slices():
            if item.box.tensor:
                buffer.resize_(item.tensor.shape).copy_(item.tensor)
            yield LocalSlice(item.box, buffer if item.box.tensor else item.tensor)


def some_together_and_the_others_in_one_buffer() -> Result:
    torch.manual_seed(0)
    return both_ways(Refilled({f"t{i}": torch.randn(600, 600) for i in range(5)}), 100_000)


# --- exports that the ranks make together --------------------------------------


def export_of(model: nn.Module, yields: Callable[[int], bool]) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """As converters do it: every rank gathers every tensor, in step; tensor i is yielded where `yields(i)`."""

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, parameter) in enumerate(model.named_parameters()):
            whole = parameter.full_tensor()
            if yields(i):
                yield name, whole

    return export


def exported(yields: Callable[[int], bool], *, made: Callable[[Any], Any] = iter) -> Result:
    """`made`: what the function returns, of its pairs."""
    model = shard_layers(tiny_qwen3())
    export = export_of(model, yields)
    options: dict[str, Any] = {
        "dtype_rules": {"*norm.weight": torch.float32, "*": torch.bfloat16},
        "exclude": ["*.1.*"],
    }
    result = both_ways(ExportAdapter(lambda: made(export()), **options), 100_000)
    ours = observe(FSDPAdapter(model, **options))
    return {**result, "same": sorted_manifest(result) == sorted_manifest(ours), "sent": len(result["slices"])}


def sorted_manifest(seen: Result) -> list[tuple[Any, ...]]:
    manifest = msgspec.msgpack.decode(seen["manifest"], type=Manifest)
    return sorted((spec.name, spec.dtype, spec.shape) for spec in manifest.tensors)


def exported_on_all_ranks() -> Result:
    return exported(lambda i: True)


def exported_on_rank_0() -> Result:
    """A mapping, as torch's `get_model_state_dict` with `full_state_dict=True` makes it: the other ranks' are empty."""
    return exported(lambda i: dist.get_rank() == 0, made=dict)


def exported_by_stages() -> Result:
    """The first tensors come on two of the ranks, the later ones on the others."""
    return exported(lambda i: (i < 6) == (dist.get_rank() < 2))


def exported_in_the_engines_dtypes() -> Result:
    """Each rank sends a part of the tensor as long as it is in float32; in bfloat16 it is too small to be divided."""
    torch.manual_seed(0)
    wide = torch.randn(700, 500)
    source = ExportAdapter(lambda: [("wide", wide)], dtype_rules="engine")
    assert source.adopt_dtypes({"*": "bfloat16"})
    return both_ways(source, 100_000)


def export_is_wrong() -> Result:
    """Rank 1's export, at first and later."""
    second = dist.get_rank() == 1
    twice = [("a", torch.ones(2)), ("b", torch.ones(2)), ("a" if second else "c", torch.ones(2))]
    meta = [("a", torch.ones(2, device="meta" if second else "cpu"))]
    other = [("a", torch.ones(3 if second else 2))]
    seen = {
        "twice": refused(lambda: ExportAdapter(lambda: twice)),
        "meta": refused(lambda: ExportAdapter(lambda: meta)),
        "other": refused(lambda: ExportAdapter(lambda: other)),
    }
    pairs = [("a", torch.ones(2)), ("b", torch.ones(3))]
    source = ExportAdapter(lambda: pairs)
    for what, wrong in (("less", pairs[:1]), ("more", [*pairs, pairs[0]]), ("grown", [("a", torch.ones(4)), pairs[1]])):
        whole, pairs = pairs, wrong
        seen[what] = refused(lambda: drain(source.slices()))
        pairs = whole
    kept = pairs[1][1].clone()
    pairs[1][1].untyped_storage().resize_(0)  # as an offloader moves it away
    seen["freed"] = refused(lambda: drain(source.slices()))
    pairs[1][1].untyped_storage().resize_(kept.nbytes)
    pairs[1][1].copy_(kept)
    seen["again"] = refused(lambda: drain(source.slices()))
    return seen


def export_goes_on_when_nobody_takes() -> Result:
    """Rank 1 stops after its first slice; the others' collectives end, and the next export works."""
    source = ExportAdapter(export_of(shard_layers(tiny_qwen3()), lambda i: True))
    slices = source.slices()
    taken = [next(slices)] if dist.get_rank() == 1 else list(slices)
    slices.close()
    return {"taken": len(taken), "all": len(source.claims()), "next": len(list(source.slices()))}


def a_rank_fails_before_its_adapter() -> Result:
    """Rank 1 never makes its adapter; then all ranks make one."""
    group = dist.new_group(timeout=timedelta(seconds=20))

    def made() -> None:
        ExportAdapter(lambda: [("a", torch.ones(4))], process_group=group)

    alone = refused(made) if dist.get_rank() != 1 else {}
    dist.barrier()
    return {"alone": alone, "together": refused(made)}


def a_rank_makes_its_manager_meanwhile() -> Result:
    """Rank 1 makes them in another order than the other ranks."""
    group = dist.new_group(timeout=timedelta(seconds=20))

    def adapter() -> None:
        ExportAdapter(lambda: [("a", torch.ones(4))], process_group=group)

    def manager() -> None:
        SyncManager(process_group=group, timeout_s=20)

    crosswise = refused(manager if dist.get_rank() == 1 else adapter)
    return {"crosswise": crosswise, "together": refused(adapter)}


def gathering_goes_on_when_nobody_takes() -> Result:
    source = FSDPAdapter(shard_layers(tiny_qwen3()))
    group = dist.new_group(timeout=timedelta(seconds=120))
    tensors = gathered(source, bucket_bytes=4096, process_group=group)
    taken = [next(tensors)] if dist.get_rank() == 1 else list(tensors)
    tensors.close()  # type: ignore[attr-defined]
    return {"taken": len(taken), "next": len(list(gathered(source, process_group=group)))}


# --- ranks that fail ----------------------------------------------------------


class Faulty(ModuleAdapter):
    """Rank 1 does one thing wrong; the tensors are such that every rank has a part of every bucket."""

    def __init__(self, fault: str) -> None:
        self.fault = fault if dist.get_rank() == 1 else ""
        tensors = {f"t{i}": torch.full((600, 600), float(i)) for i in range(6)}
        super().__init__(tensors | ({"more": torch.ones(2)} if self.fault == "another model" else {}))

    def claims(self) -> tuple[Box, ...] | None:
        claims = super().claims() or ()
        return claims[:-1] if self.fault == "claims too little" else claims

    def slices(self) -> Iterator[LocalSlice]:
        for i, item in enumerate(super().slices()):
            if i == 1 and self.fault == "raises":
                raise RuntimeError("out of memory, says rank 1")
            if i == 1 and self.fault == "skips":
                continue
            yield item


def stages_as_modules() -> Result:
    """Layers of a pipeline, under their numbers in the model, on two of the ranks each."""
    stage = nn.Linear(3, 2 + dist.get_rank() // 2)
    tensors = {f"layers.{dist.get_rank() // 2}.{name}": one for name, one in stage.named_parameters()}
    seen = refused(lambda: [None for _ in gathered(ModuleAdapter(tensors))])
    return {**seen, "as hinted": [list(one.shape) for _, one in gathered(ExportAdapter(tensors.items))]}


def fails(fault: str) -> Callable[[], Result]:
    def case() -> Result:
        source = Faulty(fault)
        seen = refused(lambda: [None for _ in gathered(source, bucket_bytes=100_000)])
        healthy = sum(int(tensor[0, 0]) for _, tensor in gathered(Faulty("")))
        return {**seen, "next": healthy}

    case.__name__ = fault
    return case


def no_memory() -> Result:
    """Rank 1 has no memory for the largest tensor."""
    empty = torch.empty

    def full(*sizes: Any, **options: Any) -> torch.Tensor:
        if sizes == (600 * 600 * 4,):
            raise torch.OutOfMemoryError("out of memory, says rank 1")
        return empty(*sizes, **options)

    if dist.get_rank() == 1:
        torch.empty = full  # type: ignore[assignment]
    try:
        seen = refused(lambda: list(gathered(Faulty(""))))
    finally:
        torch.empty = empty
    return {**seen, "next": sum(int(tensor[0, 0]) for _, tensor in gathered(Faulty("")))}


def no_bucket() -> Result:
    try:
        next(gathered(Faulty(""), bucket_bytes=0))
    except ValueError as error:
        return {"text": str(error)}
    return {"text": ""}


# --- memory -------------------------------------------------------------------


def drain(items: Iterator[Any]) -> None:
    for _ in items:
        pass


def memory_of_gathering() -> Result:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    for layer in model:
        fully_shard(layer)
    source = FSDPAdapter(fully_shard(model))
    drain(gathered(source, bucket_bytes=MIB))  # the first time also touches the collectives' own memory
    return {"peak": peak_bytes(lambda: drain(gathered(source, bucket_bytes=MIB))), "model": 24 * 4 * MIB}


def memory_of_summoning() -> Result:
    def unit() -> nn.Module:
        return FullyShardedDataParallel(
            nn.Conv2d(256, 512, 3, bias=False).to(memory_format=torch.channels_last), device_id=CPU
        )

    source = FSDPAdapter(FullyShardedDataParallel(nn.Sequential(*(unit() for _ in range(20))), device_id=CPU))
    source.manifest()
    drain(source.slices())
    return {"peak": peak_bytes(lambda: drain(source.slices())), "model": 20 * 256 * 512 * 9 * 4}


def memory_of_flat_slices() -> Result:
    layers = [FullyShardedDataParallel(nn.Linear(1024, 1024), device_id=CPU) for _ in range(24)]
    source = FSDPAdapter(FullyShardedDataParallel(nn.Sequential(*layers), device_id=CPU))
    source.manifest()
    drain(source.slices())
    return {"peak": peak_bytes(lambda: drain(source.slices())), "model": 24 * 4 * MIB}


FAULTS = ["raises", "skips", "another model", "claims too little"]
CASES = [
    fsdp_in_small_buckets,
    odd_parts_in_tiny_buckets,
    hybrid_in_one_bucket,
    flat_parameters,
    two_dimensions_of_shards,
    stacked_experts_by_columns,
    summoned_units,
    one_at_a_time,
    some_together_and_the_others_in_one_buffer,
    exported_on_all_ranks,
    exported_on_rank_0,
    exported_by_stages,
    exported_in_the_engines_dtypes,
    export_is_wrong,
    export_goes_on_when_nobody_takes,
    a_rank_fails_before_its_adapter,
    a_rank_makes_its_manager_meanwhile,
    gathering_goes_on_when_nobody_takes,
    *(fails(fault) for fault in FAULTS),
    stages_as_modules,
    no_memory,
    no_bucket,
    memory_of_gathering,
    memory_of_summoning,
    memory_of_flat_slices,
]

if __name__ == "__main__":
    main([], CASES)
