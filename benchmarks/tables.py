"""Writes the measured figures into README and docs/benchmarks.md from benchmarks/results/*.json: `make plots`.

A figure stands between `<!-- measured: NAME -->` and `<!-- end -->`; NAME is one of `FIGURES`. Text outside of these marks is not
changed: read it again after a measurement.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plots import PLAIN_COPY, RESULTS, cases

__all__ = ["FIGURES", "PAGES", "rewritten"]

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
Row = dict[str, Any]

_MARKED = re.compile(r"(<!-- measured: (?P<name>[\w-]+) -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)

WAYS = {
    "weightwire zone": "Weightwire zone",
    "weightwire shm": "Weightwire shm",
    "weightwire zmq": "Weightwire zmq",
    "weightwire stream": "Weightwire stream",
    "per-tensor full_tensor + gloo broadcast + load_weights": "`full_tensor` per tensor, gloo, `load_weights`",
    "bucketed gloo broadcast + load_weights": "gloo in buckets, `load_weights`",
    "save safetensors + engine reload": "safetensors to disk, engine's reload",
    "update_weights_from_tensor, flattened buckets": "`update_weights_from_tensor`, flattened buckets",
    "update_weights_from_distributed, flattened buckets, gloo": "`update_weights_from_distributed`, flattened buckets, gloo",
    "save safetensors + update_weights_from_disk": "safetensors to disk, `update_weights_from_disk`",
    "engine's reload from disk": "vLLM's reload; writing its file is not counted",
    PLAIN_COPY: "one memory copy",
}
GATHERING = {
    "summon_full_params per unit": "`summon_full_params` per unit",
    "full_tensor per parameter": "`full_tensor()`",
    "Megatron-Bridge export": "Megatron-Bridge's export",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    results = parser.parse_args().results
    for page in PAGES:
        before = page.read_text()
        after = rewritten(before, results)
        page.write_text(after)
        print(f"{page.relative_to(ROOT)}: {'unchanged' if after == before else 'written'}")


def rewritten(text: str, results: Path = RESULTS) -> str:
    """A page's text with its measured figures as the results say. Raises `KeyError` for a name that is none of `FIGURES`."""

    def figure(match: re.Match[str]) -> str:
        file, make = FIGURES[match["name"]]
        return match[1] + make(json.loads((results / f"{file}.json").read_text())) + "\n"

    return _MARKED.sub(figure, text)


# --- updates of an engine ---------------------------------------------------------------------------------------------


def headline(rows: list[Row]) -> str:
    """The README's sentence: the first case of vLLM, by the fastest of our ways that swaps, and tensor by tensor."""
    own = _first_case(rows, "vllm")
    ours = min((row for row in own if row["install"] == "standby"), key=lambda row: row["seconds"])
    theirs = next(row for row in own if row["way"].startswith("per-tensor"))
    return (
        f"1 GB from two FSDP2 ranks into vLLM on the same host takes {ours['seconds']:.2f} s, and generation stops for\n"
        f"{_ms(ours['stopped_s'])} of it. Tensor by tensor over gloo it takes {theirs['seconds']:.1f} s, "
        "and generation stops for all of it\n"
        "([measured](docs/benchmarks.md) on 2 cores, without a GPU)."
    )


def updates(engine: str) -> Callable[[list[Row]], str]:
    def table(rows: list[Row]) -> str:
        own = [row for row in rows if row["engine"] == engine]
        found = cases(own)
        several = len({layout for _, layout in found}) > 1
        names = [f"TP{tp} {layout}" if several else f"TP{tp}" for tp, layout in found]
        columns = ["way", "install", *(f"{name}: {what}" for name in names for what in ("update", "stopped"))]
        lines = []
        for way, install in _ways(own):
            cells = [WAYS[way], "" if way == PLAIN_COPY else install]
            for case in found:
                here = [row for row in own if (row["tp"], row["layout"]) == case]
                row = next((row for row in here if (row["way"], row["install"]) == (way, install)), None)
                cells += _update_cells(row, here)
            lines.append(cells)
        return _table(columns, lines)

    return table


def faster(engine: str) -> Callable[[list[Row]], str]:
    """How our ways compare with the engine's own, over all cases of the plain layout."""

    def sentence(rows: list[Row]) -> str:
        own = [row for row in rows if row["engine"] == engine and row["layout"] == "plain"]
        told = []
        for transport in ("zone", "shm", "zmq"):
            ratios = []
            for case in cases(own):
                here = [row for row in own if (row["tp"], row["layout"]) == case]
                ours = [row["seconds"] for row in here if row["way"] == f"weightwire {transport}"]
                if ours:
                    ratios.append(min(row["seconds"] for row in here if row["install"] == "engine") / min(ours))
            if ratios:
                told.append(f"{_range(ratios)} times (`{transport}`)")
        return (
            f"- In the plain layout an update is faster than the fastest of the engine's own ways: {', '.join(told)}."
        )

    return sentence


def messages(rows: list[Row]) -> str:
    own = [row for row in rows if (row["engine"], row["layout"], row["way"]) == ("vllm", "plain", "weightwire shm")]
    told = [f"{row['messages']:.0f} per update with TP{row['tp']}" for row in own if row["install"] == "standby"]
    return f"- Control messages: {', '.join(told)}, whatever the number of tensors."


def decoding(engine: str) -> Callable[[list[Row]], str]:
    def sentence(rows: list[Row]) -> str:
        slower = [row["slowdown"] for row in rows if row["engine"] == engine]
        return f"- A decoding step takes {_range(slower, 1)} times as long while a standby is prepared beside it."

    return sentence


# --- the other measurements -------------------------------------------------------------------------------------------


def replicas(rows: list[Row]) -> str:
    lines = [
        [
            str(row["replicas"]),
            row["way"],
            f"{row['seconds']:.3f} s ({row['seconds'] / row['copy_s']:.1f}x)",
            f"{row['released_s']:.3f} s",
            _ms(row["stopped_s"]),
            f"{row['held_bytes'] / 1e6:.0f} MB",
        ]
        for row in rows
    ]
    return _table(["replicas", "way", "update", "the trainer waits", "stopped", "held"], lines)


def network(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        way, _, share = row["way"].partition(" ")
        changed = f"`delta`, {float(share) * 100:g} % changed" if way == "delta" else ""
        said = {"zmq": "`zmq`", "nixl": "`nixl` (UCX's TCP)", "delta": changed}
        lines.append(
            [
                f"{row['gbit']:g} Gbit/s",
                said.get(way, WAYS["bucketed gloo broadcast + load_weights"]),
                f"{row['seconds']:.2f} s",
                _ms(row["stopped_s"]),
                f"{row['sent_bytes'] / 1e6:.0f} MB",
            ]
        )
    return _table(["link", "way", "update", "stopped", "sent"], lines)


def reloads(rows: list[Row]) -> str:
    lines = [
        [
            row["model"],
            WAYS.get(row["way"], row["way"]),
            f"{row['seconds']:.2f} s ({row['seconds'] / row['copy_s']:.1f}x)",
            _ms(row["stopped_s"]),
            f"{row['slowdown']:.2f}x" if row.get("slowdown") else "",
            "yes" if row["exact"] else "**no**",
        ]
        for row in rows
    ]
    columns = ["model", "way", "update", "stopped", "a decoding step meanwhile", "answers as a fresh engine"]
    return _table(columns, lines)


def trainers(rows: list[Row]) -> str:
    lines = []
    for adapter, ranks in dict.fromkeys((row["adapter"], row["ranks"]) for row in rows):
        own = {row["way"]: row["seconds"] for row in rows if (row["adapter"], row["ranks"]) == (adapter, ranks)}
        name = adapter if ranks == 2 else f"{adapter}, {ranks} ranks on the two cores"
        way = next(way for way in own if way in GATHERING)
        slices = f"{own['slices']:.3f} s ({own['slices'] / own['memory copy']:.1f}x)"
        lines.append([name, slices, f"{own[way]:.2f} s ({GATHERING[way]})", f"{own['gathered']:.2f} s"])
    return _table(["trainer", "slices", "gathering, as its users do it", "our own gathering"], lines)


def batches(rows: list[Row]) -> str:
    own = [row for row in rows if row["kind"] == "rows"]
    (least_s,) = (row["put_seconds"] + row["fetch_seconds"] for row in rows if row["kind"] == "bound")
    ways = {
        "msgpack over zmq": "through the controller with msgpack",
        "Ray object store": "Ray's object store",
        "TransferQueue": "TransferQueue's own storage",
    }
    ours = {"weightwire": "Weightwire", "weightwire, built in place": "the same, built in place"}
    ours = {way: said for way, said in ours.items() if any(row["way"] == way for row in own)}
    lines = []
    for per_put in dict.fromkeys(row["rows_per_put"] for row in own):
        here = {row["way"]: row for row in own if row["rows_per_put"] == per_put}
        cells = [str(per_put), *(f"{here[way]['put_seconds']:.3f} + {here[way]['fetch_seconds']:.3f}" for way in ours)]
        for way in ways:
            row = here[way]
            ratio, most = row["seconds"] / here["weightwire"]["seconds"], row["seconds"] / least_s
            cells.append(f"{row['put_seconds']:.2f} + {row['fetch_seconds']:.2f} ({ratio:.1f}x of {most:.1f}x)")
        lines.append(cells)
    return _table(["rows per put", *ours.values(), *ways.values()], lines)


FIGURES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "headline": ("update", headline),
    "update-vllm": ("update", updates("vllm")),
    "update-sglang": ("update", updates("sglang")),
    "faster-vllm": ("update", faster("vllm")),
    "faster-sglang": ("update", faster("sglang")),
    "messages": ("update", messages),
    "decoding-vllm": ("decoding", decoding("vllm")),
    "decoding-sglang": ("decoding", decoding("sglang")),
    "replicas": ("replicas", replicas),
    "network": ("network", network),
    "reload": ("reload", reloads),
    "trainers": ("trainers", trainers),
    "batch": ("batch", batches),
}
"""What a name stands for: the file of its numbers, and its text."""


# --- helpers ----------------------------------------------------------------------------------------------------------


def _first_case(rows: list[Row], engine: str) -> list[Row]:
    own = [row for row in rows if row["engine"] == engine]
    case = cases(own)[0]
    return [row for row in own if (row["tp"], row["layout"]) == case]


def _ways(rows: list[Row]) -> list[tuple[str, str]]:
    """In the order of `WAYS`; the copy, which all are compared with, first."""
    found = dict.fromkeys((row["way"], row["install"]) for row in rows)
    return sorted(found, key=lambda way: (way[0] != PLAIN_COPY, list(WAYS).index(way[0])))


def _update_cells(row: Row | None, case: list[Row]) -> list[str]:
    """The update and the stop, both also in copies of the same bytes in the same run; one mark where the answers were wrong."""
    if row is None:
        return ["", ""]
    if row["way"] == PLAIN_COPY:
        return [_ms(row["seconds"]), ""]
    copy_s = next(each["seconds"] for each in case if each["way"] == PLAIN_COPY)
    wrong = " (wrong)" if row.get("exact") is False else ""
    whole = f"{row['seconds']:.2f} s ({_times(row['seconds'] / copy_s)}){wrong}"
    stopped = row["stopped_s"] / copy_s
    return [whole, _ms(row["stopped_s"]) + (f" ({_times(stopped)})" if stopped >= 0.1 else "")]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


def _range(values: list[float], digits: int = 0) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _table(columns: list[str], lines: list[list[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(cells).strip() + " |" for cells in rows)


if __name__ == "__main__":
    main()
