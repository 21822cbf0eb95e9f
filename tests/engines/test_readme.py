"""The script of the README, pasted into a file, updates a real vLLM three times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engines import Driver
from tests.support.models import make_qwen3
from tests.support.pages import blocks
from tests.support.rig import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = [[1, 5, 9, 7, 3], [4, 4, 8]]
MODEL = "Qwen/Qwen3-0.6B"


def test_the_script_and_the_status_command_of_the_readme_do_what_they_say(runtime: Path, tmp_path: Path) -> None:
    (script,) = (block.text for block in blocks(ROOT / "README.md", "python"))
    assert script.count(MODEL) == 1
    model = make_qwen3(tmp_path / "model", seed=1)  # in bfloat16, as the script's
    (tmp_path / "train.py").write_text(script.replace(MODEL, str(model)))
    with Driver(runtime) as engine:
        engine.open(model, max_model_len=1024, dtype="bfloat16")
        before = engine.tokens(PROMPTS)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ran = subprocess.run([*torchrun, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-8000:]
        assert [ran.stdout.count(f"version {version}: ") for version in (1, 2, 3)] == [2, 2, 2]
        assert engine.tokens(PROMPTS) != before
        status = [sys.executable, "-m", "weightwire", "status", "--json"]
        shown = subprocess.run(status, env=environment, capture_output=True, text=True, check=True).stdout
        assert '"version": 3' in json.dumps(json.loads(shown))
