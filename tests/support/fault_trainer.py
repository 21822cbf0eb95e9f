"""A trainer in processes of its own that stops at a point of an update, for the test to kill it or to let it go on.

Usage: fault_trainer.py DIRECTORY, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment. DIRECTORY/config:
JSON `{"model", "version", "rank", "point", "options"}`; `options` go to the SyncManager. At the point the rank makes the
file `at` and waits until there is a file `go`. At its end each rank leaves `result<rank>`, JSON.

Points: "writing" (one tensor is written), "wrote" (all of this rank's are, the manager doesn't know it yet), "sealed"
(between seal and commit; rank 0), "committing" (the commit is sent; rank 0).
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

from inference_plugin.wire.errors import WeightwireError
from trainer_adapters import LocalSlice, ModuleAdapter, SyncManager, update
from trainer_adapters.crew import Crew

DIRECTORY = Path(sys.argv[1])
CONFIG = json.loads((DIRECTORY / "config").read_text())
RANK = int(os.environ["RANK"])


def stop_at(point: str) -> None:
    if (RANK, point) != (CONFIG["rank"], CONFIG["point"]):
        return
    (DIRECTORY / "at").touch()
    deadline_s = time.monotonic() + 300
    while not (DIRECTORY / "go").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)


class StoppingSource(ModuleAdapter):
    def slices(self) -> Iterator[LocalSlice]:
        for item in super().slices():
            yield item
            stop_at("writing")


def stop_before(owner: Any, name: str, point: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def stopping(*args: Any, **kwargs: Any) -> Any:
        stop_at(point)
        return original(*args, **kwargs)

    setattr(owner, name, stopping)


def commit_then_stop() -> None:
    original = update.fan_out

    def fan_out(requests: Any, kind: type, *, timeout_s: float) -> Any:
        if kind.__name__ == "Committed":
            for outgoing in requests:
                outgoing.channel.send(outgoing.body)
            stop_at("committing")
        return original(requests, kind, timeout_s=timeout_s)

    update.fan_out = fan_out  # type: ignore[assignment]


def main() -> None:
    stop_before(Crew, "ask_outcome", "wrote")
    stop_before(update.Update, "_seal", "wrote")
    stop_before(update.Update, "_commit", "sealed")
    commit_then_stop()
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    result: dict[str, Any] = {"error": None}
    started_s = time.monotonic()
    sync = SyncManager(**CONFIG["options"])
    try:
        report = sync.update(StoppingSource(load_file(CONFIG["model"])), CONFIG["version"])
        result["replicas"] = [(r.status, r.version) for r in report.replicas]
    except WeightwireError as error:
        result |= {"error": type(error).__name__, "text": str(error), "where": [error.side, error.rank, error.phase]}
        result["version"] = error.version
    result["seconds"] = time.monotonic() - started_s
    sync.close()
    (DIRECTORY / f"result{RANK}.tmp").write_text(json.dumps(result))
    (DIRECTORY / f"result{RANK}.tmp").rename(DIRECTORY / f"result{RANK}")


if __name__ == "__main__":
    main()
    os._exit(0)  # a process group with a dead rank must not be waited for
