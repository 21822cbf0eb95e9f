"""The cases of `test_quantized_adapter.py`, run by torchrun (see `observing.py`). The checkpoints lie beside the results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from inference_plugin.wire.config import Config
from tests.support.quantising import KINDS, SIZES, large
from tests.support.rig import eventually
from tests.trainers.dtensor_worker import PLAN
from tests.trainers.observing import Result, main, nudge, observe, refused, tiny_qwen3, tiny_qwen3_moe
from trainer_adapters import (
    DTensorAdapter,
    ExportAdapter,
    FSDPAdapter,
    LocalSlice,
    ModuleAdapter,
    QuantizedAdapter,
    WeightSource,
)

CHECKPOINTS = Path(sys.argv[2])


def dense(kind: str = "") -> Any:
    model = tiny_qwen3(tied=False, key_heads=2, **SIZES.get(kind, {})).bfloat16()
    nudge(model)
    return model


def fsdp(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def observed(source: WeightSource, checkpoint: str) -> Result:
    return observe(QuantizedAdapter(source, CHECKPOINTS / checkpoint))


def each_kind_from_uneven_shards() -> Result:
    return {kind: observed(FSDPAdapter(fsdp(dense(kind))), kind) for kind in KINDS}


def each_kind_from_columns_and_rows() -> Result:
    mesh = init_device_mesh("cpu", (2,))
    return {kind: observed(DTensorAdapter(parallelize_module(dense(kind), mesh, PLAN)), kind) for kind in KINDS}


def from_columns_that_share_a_number() -> Result:
    weight = distribute_tensor(torch.ones(4, 24, dtype=torch.bfloat16), init_device_mesh("cpu", (2,)), [Shard(1)])
    source = QuantizedAdapter(DTensorAdapter({"down_proj.weight": weight}), CHECKPOINTS / "words")
    return {"claims": refused(source.claims), "slices": refused(lambda: list(source.slices()))}


def from_copies_of_which_each_rank_sends_a_part() -> Result:
    return observed(ModuleAdapter(dense()), "fp8 in blocks")


def from_an_export_that_the_ranks_make_together() -> Result:
    model = fsdp(dense())

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model.state_dict().items():
            yield name, tensor.full_tensor()

    return observed(ExportAdapter(export), "fp8 in blocks")


def experts() -> Result:
    model: Any = tiny_qwen3_moe().bfloat16()
    nudge(model)
    return observed(FSDPAdapter(fsdp(model)), "experts")


def from_masters_in_float32_that_travel_in_bfloat16() -> Result:
    model = fsdp(dense().float())
    return observed(FSDPAdapter(model, dtype_rules="bfloat16"), "fp8 in blocks")


class FailsOnce(FSDPAdapter):
    """On rank 1 reading fails, the first time."""

    fails = True

    def slices(self) -> Iterator[LocalSlice]:
        if dist.get_rank() == 1 and self.fails:
            self.fails = False
            raise RuntimeError("rank 1 has lost its weights")
        return super().slices()


class HeldUpOnce(FSDPAdapter):
    """On rank 1 reading takes longer than the limit, the first time."""

    held_up = True

    def slices(self) -> Iterator[LocalSlice]:
        if dist.get_rank() == 1 and self.held_up:
            self.held_up = False
            time.sleep(1.5)
        return super().slices()


def a_rank_that_fails() -> Result:
    source = QuantizedAdapter(FailsOnce(fsdp(dense())), CHECKPOINTS / "fp8 in blocks")
    source.manifest()
    return {"first": refused(lambda: list(source.slices())), "then": observe(source)}


def a_rank_that_fails_in_an_export() -> Result:
    """While rank 0 waits for it in a collective of the export, for which a file stands here."""
    model = fsdp(dense())
    told = CHECKPOINTS / "rank 1 has told its caller"
    failing = False

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        if failing and dist.get_rank() == 1:
            raise RuntimeError("rank 1 can't convert its weights")
        if failing:
            eventually(told.exists, told.name)
        yield from model.state_dict().items()

    source = QuantizedAdapter(ExportAdapter(export), CHECKPOINTS / "fp8 in blocks")
    failing = True
    first = refused(lambda: list(source.slices()))
    if dist.get_rank() == 1:
        told.touch()
    failing = False
    return {"first": first, "then": observe(source)}


def a_rank_that_is_held_up() -> Result:
    source = QuantizedAdapter(HeldUpOnce(fsdp(dense())), CHECKPOINTS / "fp8 in blocks")
    source.configure(Config(timeout_s=1))
    source.manifest()
    first = refused(lambda: list(source.slices()))
    dist.barrier()  # the next operation begins when this one is over on all ranks
    source.configure(Config())
    return {"first": first, "then": observe(source)}


def a_rank_with_another_checkpoint() -> Result:
    kind = "fp8 in blocks, powers of two" if dist.get_rank() else "fp8 in blocks"
    return refused(lambda: QuantizedAdapter(ModuleAdapter(dense()), CHECKPOINTS / kind))


def a_rank_without_the_checkpoint() -> Result:
    kind = "nowhere" if dist.get_rank() else "fp8 in blocks"
    return refused(lambda: QuantizedAdapter(ModuleAdapter(dense()), CHECKPOINTS / kind))


def from_copies_made_one_by_one() -> Result:
    return observe(QuantizedAdapter(ModuleAdapter(lambda: iter(large().items())), CHECKPOINTS / "large"))


def not_finite() -> Result:
    model = dense()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[17, 3] = float("nan")
        model.model.layers[1].mlp.up_proj.weight[100, 3] = float("inf")
    source = QuantizedAdapter(FSDPAdapter(fsdp(model)), CHECKPOINTS / "fp8 in blocks")
    manifest = source.manifest()
    return {
        "names": sorted(
            {
                manifest.tensors[item.box.tensor].name
                for item in source.slices()
                if not item.tensor.float().isfinite().all()
            }
        )
    }


def ranks_that_have_different_numbers_of_groups() -> Result:
    if dist.get_rank() == 0:
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
    return observed(FSDPAdapter(fsdp(dense())), "fp8 in blocks")


CASES = [
    each_kind_from_uneven_shards,
    each_kind_from_columns_and_rows,
    from_columns_that_share_a_number,
    from_copies_of_which_each_rank_sends_a_part,
    from_an_export_that_the_ranks_make_together,
    experts,
    from_masters_in_float32_that_travel_in_bfloat16,
    a_rank_that_fails,
    a_rank_that_fails_in_an_export,
    a_rank_that_is_held_up,
    a_rank_with_another_checkpoint,
    a_rank_without_the_checkpoint,
    from_copies_made_one_by_one,
    not_finite,
    ranks_that_have_different_numbers_of_groups,  # the last one: afterwards torch's own groups have other names on each rank
]

if __name__ == "__main__":
    main(CASES, [])
