"""A trainer of several ranks: each runs the same list of steps and notes how each one ended.

Run by torchrun (`python -m torch.distributed.run ... ranks.py OUT STEPS`), or rank by rank from the nursery (`one_rank`)
where a test kills or stops one: torchrun would end the others.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from inference_plugin.net import channel
from inference_plugin.wire.errors import ConfigError, SyncTimeout, WeightwireError
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest
from tests.support.plain_engine import TIED, ShardSource, checkpoint
from tests.support.rig import eventually
from trainer_adapters.manager import SyncManager
from trainer_adapters.sources.base import LocalSlice, WeightSource
from trainer_adapters.sources.module import ModuleAdapter


class FaultySource(ShardSource):
    """A source that does one thing wrong on one rank."""

    def __init__(self, seed: int, rank: int, world: int, fault: str) -> None:
        super().__init__(checkpoint(seed), rank, world)
        self.fault = fault
        self.together: Path | None = None

    def made_together(self) -> frozenset[int]:
        return frozenset() if self.together is None else frozenset([0])

    def manifest(self) -> Manifest:
        if self.fault == "manifest raises":
            raise RuntimeError("this rank has lost its model")
        if self.fault == "ends before it reports":
            raise SystemExit("the caller's own doing")
        if self.fault == "another manifest":
            self.tensors = self.tensors | {"value_head.weight": torch.zeros(3)}
        return super().manifest()

    def claims(self) -> tuple[Box, ...] | None:
        if self.fault == "numpy's integers":
            return (Box(0, (np.int64(0), 0), (1, 1)),)
        return super().claims()

    def slices(self) -> Iterator[LocalSlice]:
        for i, item in enumerate(super().slices()):
            if i == 2 and self.together is not None and not self.fault:
                eventually(self.together.exists, "the other rank in the collective")
            if self.fault == "skip" and i == 1:
                continue
            if self.fault == "double" and i == 1:
                tensor = self.tensors["layers.0.q.weight"]
                yield LocalSlice(Box(1, (0, 0), tuple(tensor.shape)), tensor)
                continue
            if i == 2:
                if self.fault == "nan":
                    item = LocalSlice(item.box, torch.full_like(item.tensor, float("nan")))
                if self.fault == "raise":
                    raise RuntimeError("out of memory, says rank 1")
                if self.fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.fault == "stop":
                    # Sent to this thread, it stops before the next instruction; sent to the process, a little later.
                    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            yield item


def in_float32(seed: int) -> WeightSource:
    """The whole model in float32 on every rank, to be sent in the engine's dtypes."""
    tensors = {name: tensor.float() for name, tensor in checkpoint(seed).items()}
    return ModuleAdapter(tensors | {tied: tensors[name] for tied, name in TIED.items()}, dtype_rules="engine")


def of_vllm(seed: int) -> Any:
    """A source of vLLM's, for which an adapter is made by all ranks together."""
    tensors = checkpoint(seed)
    described = [SimpleNamespace(name=name, dtype=t.dtype, shape=t.shape) for name, t in tensors.items()]
    methods = {"metadata": lambda _: described, "__iter__": lambda _: iter(tensors.items())}
    return type("WeightSource", (), {"__module__": "vllm.distributed.weight_transfer.base", **methods})()


def of_peft() -> torch.nn.Module:
    """A sharded model with adapters, for which an adapter is made by all ranks together."""
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard

    model: Any = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    return fully_shard(model)  # type: ignore[no-any-return]


def run(rank: int, world: int, steps: list[dict[str, Any]], out: Path, **options: Any) -> None:
    if any(step.get("kind") == "lora" for step in steps):
        for name in ("peft", "torch.distributed.fsdp"):  # from a disk that is busy they take longer than a step may
            importlib.import_module(name)
    sums = options.pop("sums", False)
    seen: dict[str, Any]
    channel.RESEND_S = options.pop("resend_s", channel.RESEND_S)
    if (alone := options.pop("alone", None)) == rank:
        began_s = time.monotonic()
        with pytest.raises(SyncTimeout) as raised:
            SyncManager(timeout_s=1)
        seen = {"text": str(raised.value), "rank": raised.value.rank, "seconds": time.monotonic() - began_s}
        (out / f"rank{rank}.alone").write_text(json.dumps(seen))
    elif alone is not None:
        eventually(lambda: (out / f"rank{alone}.alone").exists(), "the other rank's attempt")
    if apart := options.pop("apart", None):
        with pytest.raises(ConfigError) as refused:
            SyncManager(**apart[rank])
        (out / f"rank{rank}.apart").write_text(json.dumps({"text": str(refused.value)}))
    if ranks := options.pop("ranks", None):
        group = dist.new_group(ranks)
        # gloo does not wait until every rank is connected: a rank that is left out could end before the others have met it.
        dist.barrier()
        if rank not in ranks:
            return
        options["process_group"], rank, world = group, ranks.index(rank), len(ranks)
    manager = SyncManager(**options)
    (out / f"rank{rank}.pid").write_text(str(os.getpid()))
    timeout_s = manager.settings.timeout_s
    for number, step in enumerate(steps):
        if rank not in step.get("only", range(world)):
            continue
        if "wait" in step:
            eventually(lambda name=step["wait"]: (out / name).exists(), step["wait"])  # type: ignore[misc]
            continue
        manager.settings.timeout_s = step.get("timeout_s", timeout_s)
        fault = step.get("fault", "") if rank == step.get("at", 1) else ""
        version = step["version"]
        seed = step.get("seed", version)
        version = version + 100 if fault == "another version" else version
        faulty = FaultySource(seed, rank, world, fault)
        faulty.together = out / step["together"] if "together" in step else None
        source: Any = in_float32(seed) if step.get("engine_dtypes") else faulty
        if "made_together" in step:
            model = of_vllm(seed) if step["kind"] == "vllm" else of_peft()
            source = model if rank in step["made_together"] else None
        began_s = time.monotonic()
        try:
            report: Any
            if "calls" in step:
                report = [getattr(manager, call)() for call in step["calls"]]
            else:
                report = manager.verify(source) if rank in step.get("verify", ()) else manager.update(source, version)
            seen = {
                "ok": json.loads(json.dumps(report, default=lambda s: {f: getattr(s, f) for f in s.__struct_fields__}))
            }
        except SystemExit as ended:
            seen = {"error": type(ended).__name__}
        except WeightwireError as error:
            seen = {"error": type(error).__name__, "text": str(error), "side": error.side, "rank": error.rank}
            seen |= {"phase": error.phase, "version": error.version, "group": error.group}
            seen["notes"] = getattr(error, "__notes__", [])
            seen["failed"] = [one.replica for one in error.report.failed] if error.report is not None else None
        seen["seconds"] = time.monotonic() - began_s
        if sums:
            dist.all_reduce(total := torch.ones(1))
            seen |= {"sum": total.item(), "groups": len(dist.distributed_c10d._world.pg_map)}
        note = out / f"rank{rank}.step{number}"
        note.with_suffix(".new").write_text(json.dumps(seen))
        note.with_suffix(".new").rename(note)
    manager.close()


def one_rank(rank: int, world: int, directory: str, steps: list[dict[str, Any]], options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    out = Path(directory)
    store = dist.FileStore(str(out / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    run(rank, world, steps, out, **options)
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size(), json.loads(sys.argv[2]), Path(sys.argv[1]), timeout_s=60)
    dist.destroy_process_group()
