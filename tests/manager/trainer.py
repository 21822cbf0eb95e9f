"""A trainer of several ranks, as a test starts and watches it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.support.rig import eventually, fork, gone, kill

__all__ = ["Trainer"]


class Trainer:
    """Ranks in processes of their own, each with the same list of steps, forked; a test may kill or stop one. All limits are
    the default ones unless said."""

    def __init__(
        self,
        directory: Path,
        world: int,
        steps: list[dict[str, Any]],
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.out = directory / "ranks"
        self.out.mkdir()
        self.pids = [
            fork(
                "tests.manager.ranks:one_rank",
                {"WEIGHTWIRE_RUNTIME_DIR": str(directory)} | (environment or {}),
                rank=rank,
                world=world,
                directory=str(self.out),
                steps=steps,
                options=options,
            )
            for rank in range(world)
        ]

    def note(self, name: str) -> dict[str, Any]:
        path = self.out / name
        seen: dict[str, Any] = json.loads(eventually(lambda: path.exists() and path.read_text(), path.name))
        return seen

    def step(self, rank: int, number: int) -> dict[str, Any]:
        return self.note(f"rank{rank}.step{number}")

    def woken(self, rank: int, number: int) -> dict[str, Any]:
        """`step` of a rank that stops itself in it: it may be late, and come to its stop only now."""
        path = self.out / f"rank{rank}.step{number}"
        eventually(lambda: (os.kill(self.pids[rank], signal.SIGCONT), path.exists())[1], path.name)
        return self.step(rank, number)

    def let(self, name: str) -> None:
        (self.out / name).touch()

    def end(self) -> None:
        for pid in self.pids:
            if not gone(pid):
                kill(pid)
