"""Fully asynchronous RL with a real engine, as its example does it: no sample is staler than it may be."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.engines.conftest import Checkpoint
from tests.support.engines import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, STALENESS = 6, 2


def test_rollouts_and_training_overlap_and_staleness_stays_within_its_bound(checkpoint: Checkpoint) -> None:
    model = checkpoint("llama", tied=False, seed=1)
    arguments = ["--model", str(model), "--steps", str(STEPS), "--max-staleness", str(STALENESS), "--lr", "1e-2"]
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "async_rl" / "run.py"), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    *steps, end = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [step["version"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert 0 <= step["staleness"] <= STALENESS
        assert all(0 <= oldest <= newest < step["version"] for oldest, newest in step["spans"]), step
    assert steps[-1]["spans"][-1][1] > 0, "later samples are made with later versions"
    assert end == {"verified": True, "served": [STEPS]}
