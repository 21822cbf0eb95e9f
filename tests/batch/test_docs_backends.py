"""The programs in docs/batch_backends.md run as they stand, each with a Ray of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rig import ROOT, runtime

pytestmark = [pytest.mark.slow, pytest.mark.full]

PAGE = (ROOT / "docs" / "batch_backends.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TOLD = {
    "store.put(": ["DistributedBatch(REMOTE, 4 rows", "12", "1 cleared, 0 unknown"],
    "class Rollouts": ["DistributedBatch(LOCAL, 32 rows", "8 cleared, 0 unknown"],
    "kv_batch_put": ["12"],
}
"""How a program is found, and how the lines begin that it prints."""


@pytest.mark.parametrize("word", list(TOLD))
def test_a_program_of_the_page_runs_as_it_stands(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = (text for text in PROGRAMS if word in text)
    path = tmp_path / "program.py"
    path.write_text(program)
    with runtime(monkeypatch):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ran = subprocess.run([sys.executable, path], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-6000:]
    lines = ran.stdout.splitlines()
    found = [next((line for line in lines if line.startswith(begin)), None) for begin in TOLD[word]]
    assert None not in found, ran.stdout


def test_every_program_of_the_page_is_run() -> None:
    assert len(PROGRAMS) == len(TOLD)
