"""Trainers in front of a real replica, run by torchrun: good updates, and every way to be wrong on one rank.

Usage: rig_worker.py OUT_DIRECTORY, with a replica of `tests/support/plain_engine.py` running. After each fault the engine
must hold what it held before, bit for bit, and take the next good update. Each rank leaves `rank<i>.json`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest
from tests.support.leaving import leave_process_groups
from tests.support.plain_engine import VOCABULARY, WIDTH, checkpoint
from trainer_adapters import (
    DTensorAdapter,
    ExportAdapter,
    FSDPAdapter,
    LocalSlice,
    MergedLoRAAdapter,
    ModuleAdapter,
    SyncManager,
    WeightSource,
)

RULES = {"*norm.weight": torch.float32, "*": torch.bfloat16}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, bias=False)


class Policy(nn.Module):
    """The engine's checkpoint as a trainer holds it: fp32 master weights, the head tied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.load_state_dict(checkpoint(seed) | {"head.weight": checkpoint(seed)["embed.weight"]})


def flat(seed: int) -> tuple[nn.Module, WeightSource]:
    model: Any = Policy(seed)
    for i, layer in enumerate(model.layers):
        model.layers[i] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), use_orig_params=True)
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return model, FSDPAdapter(model, dtype_rules=RULES)


def sharded(seed: int) -> tuple[nn.Module, WeightSource]:
    model: Any = Policy(seed)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, FSDPAdapter(model, dtype_rules=RULES)


def parallel(seed: int) -> tuple[nn.Module, WeightSource]:
    model = Policy(seed)
    plan = {f"layers.*.{name}": ColwiseParallel() for name in "qkv"} | {"layers.*.out": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return model, DTensorAdapter(model, dtype_rules=RULES)


def exported(seed: int) -> tuple[nn.Module, WeightSource]:
    """Whole tensors, which the ranks gather together while they are sent."""
    model, _ = sharded(seed)
    return model, ExportAdapter(
        lambda: ((name, parameter.full_tensor()) for name, parameter in model.named_parameters()),
        tied={"head.weight": "embed.weight"},
        dtype_rules=RULES,
    )


KINDS = {"fsdp1": flat, "fsdp2": sharded, "dtensor": parallel, "export": exported}


class Wrong(WeightSource):
    """A source with one thing wrong about it on rank 1."""

    def __init__(self, source: WeightSource, fault: str) -> None:
        self.source = source
        self.fault = fault if dist.get_rank() == 1 else ""

    def manifest(self) -> Manifest:
        if self.fault == "manifest raises":
            raise RuntimeError("rank 1 has lost its model")
        return self.source.manifest()

    def claims(self) -> tuple[Box, ...] | None:
        claims = self.source.claims() or ()
        if self.fault == "claims a parameter less":
            return claims[:-1]
        if self.fault == "claims a parameter twice":
            return (*claims, self.source.manifest().whole(0))
        return claims

    def made_together(self) -> frozenset[int]:
        return self.source.made_together()

    def slices(self) -> Iterator[LocalSlice]:
        for i, item in enumerate(self.source.slices()):
            if i == 1 and self.fault == "raises in the middle":
                raise RuntimeError("out of memory, says rank 1")
            if i == 1 and self.fault == "skips a parameter":
                continue
            yield item


def with_sums(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.sums = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))


def with_meta(model: nn.Module) -> None:
    model.extra = nn.Parameter(torch.ones(3, device="meta"))


def with_more(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        model.extra = nn.Parameter(torch.ones(3))


SOURCES = [
    "manifest raises",
    "claims a parameter less",
    "claims a parameter twice",
    "raises in the middle",
    "skips a parameter",
]
MODELS: dict[str, Callable[[nn.Module], None]] = {
    "pending sums": with_sums,
    "a meta tensor": with_meta,
    "another model": with_more,
}


def run(kind: str, manager: SyncManager, version: int) -> tuple[dict[str, Any], int]:
    build = KINDS[kind]
    seen: dict[str, Any] = {}
    for fault in [*SOURCES, *MODELS]:
        if (kind, fault) == ("fsdp1", "pending sums") or (kind == "export" and fault in MODELS):
            continue  # it has no such thing
        version += 1
        _, good = build(version)
        manager.update(good, version)
        model, bad = build(version + 100)
        if fault in MODELS:
            MODELS[fault](model)
        else:
            bad = Wrong(bad, fault)
        try:
            manager.update(bad, version + 1)
            seen[fault] = {"error": None}
        except WeightwireError as error:
            seen[fault] = {"error": type(error).__name__, "text": str(error), "phase": error.phase}
        seen[fault]["old version is there"] = manager.verify(good).ok
    return seen, version


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def copies_that_come_apart(manager: SyncManager, version: int) -> dict[str, Any]:
    """Rank 1's norm moves on by itself, and its embedding isn't contiguous; ten updates, then a verification."""
    heard = Heard()
    logging.getLogger("trainer_adapters.update.leader").addHandler(heard)
    model: Any
    model, source = parallel(version)
    model.embed.weight = model.head.weight = nn.Parameter(model.embed.weight.detach().T.contiguous().T)
    warned = []
    for i in range(10):
        if i == 2 and dist.get_rank() == 1:
            with torch.no_grad():
                model.layers[1].norm.weight.add_(1)
        before = len(heard.lines)
        manager.update(source, version + i)
        warned.append(len(heard.lines) - before)
    before = len(heard.lines)
    ok = manager.verify(source).ok
    return {"seed": version, "warned": warned, "by verify": len(heard.lines) - before, "ok": ok, "lines": heard.lines}


def plain(seed: int) -> tuple[nn.Module, WeightSource]:
    """Data parallel without a wrapper: whoever builds the model has to see to it that it is the same everywhere."""
    model = Policy(seed)
    return model, ModuleAdapter(model, dtype_rules=RULES)


def hybrid(seed: int) -> tuple[nn.Module, WeightSource]:
    """HSDP with one copy on each rank."""
    model = Policy(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
    return model, FSDPAdapter(model, dtype_rules=RULES)


def adapted(seed: int) -> tuple[nn.Module, WeightSource]:
    """As `hybrid`, with an adapter that has not learnt yet."""
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(Policy(seed), LoraConfig(r=2, target_modules=["q"]))  # type: ignore[arg-type]
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
    return model, MergedLoRAAdapter(model, dtype_rules=RULES)


def ignored(seed: int) -> tuple[nn.Module, WeightSource]:
    """The base sharded over both ranks, and on each an adapter of its own, which FSDP leaves alone."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q"], init_lora_weights=False)
    model: Any = get_peft_model(Policy(seed), config)  # type: ignore[arg-type]
    fully_shard(model, ignored_params={p for name, p in model.named_parameters() if "lora_" in name})
    return model, MergedLoRAAdapter(model, dtype_rules=RULES)


def streamed(seed: int) -> tuple[nn.Module, WeightSource]:
    """As `plain`, from a function that makes one tensor at a time."""
    model = Policy(seed)
    pairs = lambda: ((name, parameter.detach().clone()) for name, parameter in model.named_parameters())  # noqa: E731
    return model, ModuleAdapter(pairs, dtype_rules=RULES)


def yielded(seed: int) -> tuple[nn.Module, WeightSource]:
    """As `plain`, from an export that every rank makes of its own model."""
    model = Policy(seed)
    return model, ExportAdapter(model.named_parameters, tied={"head.weight": "embed.weight"}, dtype_rules=RULES)


def several_models(build: Callable[[int], tuple[nn.Module, WeightSource]], version: int) -> dict[str, Any]:
    """Rank 1 trains a model of its own: from a manager's first update on, or from its second."""
    seen: dict[str, Any] = {}
    for turn in ("first", "second"):
        version += 2
        _, good = build(version)
        model, bad = build(version + 1)
        if dist.get_rank() == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.5)
        if turn == "first":
            with SyncManager(timeout_s=60) as manager:
                manager.update(good, version)
        with SyncManager(timeout_s=60) as manager:
            if turn == "second":
                manager.update(good, version)
            attempts = []
            for _ in range(2):
                try:
                    manager.update(bad, version + 1)
                    attempts.append({"error": None})
                except WeightwireError as error:
                    attempts.append({"error": type(error).__name__, "text": str(error), "phase": error.phase})
            seen[turn] = {"attempts": attempts}
            seen[turn]["old version is there"] = manager.verify(good).ok
    return seen


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen: dict[str, Any] = {}
    version = 0
    with SyncManager(timeout_s=60) as manager:
        for kind in KINDS:
            seen[kind], version = run(kind, manager, version)
    seen["several models"] = {
        "plain": several_models(plain, version + 10),
        "hybrid": several_models(hybrid, version + 20),
        "adapted": several_models(adapted, version + 25),
        "streamed": several_models(streamed, version + 30),
        "yielded": several_models(yielded, version + 40),
        "ignored": several_models(ignored, version + 50),
    }
    with SyncManager(timeout_s=60) as manager:
        seen["copies"] = copies_that_come_apart(manager, version + 61)
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave_process_groups()
