"""What the examples share (`examples/rl_smollm2/server.py`): whatever ends one, nothing that it started goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rig import ROOT, eventually, gone

SHARED = ROOT / "examples" / "rl_smollm2"
PROGRAM = """
import json, signal, sys, time
from server import DemoError, job_directory, own_process

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under `nohup`
with job_directory("ww-example-") as directory:
    with own_process([sys.executable, "-c", "import time; time.sleep(600)"], directory / "log", {}) as process:
        print(json.dumps([process.pid, str(directory)]), flush=True)
        if sys.argv[1] == "fails":
            raise DemoError("the test says so")
        time.sleep(600)
"""


@pytest.mark.parametrize("end", ["SIGTERM", "SIGHUP", "fails"])
def test_an_example_that_is_ended_or_fails_leaves_no_process_and_keeps_its_logs_where_it_failed(end: str) -> None:
    example = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, end], cwd=SHARED, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert example.stdout is not None
    pid, directory = json.loads(example.stdout.readline())
    if end != "fails":
        example.send_signal(getattr(signal, end))
    _, said = example.communicate(timeout=300)
    assert example.returncode == 1
    eventually(lambda: gone(pid), "the end of what the example started")
    failed = end == "fails"
    assert said.splitlines() == (
        [f"logs: {directory}", "failed: the test says so"]
        if failed
        else ["interrupted; everything that was started is stopped"]
    )
    assert Path(directory).exists() == failed
    if failed:
        (Path(directory) / "log").unlink()
        Path(directory).rmdir()
