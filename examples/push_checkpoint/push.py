"""Pushes a safetensors checkpoint into every running engine of the job, with a progress bar.

    python examples/push_checkpoint/push.py CHECKPOINT_DIR [--version N] [--dtype bfloat16]

The engines only need the weightwire plug-in installed; nothing is restarted. Files are read tensor by tensor while they
are written, so that no second copy of the checkpoint is in memory here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from inference_plugin.cli.checkpoints import Checkpoint, dtype_named
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.manifest import Manifest
from weightwire import LocalSlice, ModuleAdapter, SyncManager, WeightSource

console = Console(markup=False)  # errors name their fields in brackets


class WithProgress(WeightSource):
    """A source that advances a progress bar by the bytes that were taken from it."""

    def __init__(self, source: WeightSource, advance: Any) -> None:
        self._source = source
        self._advance = advance

    def manifest(self) -> Manifest:
        return self._source.manifest()

    def slices(self) -> Iterator[LocalSlice]:
        manifest = self.manifest()
        for item in self._source.slices():
            yield item
            self._advance(manifest.box_nbytes(item.box))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--version", type=int, help="default: one more than the engines serve")
    parser.add_argument("--group", default="policy")
    parser.add_argument(
        "--dtype", help="send every tensor as this torch dtype, e.g. bfloat16; default: as it is stored"
    )
    parser.add_argument("--in-flight", default="keep", choices=("keep", "recompute", "abort", "drain"))
    parser.add_argument(
        "--verify", action="store_true", help="compare the live parameters with the checkpoint afterwards"
    )
    arguments = parser.parse_args()
    dtype = dtype_named(arguments.dtype)
    source = ModuleAdapter(Checkpoint(arguments.checkpoint), dtype_rules={"*": dtype} if dtype else None)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    try:
        with (
            SyncManager(arguments.group, in_flight=arguments.in_flight, on_failure="report") as manager,
            Progress(*columns, console=console) as bar,
        ):
            task = bar.add_task(arguments.checkpoint.name, total=source.manifest().nbytes)
            watched = WithProgress(source, lambda nbytes: bar.advance(task, nbytes))
            report = manager.update(watched, arguments.version)
            bar.stop()
            for replica in report.replicas:
                console.print(
                    f"{replica.replica}: {replica.status}, version {replica.version}, "
                    f"generation stopped {replica.stopped_s * 1000:.1f} ms"
                )
            if arguments.verify and not (verified := manager.verify(source)).ok:
                console.print(f"NOT EQUAL: {json.dumps([str(r) for r in verified.replicas], indent=2)}")
                return 1
            return 1 if report.failed else 0
    except WeightwireError as error:
        console.print(f"{type(error).__name__}: {error}", style="red", highlight=False)
        return 2


if __name__ == "__main__":
    sys.exit(main())
