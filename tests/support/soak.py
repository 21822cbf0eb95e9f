"""Updates without end into a few replicas, beside small troubles drawn from a seed, and what each process uses meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import ReplicaCard
from tests.support.hostile import idle_peers, pester
from trainer_adapters import LocalSlice, SyncManager, WeightSource

FEW_MB = 4 << 20


class Broken(WeightSource):
    """Fails after its first slices: its transaction is aborted."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def manifest(self) -> Manifest:
        return self._source.manifest()

    def slices(self) -> Iterator[LocalSlice]:
        for i, item in enumerate(self._source.slices()):
            if i == 3:
                raise RuntimeError("the trainer's own trouble")
            yield item


class Soak:
    """`source` makes the weights of a version; `processes`: their names and pids, beside the manager's."""

    def __init__(
        self, cards: Sequence[ReplicaCard], source: Callable[[int], WeightSource], processes: dict[str, int]
    ) -> None:
        self.cards, self.source = cards, source
        self.processes = {"manager": os.getpid(), **processes}
        self.resident: dict[str, list[int]] = {name: [] for name in self.processes}
        self.opened: dict[str, list[int]] = {name: [] for name in self.processes}
        self.aborted = 0
        self.longest_s = 0.0

    def run(self, updates: int, after: Callable[[int], None] = lambda _: None) -> None:
        """Beside verifications, idle peers, aborted transactions of another manager and garbage. `after` is called after each
        update with its version."""
        chance = random.Random(1)
        addresses = [address for card in self.cards for address in (card.address, *(w.address for w in card.workers))]
        with SyncManager() as manager, SyncManager() as other:
            for version in range(1, updates + 1):
                trouble = chance.choice(("", "", "verify", "idle", "abort", "garbage"))
                with idle_peers(addresses, 20) if trouble == "idle" else contextlib.nullcontext():
                    if trouble == "garbage":
                        assert [address for card in self.cards for address in pester(card, chance, 3)] == []
                    if trouble == "abort":
                        with pytest.raises(WeightwireError, match="the trainer's own trouble"):
                            other.update(Broken(self.source(version)), version)
                        self.aborted += 1
                    report = manager.update(self.source(version), version)
                    self.longest_s = max(report.seconds, self.longest_s)
                    assert [r.status for r in report.replicas] == ["committed"] * len(self.cards)
                    if trouble == "verify":
                        assert manager.verify(self.source(version)).ok
                after(version)
                for name, pid in self.processes.items():
                    self.resident[name].append(resident_bytes(pid))
                    self.opened[name].append(descriptors(pid))

    def assert_flat(self) -> None:
        """Memory and descriptors of the last quarter of the updates are those of the second one."""
        grown = {name: last_quarter(seen) - second_quarter(seen) for name, seen in self.resident.items()}
        more = {name: last_quarter(seen) - second_quarter(seen) for name, seen in self.opened.items()}
        updates = len(self.resident["manager"])
        print(f"{updates} updates, {self.aborted} aborted; the longest took {self.longest_s:.2f} s", flush=True)
        for name in self.processes:
            print(
                f"{name}: resident {second_quarter(self.resident[name]) / 2**20:.1f} MiB, "
                f"then {grown[name] / 2**20:+.2f} MiB; "
                f"descriptors {second_quarter(self.opened[name])}, then {more[name]:+}",
                flush=True,
            )
        assert max(more.values()) <= 0, more
        assert all(grown_bytes < FEW_MB for grown_bytes in grown.values()), grown


def second_quarter(seen: list[int]) -> int:
    return int(statistics.median(seen[len(seen) // 4 : len(seen) // 2]))


def last_quarter(seen: list[int]) -> int:
    return int(statistics.median(seen[-len(seen) // 4 :]))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
