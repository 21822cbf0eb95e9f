"""Rows between hosts that share nothing but a network: an owner on one, pool and consumer on another, a stranger on a third.

They meet over TCP with a key; links are cut and restored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from inference_plugin.net import curve
from tests.support.hosts import Host, can_make_hosts, network
from tests.support.rig import runtime

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root and iproute2")

PORT = 7800
ROWS, LONG = 6, 1 << 20

WORKER = """
import signal, torch
from trainer_adapters.batch.records import VersionSpan
from trainer_adapters.batch.rollouts.worker import Generated, RolloutWorker
from trainer_adapters.batch.store import Store

async def generate(task_id, payload):
    n = payload["tokens"]
    return Generated({"ids": [torch.full((n,), payload["mark"]), torch.arange(n)], "why": ["a", "b"]}, VersionSpan(3, 4))

with Store(budget_bytes=1 << 30) as store, RolloutWorker(generate, slots=4, store=store, pool=POOL):
    print(store.owner.address, flush=True)
    signal.sigwait({signal.SIGTERM})
"""

CONSUMER = """
import json, sys, time
from inference_plugin.wire.errors import WeightwireError
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.rollouts.pool import RolloutPool

pool = RolloutPool(listen=POOL) if POOL else None
batches, numbers = [], 0
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    began_s = time.monotonic()
    try:
        if asked["do"] == "draw":
            for i in range(asked["tasks"]):
                numbers += 1
                pool.submit(f"task-{numbers}", {"tokens": asked["tokens"], "mark": numbers})
            batch = pool.next_batch(asked["tasks"], 60)
            batches.append(batch)
            answer = {"bytes": batch.nbytes, "versions": str(batch.versions), "metadata": batch.to_bytes().hex()}
        elif asked["do"] == "fetch":
            batch = DistributedBatch.from_bytes(bytes.fromhex(asked["metadata"])) if "metadata" in asked else batches[-1]
            batch.fetch(timeout_s=asked["timeout_s"])
            marks = [row.unique().tolist() for row in batch.rows("ids")[::2]]
            numbered = all(row.tolist() == list(range(len(row))) for row in batch.rows("ids")[1::2])
            answer = {"marks": marks, "numbered": numbered, "why": batch["why"], "status": batch.status.name}
            answer["mapped"] = "memfd:" in open("/proc/self/maps").read()
        elif asked["do"] == "clear":
            report = batches[-1].clear(timeout_s=asked["timeout_s"])
            answer = {"cleared": report.cleared, "unknown": report.unknown, "failed": len(report.failed)}
    except WeightwireError as error:
        failures = [type(each.error).__name__ for each in getattr(error, "failures", ())]
        answer = {"error": type(error).__name__, "failures": failures, "status": batch.status.name}
    print(json.dumps(answer | {"took_s": time.monotonic() - began_s}), flush=True)
"""


class Peers:
    """A worker with its store on host 2, pool and consumer on host 1, somebody with another key on host 3."""

    def __init__(self, hosts: list[Host], directory: Path) -> None:
        keys = [directory / "key", directory / "other"]
        for key in keys:
            curve.make_key(key)
        pool = f"tcp://{hosts[0].address}:{PORT}"
        self.owner_host = hosts[1]
        self.consumer = self._start(hosts[0], CONSUMER, directory / "c", keys[0], pool)
        self.worker = self._start(hosts[1], WORKER, directory / "w", keys[0], pool)
        self.stranger = self._start(hosts[2], CONSUMER, directory / "s", keys[1], "")
        self.said = [self._line(process) for process in (self.consumer, self.worker, self.stranger)]

    @staticmethod
    def _start(host: Host, code: str, runtime_dir: Path, key: Path, pool: str) -> Popen[str]:
        runtime_dir.mkdir(mode=0o700)
        environment = {
            "WEIGHTWIRE_RUNTIME_DIR": str(runtime_dir),
            curve.VARIABLE: str(key),
            "WEIGHTWIRE_SILENCE_S": "30",
        }
        return host.start(f"POOL = {pool!r}\n{code}", environment | {"WEIGHTWIRE_LISTEN": "tcp://eth0:*"})

    @staticmethod
    def _line(process: Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line, "the process ended"
        return line

    def ask(self, process: Popen[str], do: str, **arguments: Any) -> dict[str, Any]:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line(process))
        return answer


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    with pytest.MonkeyPatch.context() as patch, runtime(patch) as directory, network(3) as hosts:
        yield Peers(hosts, directory)


def test_rows_of_another_host_are_pulled_with_the_key_and_cleared_there(peers: Peers) -> None:
    assert peers.said[1].startswith(f"tcp://{peers.owner_host.address}:")
    drawn = peers.ask(peers.consumer, "draw", tasks=ROWS, tokens=LONG // 8)
    assert drawn["bytes"] > ROWS * LONG and drawn["versions"] == "3..4"
    stolen = peers.ask(peers.stranger, "fetch", metadata=drawn["metadata"], timeout_s=60)
    assert stolen["error"] == "FetchFailed" and set(stolen["failures"]) == {"AuthError"}, "another job's key"
    got = peers.ask(peers.consumer, "fetch", timeout_s=60)
    assert (got["status"], got["numbered"], got["mapped"]) == ("LOCAL", True, False), "pulled, not mapped"
    assert sorted(got["marks"]) == [[mark] for mark in range(1, ROWS + 1)] and got["why"] == ["a", "b"] * ROWS
    cleared = peers.ask(peers.consumer, "clear", timeout_s=60)
    again = peers.ask(peers.consumer, "clear", timeout_s=60)
    assert (cleared["cleared"], cleared["unknown"], again["cleared"], again["unknown"]) == (ROWS, 0, 0, ROWS)


def test_a_cable_that_is_cut_fails_the_fetch_by_its_limit_and_the_next_one_brings_the_rows(peers: Peers) -> None:
    peers.ask(peers.consumer, "draw", tasks=2, tokens=1000)
    peers.owner_host.cut()
    failed = peers.ask(peers.consumer, "fetch", timeout_s=2)
    assert failed["error"] == "FetchFailed" and failed["status"] == "REMOTE"
    assert len(failed["failures"]) == 4 and 2 <= failed["took_s"] < 30
    assert peers.ask(peers.consumer, "clear", timeout_s=1)["failed"] == 1, "who was not reached is in the report"
    peers.owner_host.restore()
    got = peers.ask(peers.consumer, "fetch", timeout_s=60)
    assert got["status"] == "LOCAL" and got["numbered"] and len(got["marks"]) == 2
