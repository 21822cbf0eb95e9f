"""SGLang's turns without SGLang: two processes with the real control, coordinator, groups and gloo group of an SGLang replica,
around the model of `plain_engine`. Their "event loop" broadcasts each pass whether a turn is due, as SGLang does its requests.

Each rank appends what its turns did to `log<rank>` in the directory, a line of JSON per turn: what was asked of the scheduler,
and how many collectives it took. A file `busy` keeps requests running; a number in `fence` appears in `fenced<rank>`
once the turns before it are logged; `stop` ends both.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.engines.coordinator import open_coordinator
from inference_plugin.engines.rank_runtime import RankIdentity, RankRuntime
from inference_plugin.engines.sglang.control import FollowerControl, LeaderControl
from inference_plugin.engines.sglang.ranks import Ranks
from inference_plugin.engines.sglang.scheduler import SchedulerRank
from inference_plugin.engines.sglang.turn import Doorbell, EngineOperation, Turn
from inference_plugin.plugins import plugin_manager
from tests.support.fault_plugin import FaultPlugin
from tests.support.plain_engine import PlainEngineModel, die_with_parent

LAYERS = 2


class PlainRank(SchedulerRank):
    """A rank whose scheduler writes down what it is asked."""

    def __init__(self, ranks: Ranks, replica: str, directory: Path) -> None:
        self.ranks, self.rank, self.replica = ranks, ranks.rank, replica
        self.model = PlainEngineModel(LAYERS, ranks.rank, ranks.size)  # type: ignore[assignment]
        self.runtime = RankRuntime(RankIdentity(replica, ranks.rank, tp_rank=ranks.rank), self.model)
        self.scheduler = SimpleNamespace(
            is_fully_idle=lambda: not (directory / "busy").exists(),
            grammar_manager=SimpleNamespace(grammar_queue=[]),
            enable_hierarchical_cache=False,
            waiting_queue=[],
        )
        self.bell = Doorbell(None, replica, ranks.rank)  # it never sleeps
        self.refusal: str | None = None
        self.asked: list[str] = []

    def _engine(self, operation: EngineOperation) -> bool:
        self.asked.append(operation.name)
        if operation.name == "flush":
            return bool(self.scheduler.is_fully_idle())
        if operation.name == "refuse":
            self.refuse(operation.reason)
        return True

    def resume(self) -> None:
        self.asked.append("resume here")

    def installed(self, group: str, stamp: str) -> None:
        self.asked.append(f"installed {stamp}")

    def refuse(self, reason: str | None) -> None:
        self.refusal = reason


def one_rank(rank: int, directory: str) -> None:
    """A rank's process, until the file `stop` is there."""
    die_with_parent()
    torch.set_num_threads(1)
    root = Path(directory)
    os.environ["WEIGHTWIRE_RUNTIME_DIR"] = directory
    plugin_manager().register(FaultPlugin())
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    ranks = Ranks(
        SimpleNamespace(tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1, tp_group=SimpleNamespace(ranks=[0, 1]))
    )
    one = PlainRank(ranks, f"sglang-{root.name}", root)
    cards = [None, None]
    dist.all_gather_object(cards, one.runtime.card())
    turns: Any = LeaderControl(one, []) if rank == 0 else FollowerControl(one)
    if rank == 0:
        open_coordinator(turns, one.replica, cards, engine="sglang", engine_version="0", model="plain", tp=2)
    due = torch.zeros(1, dtype=torch.uint8)
    while not (root / "stop").exists():
        due.fill_(turns.wants_turn())
        dist.broadcast(due, 0)
        if int(due):
            before, one.asked[:] = ranks.collectives, []
            turns.handle(Turn(turns.rung))
            line: dict[str, Any] = {"asked": one.asked, "collectives": ranks.collectives - before}
            with (root / f"log{rank}").open("a") as log:
                log.write(json.dumps(line | {"refusal": one.refusal}) + "\n")
        else:
            if (root / "fence").exists():
                (root / f"fenced{rank}").write_text((root / "fence").read_text())
            time.sleep(0.002)
