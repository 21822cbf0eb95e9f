"""Fully asynchronous RL: rollouts, training and weight updates go on at the same time, and no rollout passes through one process.

    python examples/async_rl/run.py --model .models/smollm2-135m-instruct [--engine sglang] [--max-staleness 2]

It starts the engine, rollout workers beside it (`rollouts.py`) and two FSDP2 ranks (`train.py`), and prints one line per step:

- Rollouts never wait for the trainer: `max_staleness` + 1 batches of tasks are in the works. Workers report what is done; the
  rows stay with them until a rank reads them. `controller_share`: what the controller saw of all bytes.
- Every row knows the weight versions that it was sampled with (`spans`). One that is more than `--max-staleness` versions behind
  the weights that learn from it is dropped, and another prompt takes its place.
- An update travels while the next batch is being computed. Requests in flight go on over it (`in_flight="keep"`).
- Kill anything but the engine. The tasks of a rollout worker are reported as lost, and the loop goes on with the other workers;
  a rank, and with it the controller, is restarted by torchrun, and workers drop what the old controller had asked for.

`--max-staleness 0` is synchronous RL by the same code, 1 is one step off. The reward asks for no tokenizer: the share of an
answer's tokens in the lower half of the vocabulary. At the end it prints what the rollout workers' stores still hold: nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rl_smollm2"))
from server import TORCHRUN, DemoError, job_directory, own_process, running_server, tail

HERE = Path(__file__).resolve().parent
SCALE_OUT = ["--enable-scale-out"]
"""vLLM's endpoint for token ids, `/inference/v1/generate`: its answers have version spans."""


def run(arguments: argparse.Namespace, directory: Path, running: ExitStack) -> None:
    environment: dict[str, str] = {}
    if (url := arguments.server) is None:
        environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}  # a job of its own: no other engine takes its updates
        options = SCALE_OUT if arguments.engine == "vllm" else []
        log = directory / "engine.log"
        url = running.enter_context(running_server(arguments.engine, arguments.model, log, environment, options)).url

    def start(command: list[str], name: str) -> subprocess.Popen[str]:
        started = own_process([sys.executable, *command], directory / name, environment, read_stdout=True)
        return running.enter_context(started)

    rollouts = [str(HERE / "rollouts.py"), arguments.engine, url]
    workers = [start(rollouts, f"rollouts-{number}.log") for number in range(arguments.rollout_workers)]
    for number, worker in enumerate(workers):
        if not read_line(worker):
            raise DemoError(f"a rollout worker ended as it started\n{tail(directory / f'rollouts-{number}.log')}")
    print(json.dumps({"rollout_workers": [worker.pid for worker in workers]}), flush=True)

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    settings = json.dumps(vars(arguments), default=str)
    trainer = start([*torchrun, "--monitor-interval=0.2", str(HERE / "train.py"), settings], "trainer.log")
    verified = False
    while line := read_line(trainer):
        print(line, end="", flush=True)
        verified = verified or '"verified": true' in line
    status = trainer.wait()
    print(json.dumps({"rollout_stores": [rows_left(worker) for worker in workers]}), flush=True)
    if status:
        raise DemoError(f"the trainer ended with status {status}\n{tail(directory / 'trainer.log', until=TORCHRUN)}")
    if not verified:
        raise DemoError("the engine does not hold the trainer's weights")


def read_line(process: subprocess.Popen[str]) -> str:
    """What a process says next; "" once it has ended."""
    assert process.stdout is not None
    return process.stdout.readline()


def rows_left(worker: subprocess.Popen[str]) -> dict[str, int] | None:
    """Ends a rollout worker; what its store held then. None: it was dead."""
    worker.send_signal(signal.SIGTERM)
    said, _ = worker.communicate(timeout=60)
    return dict(json.loads(said.splitlines()[-1])["store"]) if worker.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--server", help="URL of an engine that runs already: vLLM with --enable-scale-out, or SGLang")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--rollout-workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-5)
    arguments = parser.parse_args()
    with job_directory("ww-async-") as directory, ExitStack() as running:
        run(arguments, directory, running)


if __name__ == "__main__":
    main()
