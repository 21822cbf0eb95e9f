"""The demo's picture: the reward of each version that was served, and where the seconds of its update went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_training"]

PHASES = {"agree": "#57606a", "stage": "#0969da", "seal": "#1a7f37", "commit": "#8250df"}
STOPPED = "#cf222e"


def draw_training(steps: Sequence[dict[str, Any]], rewards: Sequence[float], path: Path) -> None:
    """Writes an SVG. `steps`: what the trainer told of each; `rewards`: of version 0, the untrained one, and of each after it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (learned, updates) = pyplot.subplots(2, 1, figsize=(8, 5.5), sharex=True, constrained_layout=True)
    learned.plot(range(len(rewards)), rewards, marker="o", color="#0969da")
    for version, reward in enumerate(rewards):
        learned.annotate(f"{reward:.2f}", (version, reward), (0, 7), textcoords="offset points", ha="center")
    learned.set_ylim(0, max(1.0, *rewards) * 1.15)
    learned.set_ylabel("reward of its answers")
    learned.set_title("What each version that the engine served had learned")

    versions = [step["step"] for step in steps]
    below = [0.0] * len(steps)
    for phase, colour in PHASES.items():
        seconds = [step["phases"].get(phase, 0.0) for step in steps]
        updates.bar(versions, seconds, bottom=below, width=0.5, color=colour, label=phase)
        below = [low + more for low, more in zip(below, seconds, strict=True)]
    for step, top in zip(steps, below, strict=True):
        stop = f"stopped {step['stopped_s'] * 1000:.0f} ms"
        updates.annotate(stop, (step["step"], top), (0, 4), textcoords="offset points", ha="center", color=STOPPED)
    updates.set_ylim(0, max(below, default=1.0) * 1.2)
    updates.set_ylabel("seconds of its update")
    updates.set_xlabel("version")
    updates.set_xticks(range(len(rewards)))
    updates.legend(loc="upper left", ncols=len(PHASES), frameon=False)
    figure.savefig(path)
    pyplot.close(figure)
