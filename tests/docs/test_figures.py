"""The measured figures in README and docs/benchmarks.md are those of benchmarks/results/*.json."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmarks.plots import RESULTS
from benchmarks.tables import FIGURES, PAGES, rewritten


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_figures_of_a_page_are_those_of_the_committed_results(page: Path) -> None:
    text = page.read_text()
    assert rewritten(text) == text, "`make plots` writes them again"


def test_every_figure_stands_on_one_page_and_every_mark_has_its_end() -> None:
    text = "".join(page.read_text() for page in PAGES)
    named = re.findall(r"<!-- measured: ([\w-]+) -->", text)
    assert sorted(named) == sorted(FIGURES) and text.count("<!-- end -->") == len(named)


def test_a_page_is_found_wrong_if_a_result_changes(tmp_path: Path) -> None:
    for file, _ in FIGURES.values():
        shutil.copy(RESULTS / f"{file}.json", tmp_path)
    text = "before\n<!-- measured: headline -->\n0.20 s\n<!-- end -->\nafter"
    here, there = rewritten(text), rewritten(text, tmp_path)
    assert here == there != text and here.startswith("before\n<!--") and here.endswith("\n<!-- end -->\nafter")
    update = tmp_path / "update.json"
    update.write_text(update.read_text().replace('"seconds": ', '"seconds": 1'))
    assert rewritten(text, tmp_path) != here
