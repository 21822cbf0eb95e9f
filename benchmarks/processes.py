"""The processes of a benchmark: commands to them, their logs, their end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import zmq

ROOT = Path(__file__).parent.parent


def end_by_signals() -> None:
    """From now on SIGTERM, and the SIGHUP of a terminal that is closed, end this program as Ctrl-C does: each `Process` has a
    session of its own, and would go on."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(f"ended by {signal.Signals(number).name}"))


class Process:
    """A process with a log, and whatever it starts itself."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | environment,
                start_new_session=True,
            )

    def check(self, what: str, deadline_s: float) -> None:
        """Ends the benchmark with the log if the process has ended, or if it is late."""
        if self.process.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"{what} failed; the end of its log:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        """Politely, then by force; also where the process itself has ended, and what it started has not."""
        try:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        finally:  # also when somebody presses Ctrl-C a second time
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Remote(Process):
    """A process that answers JSON commands on a ZMQ socket."""

    def __init__(self, command: list[str], address: str, log: Path, environment: dict[str, str]) -> None:
        super().__init__([*command, "--address", address], log, environment)
        self._socket: Any = zmq.Context.instance().socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def ask(self, do: str, timeout_s: float = 600, after_step: bool = False, **arguments: Any) -> dict[str, Any]:
        """The answer to a command: `result`, and when it ran. `after_step`: the trainer's ranks compute until it begins."""
        self._socket.send(json.dumps({"do": do, "args": arguments, "after_step": after_step}).encode())
        deadline_s = time.monotonic() + timeout_s
        while not self._socket.poll(1000):
            self.check(do, deadline_s)
        answer: dict[str, Any] = json.loads(self._socket.recv())
        return answer

    def stop(self) -> None:
        self._socket.close()
        super().stop()


def start_trainer(model: Path, engine: str, scratch: Path, environment: dict[str, str]) -> Remote:
    """Two gloo ranks, a core each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "benchmarks.trainer", "--model", str(model), "--engine", engine]
    return Remote(command, f"ipc://{scratch}/trainer", scratch / "trainer.log", environment | {"OMP_NUM_THREADS": "1"})
