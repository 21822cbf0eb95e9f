"""What the examples do on a GPU, as far as a machine without one shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.rig import ROOT


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "trainers"))
    import common

    yield common
    sys.modules.pop("common")


def test_a_rank_has_its_own_device_before_anything_takes_the_current_one_for_it(
    common: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: done.append(("device", index)))
    monkeypatch.setattr(dist, "init_process_group", lambda backend: done.append(("group", backend)))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(sys, "argv", ["example", "model"])
    common.begin("")
    assert done == [("device", 3), ("group", "nccl")]


ENDS = """
import contextlib, os, sys, time
from pathlib import Path
sys.argv = ["example", "model"]
from common import begin, leave
import torch, torch.distributed as dist

def threads():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text())
    return [name for name in names if "gloo" in name]

begin("")
dist.all_reduce(torch.ones(1000), group=dist.new_group([0]))
before = len(threads())
leave()
deadline_s = time.monotonic() + 10  # Linux still lists a thread for a moment after it was joined
while threads() and time.monotonic() < deadline_s:
    time.sleep(0.01)
sys.exit(0 if before and not threads() else f"{before} threads of gloo before, now {threads()}")
"""


def test_an_example_has_joined_the_threads_of_its_process_groups_when_the_interpreter_ends() -> None:
    """One that runs then aborts the process: it wants the interpreter to let go of a tensor."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    paths = os.pathsep.join([str(ROOT / "examples" / "trainers"), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, "-c", ENDS],
        env=os.environ | where | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("script", ["fsdp1", "fsdp2", "fsdp2_tp", "hsdp", "lora", "megatron", "zero3"])
def test_each_example_leaves_its_process_groups(script: str) -> None:
    assert (ROOT / "examples" / "trainers" / f"{script}.py").read_text().endswith("    leave()\n")
