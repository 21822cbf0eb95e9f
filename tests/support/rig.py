"""Starting, asking and killing the processes of `plain_engine`, from a test."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from inference_plugin.net import addresses
from inference_plugin.net.processes import has_ended
from inference_plugin.wire.messages import ReplicaCard

ROOT = Path(__file__).parents[2]
PYTHON_PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
"""For a process that runs this interpreter: dependencies may be installed outside of it."""
LONG_S = 300.0
"""For what must happen, on a machine as slow as it likes; never a promise."""


@functools.cache
def _nursery() -> subprocess.Popen[str]:
    # Which test needs it first is chance: what that one has set must not be what all later ones get.
    neutral = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTWIRE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.nursery"],
        cwd=ROOT,
        env=neutral | {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def fork(call: str, environment: dict[str, str] | None = None, **arguments: Any) -> int:
    """Runs `module:function(**arguments)` in a process of its own; returns its pid. It may be killed at will."""
    nursery = _nursery()
    assert nursery.stdin is not None and nursery.stdout is not None
    request = {"call": call, "arguments": arguments, "environment": environment or {}}
    nursery.stdin.write(json.dumps(request) + "\n")
    nursery.stdin.flush()
    pid: int = json.loads(nursery.stdout.readline())["pid"]
    return pid


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Waits for a state to be seen, and returns what was seen."""
    deadline_s = time.monotonic() + LONG_S
    while not (seen := condition()):
        assert time.monotonic() < deadline_s, f"never seen: {what}"
        time.sleep(0.005)
    return seen


def gone(pid: int) -> bool:
    return has_ended(pid)


def stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # one has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)


def kill(pid: int) -> None:
    """kill -9, and waits until the process is gone."""
    with suppress(ProcessLookupError):  # it may have ended with another one
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: gone(pid), f"the end of process {pid}")


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """Leaves this process so many free descriptors, also where what ended before is closed only now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, hard))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(min(free, len(taken))):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


class Rig:
    """One replica of `plain_engine`."""

    def __init__(self, directory: Path, *, tp: int = 1, layers: int = 2, **environment: str) -> None:
        known = {card.replica for card in addresses.discover()}
        self.tp, self.layers = tp, layers
        self._control = str(Path(directory) / f"rig-{time.monotonic_ns()}.control")
        self.pid = fork(
            "tests.support.plain_engine:run_coordinator",
            environment,
            directory=str(directory),
            tp=tp,
            layers=layers,
            control_path=self._control,
        )
        self.card: ReplicaCard = eventually(lambda: self._published(known), "the replica's card")
        self.replica = self.card.replica
        connection = socket.socket(socket.AF_UNIX)
        eventually(lambda: _connects(connection, self._control), "the control socket")
        self._stream = connection.makefile("rw")

    def _published(self, known: set[str]) -> ReplicaCard | None:
        assert not gone(self.pid), "the replica ended while it started; its traceback stands above"
        return next((c for c in addresses.discover() if c.replica not in known and c.pid == self.pid), None)

    def ask(self, do: str, **arguments: Any) -> Any:
        self._stream.write(json.dumps({"do": do, **arguments}) + "\n")
        self._stream.flush()
        return json.loads(self._stream.readline())

    def peek(self) -> list[dict[str, int]]:
        """Digests of every live parameter, per rank, as of one step boundary."""
        found: list[dict[str, int]] = self.ask("peek")
        return found

    def look(self) -> tuple[str | None, list[dict[str, int]]]:
        """Why it refuses to generate, if it does, and what `peek` returns, both as of the same step boundary."""
        seen = self.ask("look")
        return seen["refusal"], seen["held"]

    def worker_pid(self, rank: int = 0) -> int:
        return self.card.workers[rank].pid

    def end(self) -> None:
        if not gone(self.pid):
            kill(self.pid)
        for worker in self.card.workers:
            eventually(lambda pid=worker.pid: gone(pid), "the end of a worker")  # type: ignore[misc]


def _connects(connection: socket.socket, path: str) -> bool:
    try:
        connection.connect(path)
    except OSError:
        return False
    return True


@contextmanager
def runtime(monkeypatch: Any) -> Iterator[Path]:
    """A runtime directory of its own, with a short path, for this test and everything that it starts."""
    with tempfile.TemporaryDirectory(prefix="ww", dir="/tmp") as directory:
        monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", directory)
        monkeypatch.delenv("WEIGHTWIRE_JOB", raising=False)
        yield Path(directory)
