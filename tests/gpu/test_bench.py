"""`make bench-gpu` in the host's memory: that the program is in order before there is a GPU. Its figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rig import PYTHON_PATH, ROOT
from tests.support.shared_host import can_be_built


@pytest.mark.skipif(not can_be_built(), reason="needs a C compiler")
def test_the_benchmark_of_a_gpu_runs_on_a_cpu_and_what_it_installs_is_right(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--runs", "1", "--updates", "3", "--kills", "1"]
    environment = os.environ | {"WEIGHTWIRE_TEST_DEVICE": "cpu", "PYTHONPATH": PYTHON_PATH}
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=600)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["transport"] for row in found["updates"]] == ["cuda_ipc", "shm"]
    assert all(row["verified"] for row in [*found["updates"], *found["kills"], found["leak"]])
