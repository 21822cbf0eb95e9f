"""The tests of one GPU, in memory that the host can't touch: what reads a device's memory as if it were the host's ends there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import far_memory
from tests.support.rig import PYTHON_PATH, ROOT


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_what_needs_one_device_works_where_the_host_cannot_touch_its_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-n0", "-q", "-rs", "tests/gpu/test_one_gpu.py"]
    library = tmp_path / "far_memory.so"
    far_memory.build(library)
    device = {"WEIGHTWIRE_TEST_DEVICE": "far:0", far_memory.VARIABLE: str(library)}
    environment = os.environ | device | {"PYTHONPATH": PYTHON_PATH}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= 26, done.stdout[-3000:]
