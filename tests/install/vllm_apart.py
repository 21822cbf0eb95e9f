"""Runs a module that works with vLLM's own classes, in an interpreter of its own: they are registered once per process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["told_by"]

ROOT = Path(__file__).parents[2]


def told_by(module: str) -> dict[str, Any]:
    """What the module printed in its last line, as JSON."""
    run = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env=os.environ | {"VLLM_PLUGINS": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found
