"""The programs in docs/batch.md run as they stand."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rig import ROOT, runtime

PROGRAMS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/batch.md").read_text(), re.DOTALL | re.MULTILINE)


def program(word: str) -> str:
    (found,) = (text for text in PROGRAMS if word in text)
    return found


@pytest.mark.parametrize("word", ["def main()", "whole.clear()", "store.empty("])
def test_a_program_of_the_page_runs_as_it_stands(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "program.py"
    path.write_text(program(word))
    with runtime(monkeypatch) as directory:
        ran = subprocess.run(
            [sys.executable, str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        assert "weightwire" not in ran.stderr and not list(directory.rglob("*.[bp]")), (
            "it left a socket behind, or something was logged"
        )
    if word == "def main()":
        lines = ran.stdout.splitlines()
        assert lines[1::2] == ["8 cleared, 0 unknown"] * 3
        for version, line in enumerate(lines[::2]):
            assert "REMOTE, 32 rows, {input_ids: int64[*], rewards: float32[], prompt: values}" in line
            assert line.endswith(f"versions {version})")


def test_the_other_programs_of_the_page_are_at_least_python() -> None:
    assert len(PROGRAMS) == 5
    for text in PROGRAMS:
        ast.parse(text)
