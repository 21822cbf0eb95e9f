"""A Weightwire plug-in that makes installations fail on order: `WEIGHTWIRE_PLUGINS=tests.support.fault_plugin:plugin`.

`WEIGHTWIRE_TEST_FAULTS` names a file of JSON: a list of `{"rank", "step", "when"}`. `when`: "before" raises before a byte
of the live model changes, "after" once everything is written, "hang" waits there, having made a file `<faults>.<rank>`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from inference_plugin.install.adapter import AdapterInstaller
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.plugins import hookimpl

__all__ = ["plugin"]


class FaultPlugin:
    @hookimpl
    def weightwire_installing(self, version: int, rank: int, step: str) -> None:
        path = Path(os.environ["WEIGHTWIRE_TEST_FAULTS"])
        for fault in json.loads(path.read_text()):
            if (fault["rank"], fault["step"]) != (rank, step):
                continue
            text = f"planned fault: {step} on rank {rank}"
            if fault["when"] == "hang":
                path.with_name(f"{path.name}.{rank}").touch()
                time.sleep(600)
            elif fault["when"] == "after":
                fail_after_install(text)
            else:
                raise RuntimeError(text)


def fail_after_install(text: str) -> None:
    """The next `install` of this process does everything, then raises."""
    originals = {kind: kind.install for kind in (ModelInstaller, AdapterInstaller)}

    def install(self: Any, *args: Any) -> None:
        for kind, original in originals.items():
            kind.install = original  # type: ignore[method-assign]
        originals[type(self)](self, *args)
        raise RuntimeError(text)

    for kind in originals:
        kind.install = install  # type: ignore[method-assign]


plugin = FaultPlugin()
