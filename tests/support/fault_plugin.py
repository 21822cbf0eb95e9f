"""A Weightwire plug-in that makes installations fail on order: `WEIGHTWIRE_PLUGINS=tests.support.fault_plugin:plugin`.

`WEIGHTWIRE_TEST_FAULTS` names a file of JSON: a list of `{"rank", "step", "when"}`. `when`: "before" raises before a byte
of the live model changes, "after" once everything is written, "hang" waits there, having made a file `<faults>.<rank>`, "stop"
stops the process (SIGSTOP), "interrupt" is Ctrl-C. With the step "post-process" `when` is a number: the engine's
post-processing of as many modules succeeds, and that of the next one raises, or with `"hangs": true` waits. Of modules whose
post-processing reduces over the ranks, the step "note" is the same before the commit, where a rank notes its operands, and
"reduce" in the commit, where they are made.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from inference_plugin.install.adapter import AdapterInstaller
from inference_plugin.install.collectives import Noted, Reduced
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.install.post_processing import PostProcessing
from inference_plugin.plugins import hookimpl

__all__ = ["plugin"]

STEPS: dict[str, type] = {"post-process": object, "note": Noted, "reduce": Reduced}
"""Steps of post-processing, by what answers its reductions then."""


class FaultPlugin:
    @hookimpl
    def weightwire_installing(self, version: int, rank: int, step: str) -> None:
        for fault in ordered():
            if (fault["rank"], fault["step"]) != (rank, step):
                continue
            text = f"planned fault: {step} on rank {rank}"
            if fault["when"] == "hang":
                hang(rank)
            elif fault["when"] == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault["when"] == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            elif fault["when"] == "after":
                fail_after_install(text)
            else:
                raise RuntimeError(text)


def orders() -> Path:
    return Path(os.environ["WEIGHTWIRE_TEST_FAULTS"])


def ordered() -> list[dict[str, Any]]:
    faults: list[dict[str, Any]] = json.loads(orders().read_text())
    return faults


def hang(rank: int) -> None:
    orders().with_name(f"{orders().name}.{rank}").touch()
    time.sleep(600)


def fail_in_post_processing() -> None:
    """From now on post-processing in this process fails as ordered, once for each order."""
    original = PostProcessing.finish
    left: dict[str, int] = {}
    hanging: set[str] = set()
    taken_ns = 0

    def finish(self: PostProcessing, *args: Any) -> None:
        nonlocal taken_ns
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if (written_ns := orders().stat().st_mtime_ns) != taken_ns:
            taken_ns = written_ns
            faults = [fault for fault in ordered() if fault["rank"] == rank and fault["step"] in STEPS]
            left.clear()
            left.update({fault["step"]: fault["when"] for fault in faults})
            hanging.clear()
            hanging.update(fault["step"] for fault in faults if fault.get("hangs"))
        steps = [step for step, answers in STEPS.items() if isinstance(args[-1], answers)]
        for step in steps:
            if left.get(step) == 0:
                left.clear()
                if step in hanging:
                    hang(rank)
                raise RuntimeError(f"planned fault: {step} on rank {rank}")
        try:
            original(self, *args)
        finally:  # noting ends by an exception
            left.update({step: left[step] - 1 for step in steps if step in left})

    PostProcessing.finish = finish  # type: ignore[method-assign]


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
fail_in_post_processing()
