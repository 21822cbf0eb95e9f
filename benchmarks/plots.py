"""Draws the benchmarks' pictures from benchmarks/results/*.json alone: `make plots`. `make bench` calls it at its end.

update-light.svg, update-dark.svg   the README's chart: one case, our ways beside the engine's own
update-<engine>.svg                 the same for every case of an engine
batch.png, scale.png                by batch.py and scale.py
timeline.svg                        decoding steps while an update arrives, and the gap of its commit
trace.svg                           who does what during one update, drawn from its traces
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PLAIN_COPY = "plain memory copy"

Row = dict[str, Any]

LABELS = {
    "weightwire zone": "Weightwire, zones",
    "weightwire shm": "Weightwire, a segment",
    "weightwire zmq": "Weightwire, sockets",
    "per-tensor full_tensor + gloo broadcast + load_weights": "broadcast per tensor",
    "bucketed gloo broadcast + load_weights": "broadcast in buckets",
    "save safetensors + engine reload": "through a file",
    "update_weights_from_tensor, flattened buckets": "update_weights_from_tensor",
    "update_weights_from_distributed, flattened buckets, gloo": "update_weights_from_distributed",
    "save safetensors + update_weights_from_disk": "update_weights_from_disk",
    PLAIN_COPY: "one memory copy",
}
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


@dataclass(frozen=True)
class Theme:
    """Colours of a picture; each means one thing in all of them."""

    paper: str
    ink: str
    faint: str
    ours: str
    others: str
    copy: str
    stopped: str
    steps: tuple[str, str]


LIGHT = Theme("#ffffff", "#1f2328", "#d0d7de", "#0969da", "#9a6700", "#6e7781", "#cf222e", ("#b6e3ff", "#80ccff"))
DARK = Theme("#0d1117", "#e6edf3", "#30363d", "#58a6ff", "#d29922", "#8b949e", "#ff7b72", ("#0c4a8a", "#1f6feb"))
PHASES = {"scan": "#57606a", "agree": "#57606a", "stage": "#0969da", "seal": "#1a7f37", "commit": "#8250df"}
OTHER_SPANS = "#6e7781"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    results = parser.parse_args().results
    from benchmarks import batch, scale  # they import what they measure; only this command needs both

    for path in draw_all(results):
        print(path)
    for name, plot in (("batch", batch.plot), ("scale", scale.plot)):
        if (file := results / f"{name}.json").exists():
            plot(json.loads(file.read_text()), results / f"{name}.png")
            print(results / f"{name}.png")


def draw_all(results: Path) -> list[Path]:
    """Every picture whose numbers are in `results`; returns the files."""
    drawn = []
    if (file := results / "update.json").exists():
        by_engine = _by_engine(json.loads(file.read_text()))
        first = next(iter(by_engine.values()))
        for name, theme in (("light", LIGHT), ("dark", DARK)):
            drawn.append(draw_update(first, cases(first)[:1], results / f"update-{name}.svg", theme, brief=True))
        for engine, own in by_engine.items():
            drawn.append(draw_update(own, cases(own), results / f"update-{engine}.svg", LIGHT))
    if (file := results / "timeline.json").exists():
        by_engine = _by_engine(json.loads(file.read_text()))
        drawn.append(draw_timeline([run for own in by_engine.values() for run in own], results / "timeline.svg"))
        drawn.append(draw_trace(next(iter(by_engine.values()))[-1], results / "trace.svg"))
    return drawn


def _by_engine(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each engine that there are, in the order of `ENGINES`."""
    found = {engine: [row for row in rows if row["engine"] == engine] for engine in ENGINES}
    return {engine: own for engine, own in found.items() if own}


def cases(rows: list[Row]) -> list[tuple[int, str]]:
    """The layouts of the rows, one rank and the layout of a GPU first."""
    return sorted({(row["tp"], row["layout"]) for row in rows}, key=lambda case: (case[1] != "plain", case[0]))


def draw_update(
    rows: list[Row], shown: list[tuple[int, str]], path: Path, theme: Theme, *, brief: bool = False
) -> Path:
    """Seconds of an update, and of the stop within it, on linear axes that begin at 0. `brief`: our ways over shm only."""
    own = [[row for row in rows if (row["tp"], row["layout"]) == case] for case in shown]
    if brief:
        own = [[row for row in each if row["way"] != "weightwire zmq"] for each in own]
    heights = [0.34 * len(each) + 0.75 for each in own]
    figure, axes = _figure(len(own), 2, (9.6, sum(heights) + 0.45), theme, height_ratios=heights)
    for pair, each, (tp, layout) in zip(axes, own, shown, strict=True):
        for axis, value, title in zip(
            pair, ("seconds", "stopped_s"), ("whole update", "generation stopped"), strict=True
        ):
            # A copy of the bytes is the lower limit of an update; it stops nothing.
            bars = [0.0 if row["way"] == PLAIN_COPY and value == "stopped_s" else row[value] for row in each]
            axis.barh(range(len(each)), bars, color=[_colour(row, theme) for row in each], height=0.66)
            for place, (row, seconds) in enumerate(zip(each, bars, strict=True)):
                if seconds:
                    note = "" if row.get("exact", True) else " (wrong tokens)"
                    axis.text(seconds, place, f"  {_seconds(seconds)}{note}", va="center", color=theme.ink, fontsize=9)
            if value == "seconds" and not brief:
                title = f"{ENGINES[each[0]['engine']]}, {tp} rank{'s' * (tp > 1)}, {layout} layout: {title}"
            axis.set_title(title, loc="left", fontsize=10, color=theme.ink)
            axis.set_xlim(0, 1.28 * max(bars))
            axis.set_yticks(range(len(each)), [_label(row) for row in each] if value == "seconds" else [])
            axis.invert_yaxis()
            _bare(axis, theme)
            axis.xaxis.set_visible(False)
    head = own[0][0]
    about = f"{head['bytes'] / 1e9:.2f} GB from two FSDP2 ranks into {ENGINES[head['engine']]} on the same 2-core host, no GPU"
    figure.text(0.01, 0.01, f"{about}; medians", fontsize=8, color=theme.copy)
    return _save(figure, path, theme)


def draw_timeline(runs: list[Row], path: Path) -> Path:
    """Decoding steps beside an update, one panel for each policy: where no step runs, generation is stopped."""
    figure, axes = _figure(len(runs), 1, (9.6, 1.75 * len(runs) + 0.5), LIGHT)
    for (axis,), run in zip(axes, runs, strict=True):
        stops = [(span["start_s"], span["seconds"]) for span in run["spans"] if span["name"] == "stopped"]
        begin_s, end_s = _window(run)
        for place, step in enumerate(zip(run["steps"], run["steps"][1:], strict=False)):
            for start_s, until_s in outside(step, stops):
                axis.barh(0, until_s - start_s, left=start_s, height=0.7, color=LIGHT.steps[place % 2])
        for start_s, seconds in stops:
            axis.barh(0, seconds, left=start_s, height=0.7, color=LIGHT.stopped)
            axis.annotate(
                f"stopped {_seconds(seconds)}",
                (start_s + seconds / 2, -0.36),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=LIGHT.stopped,
            )
        for span in _phases(run):
            axis.barh(1, span["seconds"], left=span["start_s"], height=0.5, color=PHASES[span["name"]])
            if _fits(span, end_s - begin_s):
                axis.text(
                    span["start_s"] + span["seconds"] / 2,
                    1,
                    span["name"],
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=9,
                )
        axis.set_xlim(begin_s, end_s)
        axis.set_ylim(1.5, -0.95)
        axis.set_yticks([0, 1], ["decoding steps", "update"])
        title = f'{ENGINES[run["engine"]]}, {run["bytes"] / 1e9:.2f} GB, install="{run["install"]}"'
        axis.set_title(title, loc="left", fontsize=10, color=LIGHT.ink)
        _bare(axis, LIGHT)
    axes[-1][0].set_xlabel("seconds since the trainer called update()", color=LIGHT.ink, fontsize=9)
    return _save(figure, path, LIGHT)


def draw_trace(run: Row, path: Path) -> Path:
    """The spans of an update's traces: a line for each thread or track, those of a process together."""
    begin_s, end_s = 0.0, max(span["start_s"] + span["seconds"] for span in run["spans"])
    lanes: dict[tuple[str, int], list[Row]] = {}
    for process in dict.fromkeys(span["process"] for span in run["spans"]):
        own = sorted((s for s in run["spans"] if s["process"] == process), key=lambda s: (s["start_s"], -s["seconds"]))
        free_s: list[float] = []  # of each line of this process: when its last span ends
        for span in own:
            line = next((i for i, until_s in enumerate(free_s) if until_s <= span["start_s"]), len(free_s))
            free_s[line : line + 1] = [span["start_s"] + span["seconds"]]
            lanes.setdefault((process, line), []).append(span)
    ordered = sorted(lanes, key=lambda lane: (not lane[0].startswith("trainer"), lane))
    figure, ((axis,),) = _figure(1, 1, (9.6, 0.3 * len(ordered) + 0.9), LIGHT)
    for place, lane in enumerate(ordered):
        for span in lanes[lane]:
            colour = LIGHT.stopped if span["name"] == "stopped" else PHASES.get(span["name"], OTHER_SPANS)
            axis.barh(place, span["seconds"], left=span["start_s"], height=0.8, color=colour, edgecolor="white", lw=0.5)
            if _fits(span, end_s - begin_s):
                axis.text(
                    span["start_s"] + span["seconds"] / 2,
                    place,
                    span["name"],
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=8,
                )
    axis.set_yticks(range(len(ordered)), [lane[0] if lane[1] == 0 else "" for lane in ordered])
    axis.set_xlim(begin_s, end_s)
    axis.invert_yaxis()
    axis.set_xlabel("seconds since the trainer called update()", color=LIGHT.ink, fontsize=9)
    _bare(axis, LIGHT)
    return _save(figure, path, LIGHT)


def outside(step: tuple[float, float], stops: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What is left of a step, which lasts from the end of the one before to its own, without the stops in it."""
    left = [step]
    for start_s, seconds in stops:
        left = [part for s, e in left for part in ((s, min(e, start_s)), (max(s, start_s + seconds), e))]
    return [(start_s, until_s) for start_s, until_s in left if until_s > start_s]


def _phases(run: Row) -> list[Row]:
    """Rank 0's, each once: its trace also has a `seal` per replica."""
    own = [span for span in run["spans"] if span["process"] == "trainer rank 0" and span["name"] in PHASES]
    return list({span["name"]: span for span in own}.values())


def _fits(span: Row, shown_s: float) -> bool:
    """Whether a span is wide enough for its name."""
    return bool(span["seconds"] > 0.012 * len(span["name"]) * shown_s)


def _window(run: Row) -> tuple[float, float]:
    """The update, and as much as half of its length on both sides."""
    end_s = max(span["start_s"] + span["seconds"] for span in _phases(run))
    return -0.5 * end_s, 1.5 * end_s


def _label(row: Row) -> str:
    label = LABELS.get(row["way"], row["way"])
    return f"{label} ({row['install']})" if row["way"].startswith("weightwire") else label


def _colour(row: Row, theme: Theme) -> str:
    if row["way"] == PLAIN_COPY:
        return theme.copy
    return theme.ours if row["way"].startswith("weightwire") else theme.others


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.0f} ms"


def _figure(rows: int, columns: int, size: tuple[float, float], theme: Theme, **grid: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "weightwire"  # the same numbers give the same file
    matplotlib.rcParams["svg.fonttype"] = "path"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, gridspec_kw=grid)
    figure.patch.set_facecolor(theme.paper)
    return figure, axes


def _bare(axis: Any, theme: Theme) -> None:
    axis.set_facecolor(theme.paper)
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)
    axis.spines["left"].set_color(theme.faint)
    axis.tick_params(colors=theme.ink, labelsize=9, length=0)


def _save(figure: Any, path: Path, theme: Theme) -> Path:
    from matplotlib import pyplot

    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, facecolor=theme.paper, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    main()
