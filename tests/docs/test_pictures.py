"""The demo's picture, and the benchmarks': drawn from the JSON files alone, on axes that begin at 0, and as committed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from matplotlib import pyplot

from benchmarks import plots
from tests.support.rig import ROOT

RESULTS = plots.RESULTS


@pytest.fixture
def drawn(tmp_path: Path) -> dict[str, Path]:
    for name in ("update", "timeline"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    return {path.name: path for path in plots.draw_all(tmp_path)}


def test_the_committed_pictures_show_the_committed_numbers(drawn: dict[str, Path]) -> None:
    assert sorted(drawn) == [
        "timeline.svg",
        "trace.svg",
        "update-dark.svg",
        "update-light.svg",
        "update-sglang.svg",
        "update-vllm.svg",
    ]
    stale = [name for name, path in drawn.items() if path.read_text() != (RESULTS / name).read_text()]
    assert stale == [], "`make plots` draws them again"


def test_bars_begin_at_0_carry_their_value_and_the_copy_has_a_colour_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    rows = [row for row in json.loads((RESULTS / "update.json").read_text()) if row["engine"] == "vllm"]
    plots.draw_update(rows, plots.cases(rows)[:1], tmp_path / "chart.svg", plots.LIGHT)
    (figure,) = kept
    whole, stopped = figure.axes
    own = [row for row in rows if (row["tp"], row["layout"]) == plots.cases(rows)[0]]
    for axis, value in ((whole, "seconds"), (stopped, "stopped_s")):
        assert axis.get_xscale() == "linear" and axis.get_xlim()[0] == 0 and axis.get_legend() is None
        shown = [row for row in own if value == "seconds" or row["way"] != plots.PLAIN_COPY]
        assert len(axis.texts) == len(shown)
    colours = {row["way"]: bar.get_facecolor() for row, bar in zip(own, whole.patches, strict=True)}
    copy = colours.pop(plots.PLAIN_COPY)
    assert copy not in colours.values() and len(set(colours.values())) == 2


def test_a_stop_is_cut_out_of_the_steps_around_it() -> None:
    cut = plots.outside((1.0, 2.0), [(0.5, 0.7), (1.9, 0.5)])
    assert cut == [(1.2, 1.9)]
    assert plots.outside((1.0, 2.0), [(1.4, 0.1)]) == [(1.0, 1.4), (1.5, 2.0)]
    assert plots.outside((1.0, 2.0), []) == [(1.0, 2.0)]


def test_the_demo_draws_reward_and_phases_of_each_version_that_was_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "rl_smollm2"))
    from picture import PHASES, draw_training

    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    phases = {"agree": 0.1, "stage": 0.2, "seal": 0.3, "commit": 0.4}
    steps = [{"step": version, "phases": phases, "stopped_s": 0.005 * version} for version in (1, 2)]
    draw_training(steps, [0.1, 0.4, 0.6], tmp_path / "training.svg")
    assert (tmp_path / "training.svg").read_text().startswith("<?xml")
    ((learned, updates),) = [figure.axes for figure in kept]
    assert [list(line.get_ydata()) for line in learned.lines] == [[0.1, 0.4, 0.6]]
    heights = [bar.get_height() for bar in updates.patches]
    assert heights == pytest.approx([phases[name] for name in PHASES for _ in steps])
    assert [text.get_text() for text in updates.texts] == ["stopped 5 ms", "stopped 10 ms"]
    assert learned.get_ylim()[0] == updates.get_ylim()[0] == 0
