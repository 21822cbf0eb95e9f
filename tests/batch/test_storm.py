"""A storm over a whole loop: pools, workers with their stores, and consumers are killed and stopped, drawn from a seed.

`WEIGHTWIRE_TEST_STORM=200 WEIGHTWIRE_TEST_SEEDS=1,2 pytest -n 0 -s tests/batch/test_storm.py` runs that many for each seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.support.rig import eventually, fork, gone, kill, runtime

EVENTS = int(os.environ.get("WEIGHTWIRE_TEST_STORM", "0"))
SEEDS = [int(seed) for seed in os.environ.get("WEIGHTWIRE_TEST_SEEDS", "7").split(",")]
FEW = 5
EVENT_S = 60
ROLES = {"work": 2, "consume": 2, "control": 1}


class Storm:
    def __init__(self, directory: Path, sockets: Path, seed: int) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.running: dict[str, tuple[str, int]] = {}
        self.seen: Counter[str] = Counter()
        self._environment = {"WEIGHTWIRE_RUNTIME_DIR": str(sockets)}
        for role, count in ROLES.items():
            for _ in range(count):
                self.start(role)

    def start(self, role: str) -> None:
        name = f"{role}{sum(self.seen.values())}_{len(self.running)}"
        pid = fork(f"tests.batch.storm_processes:{role}", self._environment, directory=str(self.directory), name=name)
        self.running[name] = role, pid

    def said(self) -> Counter[str]:
        return Counter(json.loads(path.read_text()) for path in self.directory.glob("*.said"))

    def trouble(self) -> None:
        """One process is killed, and another one takes its place; or it is stopped for a while."""
        name = self.random.choice(sorted(self.running))
        role, pid = self.running[name]
        kind = self.random.choice(["kill", "kill", "stop", "stop and kill"])
        self.seen[f"{kind} {role}"] += 1
        if kind != "kill":
            os.kill(pid, signal.SIGSTOP)
            self.progress(0 if role == "control" else 1)
        if kind == "stop":
            os.kill(pid, signal.SIGCONT)
        else:
            kill(pid)
            del self.running[name]
            self.start(role)
        self.progress(2)

    def progress(self, batches: int) -> None:
        """Waits until as many more batches were read, and looks at what was in them."""
        before = self.said()["right"]
        eventually(lambda: self.said()["right"] >= before + batches, f"{batches} batches after {dict(self.seen)}")
        assert not set(self.said()) - {"right", "lost"}, (self.said(), self.seen)

    def end(self) -> None:
        """The pool closes first; then the stores are empty, and everything else ends by itself."""
        (self.directory / "drain").touch()
        pools = [name for name, (role, _) in self.running.items() if role == "control"]
        eventually(lambda: all((self.directory / f"{name}.closed").exists() for name in pools), "the end of the pool")
        workers = [name for name, (role, _) in self.running.items() if role == "work"]
        for name in workers:
            path = self.directory / f"{name}.stats"
            eventually(
                lambda path=path: path.exists() and json.loads(path.read_text())["tasks"] == 0,
                f"an empty store of {name}",
            )
        (self.directory / "end").touch()
        for _, pid in self.running.values():
            eventually(lambda pid=pid: gone(pid), "the end of a process")
        for name in self.running:
            assert (self.directory / f"{name}.closed").exists(), f"{name} did not end as it should"
        for name in pools:
            # One that was started last may have had none.
            assert set(json.loads((self.directory / f"{name}.futures").read_text())) <= {"ended"}

    def stop(self) -> None:
        for _, pid in self.running.values():
            if not gone(pid):
                kill(pid)


@pytest.mark.slow
@pytest.mark.timeout(900 + EVENT_S * EVENTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_is_killed_or_stopped_no_row_is_wrong_every_future_ends_and_the_stores_drain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    with runtime(monkeypatch) as sockets:
        storm = Storm(tmp_path, sockets, seed)
        try:
            storm.progress(2)
            for _ in range(EVENTS or FEW):
                storm.trouble()
            storm.end()
        finally:
            storm.stop()
        killed = sum(count for kind, count in storm.seen.items() if "kill" in kind)
        left = [path for path in sockets.rglob("*") if path.is_socket()]
        print(
            f"seed {seed}: {dict(storm.seen)}, {dict(storm.said())}, {len(left)} sockets of {killed} killed are left",
            flush=True,
        )
        assert len(left) <= killed, left  # a process that is killed can't remove its socket; everybody else does
