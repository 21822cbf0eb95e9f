"""A trainer in processes of its own that stops at a point of an update, for the test to kill it or to let it go on.

Usage: fault_trainer.py DIRECTORY, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment. DIRECTORY/config:
JSON `{"model", "version", "rank", "point", "options"}`; `options` go to the SyncManager. At the point the rank makes the
file `at` and waits until there is a file `go`. At its end each rank leaves `result<rank>`, JSON.

Points: "writing" (one tensor is written), "streaming" (a worker is sent its second bucket, so its first one is in place),
"wrote" (all tensors of this rank are written, and the manager does not know it yet), "sealed" (between seal and commit;
rank 0), "committing" (the commit is sent; rank 0).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

from inference_plugin.net.channel import Channel
from inference_plugin.plugins import hookimpl, plugin_manager
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import Body, Bucket, Commit
from trainer_adapters import LocalSlice, ModuleAdapter, SyncManager

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


class StopsBetweenPhases:
    """A plug-in of the trainer."""

    @hookimpl
    def weightwire_phase(self, phase: str, rank: int) -> None:
        if phase == ("seal" if rank == 0 else "report"):
            stop_at("wrote")
        elif phase == "commit":
            stop_at("sealed")


def stop_after_what_is_sent() -> None:
    original = Channel.send

    def send(self: Channel, body: Body, payload: Any = None) -> None:
        original(self, body) if payload is None else original(self, body, payload)
        if isinstance(body, Commit):
            stop_at("committing")
        elif isinstance(body, Bucket) and body.seq == 1:
            stop_at("streaming")

    Channel.send = send  # type: ignore[method-assign, assignment]


def main() -> None:
    plugin_manager().register(StopsBetweenPhases())
    stop_after_what_is_sent()
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    result: dict[str, Any] = {"error": None}
    started_s = time.monotonic()
    sync = SyncManager(on_failure="report", **CONFIG["options"])
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
