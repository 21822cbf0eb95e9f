"""One update, our ways beside those that users have otherwise, in turn, in one run. `make bench` calls this.

A 506 M-parameter Qwen3 in bf16 (1.01 GB), FSDP2 on two gloo ranks, a real engine with TP1 and TP2 on the same host.
Writes into benchmarks/results: update.json (medians), decoding.json (what a standby in preparation costs the decoding
beside it) and timeline.json (decoding steps and traces of single updates), in which it replaces the rows of the cases that it
measured; and their pictures (benchmarks/plots.py).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks.engines.base import Engine
from benchmarks.engines.registry import ENGINES
from benchmarks.measure import Row, measure, measure_decoding
from benchmarks.model import make_model
from benchmarks.plots import draw_all
from benchmarks.processes import ROOT, Remote, end_by_signals, start_trainer
from benchmarks.reload import measure_reloads, show_reloads, write_reloads
from benchmarks.report import merge, show
from benchmarks.timeline import measure_timeline

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--layout", nargs="*", help="vLLM: plain, packed or both")
    parser.add_argument("--layers", type=int, default=28, help="28 gives 506 M parameters")
    parser.add_argument("--ways", default="", help="only ways whose name contains this")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--decoding", action="store_true", help="only what a standby costs the decoding beside it")
    parser.add_argument(
        "--timeline", action="store_true", help="only the time line of single updates, in the first case"
    )
    parser.add_argument(
        "--models",
        nargs="?",
        const="",
        metavar="PART",
        help="vLLM: only quantised models and a mixture of experts; or of these only one whose name contains PART",
    )
    arguments = parser.parse_args()
    kind = ENGINES[arguments.engine]
    end_by_signals()
    if arguments.models is not None:
        if kind.name != "vllm":
            parser.error("--models measures vLLM: leave ENGINE out")
        bench_models(arguments)
        return
    model = make_model(arguments.layers)
    rows: list[Row] = []
    decoding: list[Row] = []
    cases = [(tp, layout) for tp in arguments.tp for layout in arguments.layout or kind.layouts]
    for tp, layout in [] if arguments.timeline else cases:
        case = {"engine": kind.name, "tp": tp, "layout": layout}
        console.print(f"starting {kind.title} tp={tp}, {layout} layout, and a trainer on 2 ranks ...")
        with processes(kind, model, tp, layout) as (engine, trainer):
            if not arguments.decoding:
                rows += measure(engine, trainer, case, arguments.runs, arguments.ways, console.print)
            decoding.append(measure_decoding(engine, trainer, case))
        write(arguments.out, update=rows, decoding=decoding)
    if not arguments.decoding:
        tp, layout = cases[0]
        console.print(f"starting {kind.title} tp={tp}, {layout} layout, with traces ...")
        with tempfile.TemporaryDirectory() as traces, processes(kind, model, tp, layout, traces) as (engine, trainer):
            case = {"engine": kind.name, "tp": tp, "layout": layout}
            write(arguments.out, timeline=measure_timeline(engine, trainer, case, Path(traces)))
    show(console, kind.title, rows, decoding)
    draw_all(arguments.out)
    console.print(f"written to {arguments.out}")
    if kind.name == "vllm" and not (arguments.decoding or arguments.timeline or arguments.ways):
        bench_models(arguments)


def bench_models(arguments: argparse.Namespace) -> None:
    rows = measure_reloads(arguments.runs, arguments.models or "", console)
    write_reloads(arguments.out, rows)
    show_reloads(console, rows)


def write(out: Path, **measured: list[Row]) -> None:
    """Writes what was measured so far: a run that is broken off has the cases that it ended."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in measured.items():
        if rows:
            merge(out / f"{name}.json", rows)


@contextmanager
def processes(
    kind: type[Engine], model: Path, tp: int, layout: str, traces: str = ""
) -> Iterator[tuple[Engine, Remote]]:
    """An engine and a trainer that find each other in a runtime directory of their own; `traces` is where they leave theirs."""
    with tempfile.TemporaryDirectory(prefix="ww-bench-", ignore_cleanup_errors=True) as directory:
        scratch = Path(directory)
        environment = {"WEIGHTWIRE_RUNTIME_DIR": directory, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        environment |= {"WEIGHTWIRE_PROFILE_DIR": traces} if traces else {}
        with ExitStack() as running:  # each is stopped, also where stopping another one is interrupted
            engine = kind(model, tp, layout, scratch, environment)
            running.callback(engine.stop)
            trainer = start_trainer(model, kind.name, scratch, environment)
            running.callback(trainer.stop)
            engine.connect(trainer)
            yield engine, trainer


if __name__ == "__main__":
    main()
