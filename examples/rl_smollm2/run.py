"""The demo: a language model learns while it is being served.

    make demo                                        # sets everything up, then runs this
    .venvs/vllm/bin/python examples/rl_smollm2/run.py --model .models/smollm2-135m-instruct

1. A stock vLLM (or SGLang) serves SmolLM2-135M-Instruct; nothing but ``pip install`` told it about Weightwire.
2. ``train.py`` trains the same model on two FSDP2 ranks: its samples come from that engine.
3. After every step the new weights travel into the running engine, while somebody else keeps asking it questions.
4. The proof: a second one, started without Weightwire from the trainer's checkpoint, gives the same greedy
   tokens; and every tensor in the first has the digest of the trainer's.

Exit status 0 means that all of it held.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from picture import draw_training
from rich.console import Console
from rich.markup import escape
from server import TORCHRUN, DemoError, Server, end_by_signals, own_process, running_server, tail
from task import CAPITALS, OTHER_COUNTRIES, prompt_ids
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent.parent / ".demo"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
WITHOUT = {"WEIGHTWIRE_DISABLE": "1"}
COMPARED_TOKENS = 32
VISITOR_PAUSE_S = 0.5
VERIFY_S = 300.0
SHOWN_ANSWERS = 4
HEADER = (
    "step  reward                right  tokens  draw   learn  update = agree + stage + seal + commit  stopped  served"
)

console = Console(highlight=False, soft_wrap=True)


class Visitor:
    """Somebody who uses the engine all the time: one question after another, answers and failures counted."""

    def __init__(self, server: Server, prompts: list[list[int]]) -> None:
        self.served = 0
        self.slowest_s = 0.0
        self.failures: list[str] = []
        self._server, self._prompts = server, prompts
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="visitor", daemon=True)

    def __enter__(self) -> Visitor:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leaving.set()
        if kind is None:  # else the engine is stopped next, whether or not it still answers
            self._thread.join()

    def _ask(self) -> None:
        while not self._leaving.wait(VISITOR_PAUSE_S):
            prompt = self._prompts[self.served % len(self._prompts)]
            started = time.monotonic()
            try:
                self._server.complete([prompt], max_tokens=16)
                self.served += 1
            except (OSError, ValueError, KeyError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                self._leaving.wait(1.0)
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description="RL on SmolLM2-135M, streamed into a running engine.")
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--model", type=Path, default=HERE.parent.parent / ".models" / "smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2, help="FSDP2 ranks")
    parser.add_argument("--out", type=Path, default=OUTPUT, help="for logs and the final checkpoint")
    args = parser.parse_args()
    end_by_signals()
    try:
        return demo(args)
    except DemoError as error:
        console.print(f"[bold red]failed[/]: {escape(str(error))}")
    except OSError as error:  # the engine does not answer, or the disk is full
        console.print(f"[bold red]failed[/]: {escape(f'{type(error).__name__}: {error}')}; logs: {_shown(args.out)}")
    except KeyboardInterrupt:
        console.print("[bold red]interrupted[/]; everything that was started is stopped")
    return 1


def demo(args: argparse.Namespace) -> int:
    out = args.out.resolve()
    name = ENGINES[args.engine]
    checkpoint = out / "checkpoint"
    out.mkdir(parents=True, exist_ok=True)
    lock = os.open(out / "lock", os.O_CREAT | os.O_RDWR)  # held until this process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DemoError(f"another demo writes to {_shown(out)}; give this one another --out") from None
    shutil.rmtree(checkpoint, ignore_errors=True)
    if not (args.model / "config.json").is_file():
        raise DemoError(f"there is no model in {args.model}; `make model` makes it")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    countries = (*CAPITALS, *OTHER_COUNTRIES)
    questions = {country: prompt_ids(tokenizer, country) for country in countries}

    with tempfile.TemporaryDirectory(prefix="weightwire-demo-") as runtime:
        job = {"WEIGHTWIRE_RUNTIME_DIR": runtime, "WEIGHTWIRE_JOB": "demo"}
        with contextlib.ExitStack() as stack:
            with doing(f"starting {name} (about half a minute)"):
                log = out / f"{args.engine}.log"
                server = stack.enter_context(running_server(args.engine, args.model.resolve(), log, job))
            console.print(f"{name} serves [bold]{args.model.name}[/] at {server.url}; its log: {_shown(log)}")
            before = greedy(server, questions)
            with Visitor(server, [questions[country] for country in OTHER_COUNTRIES]) as visitor:
                steps, rewards, verified = watch_training(args, server, checkpoint, job, visitor)
            after = greedy(server, questions)
            with doing("comparing digests with the checkpoint's"):
                digests, words = verify_checkpoint(checkpoint, job)
        with (
            doing(f"starting a second {name} from the trainer's checkpoint, without Weightwire"),
            running_server(args.engine, checkpoint, out / f"{args.engine}-fresh.log", WITHOUT) as fresh_server,
        ):
            fresh = greedy(fresh_server, questions)

    same = [country for country in countries if after[country] == fresh[country]]
    changed = [country for country in countries if after[country] != before[country]]
    for country in changed[:SHOWN_ANSWERS]:
        was, now = (tokenizer.decode(tokens[country], skip_special_tokens=True) for tokens in (before, after))
        console.print(f"  {country:9} before  [dim]{escape(_line(was))}[/]\n            after   {escape(_line(now))}")
    requests = f"{visitor.served} other requests served meanwhile, {len(visitor.failures)} failed"
    of = f"of {len(countries)} prompts"
    results = [
        check(
            visitor.served > 0 and not visitor.failures,
            f"{requests}, slowest {visitor.slowest_s:.1f} s",
            visitor.failures[:3],
        ),
        check(same == list(countries), f"greedy tokens equal a fresh engine's: {len(same)} {of}"),
        check(bool(changed), f"and differ from the untrained model's: {len(changed)} {of}"),
        check(verified, "every tensor in the engine has the digest of the trainer's"),
        check(digests, "and of the checkpoint's (weightwire verify --checkpoint)", [words]),
    ]
    console.print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}; checkpoint and logs: {_shown(out)}")
    picture = out / "training.svg"
    draw_training(steps, rewards, picture)
    console.print(f"a picture of rewards, versions and phases: {_shown(picture)}")
    return 0 if all(results) else 1


def watch_training(
    args: argparse.Namespace, server: Server, checkpoint: Path, job: dict[str, str], visitor: Visitor
) -> tuple[list[dict[str, Any]], list[float], bool]:
    """Run the trainer, show each of its steps; return the steps, the rewards of version 0 and of each after it, and whether the
    engine verified."""
    log = args.out.resolve() / "trainer.log"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(args.ranks),
    ]
    command += [
        str(HERE / "train.py"),
        "--engine",
        server.engine,
        "--server",
        server.url,
        "--model",
        str(args.model.resolve()),
    ]
    command += ["--save", str(checkpoint), "--steps", str(args.steps)]
    threads = max(1, (os.cpu_count() or 1) // args.ranks)
    settings = {**job, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    steps: list[dict[str, Any]] = []
    rewards: list[float] = []
    verified = saved = False
    with (
        own_process(command, log, settings, read_stdout=True) as process,
        doing("starting the trainer") as status,
    ):
        console.print(f"FSDP2 trains it on {args.ranks} ranks; their log: {_shown(log)}\n\n[bold]{HEADER}[/]")
        for event in _events(process, log):
            match event.pop("event"):
                case "doing":
                    status.update(event["what"])
                case "step":
                    steps.append(event)
                    rewards.append(event["reward"])
                    console.print(_row(event, visitor))
                case "final":
                    rewards.append(event["reward"])
                    console.print(f" end  {_learned(event)}\n")
                case "verified":
                    verified = bool(event["ok"])
                case "saved":
                    saved = True
        if process.wait() or not saved:
            raise DemoError(
                f"the trainer ended with status {process.returncode}; see {_shown(log)}\n{tail(log, 20, until=TORCHRUN)}"
            )
    return steps, rewards, verified


def greedy(server: Server, questions: dict[str, list[int]]) -> dict[str, list[int]]:
    """The engine's most likely answer to each question, asked one by one, as tokens."""
    return {
        country: server.complete([prompt], max_tokens=COMPARED_TOKENS)[0][0].token_ids
        for country, prompt in questions.items()
    }


def verify_checkpoint(checkpoint: Path, job: dict[str, str]) -> tuple[bool, str]:
    """What ``weightwire verify`` says of the running engine and the saved checkpoint."""
    command = [str(Path(sys.executable).parent / "weightwire"), "verify", "--checkpoint", str(checkpoint)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **job}, timeout=VERIFY_S)
    except subprocess.TimeoutExpired:
        return False, f"`weightwire verify` did not end within {VERIFY_S:g} s"
    return result.returncode == 0, (result.stdout + result.stderr).strip()


def check(holds: bool, claim: str, details: Sequence[str] = ()) -> bool:
    console.print(f"[bold green]  ok[/]  {claim}" if holds else f"[bold red]  NO[/]  {claim}")
    for detail in () if holds else details:
        console.print(f"        {escape(detail)}")
    return holds


@contextlib.contextmanager
def doing(what: str) -> Iterator[Any]:
    """A spinner on a terminal; one line where there is none."""
    if console.is_terminal:
        with console.status(what) as status:
            yield status
    else:
        console.print(f"... {what}")
        yield _NoSpinner()


class _NoSpinner:
    def update(self, what: str) -> None:
        """Nothing to turn."""


def _events(process: subprocess.Popen[str], log: Path) -> Iterator[dict[str, Any]]:
    """The trainer's JSON lines; whatever else it prints joins its log."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"event"'):
            yield json.loads(line)
        else:
            with log.open("a") as file:
                file.write(line)


def _row(step: dict[str, Any], visitor: Visitor) -> str:
    phases = step["phases"]
    parts = "   ".join(f"{phases.get(name, 0.0):5.2f}" for name in ("agree", "stage", "seal", "commit"))
    failed = f" [bold red]{len(visitor.failures)} failed[/]" if visitor.failures else ""
    return (
        f"{step['step']:4d}  {_learned(step)}  {step['sample_s']:4.1f}s  {step['train_s']:4.1f}s  "
        f"{step['update_s']:5.2f}s  {parts}  {step['stopped_s'] * 1e3:5.0f}ms  {visitor.served:6d}{failed}"
    )


def _learned(summary: dict[str, Any]) -> str:
    bar = "█" * round(summary["reward"] * 14)
    return f"{summary['reward']:.2f} [green]{bar:14}[/]  {summary['right']:6.0%}  {summary['tokens']:6.1f}"


def _line(text: str) -> str:
    return " ".join(text.split())[:90]


def _shown(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
