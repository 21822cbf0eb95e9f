"""Rollout workers and pools in processes of their own, and a function that does what its payload says."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zmq

from inference_plugin.wire import codec
from inference_plugin.wire.messages import Body
from tests.support.rig import eventually, fork, kill
from trainer_adapters.batch.records import VersionSpan
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.rollouts.worker import Generated, RolloutWorker
from trainer_adapters.batch.store import Store

BUDGET = 1 << 22


async def generate(task_id: str, payload: dict[str, Any]) -> Generated:
    """`gate`: waits until that file exists. `began`: writes that file first. `error`, `exit`: raises. `stubborn`: goes on
    though it is cancelled. `rows`, `version`: of the result."""
    if began := payload.get("began"):
        Path(began).touch()
    if error := payload.get("error"):
        raise ValueError(error)
    if payload.get("exit"):
        raise SystemExit(3)
    if payload.get("block"):  # the whole event loop
        eventually(Path(payload["gate"]).exists, "the gate")
    while (gate := payload.get("gate")) and not Path(gate).exists():
        try:
            await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            if not payload.get("stubborn"):
                raise
    rows, version = payload.get("rows", 2), payload.get("version")
    number = payload.get("number", 0)
    return Generated(
        {"ids": torch.arange(rows * 3).reshape(rows, 3) + number, "text": [f"{task_id}/{row}" for row in range(rows)]},
        None if version is None else VersionSpan(version, version),
        {"pid": os.getpid()},
    )


class LocalWorker:
    """A worker and its store in this process."""

    def __init__(self, function: Any = generate, *, slots: int = 4, pool: str | None = None, **options: Any) -> None:
        self.store = Store(budget_bytes=BUDGET)
        self.worker = RolloutWorker(function, slots=slots, store=self.store, pool=pool, **options)

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()
        assert self.store.stats().tasks == 0 and self.store.stats().nbytes == 0, "a worker that closed left rows behind"
        self.store.close()


def run_worker(path: str, slots: int, pool: str | None) -> None:
    """In a process of its own: writes the store's stats into `path` whenever they change."""
    store = Store(budget_bytes=BUDGET)
    worker = RolloutWorker(generate, slots=slots, store=store, pool=pool)
    told = None
    while True:
        stats = {
            **dataclasses.asdict(store.stats()),
            "held": [len(p.link.held) for p in list(worker.connections.pools.values())],
        }
        if stats != told:
            told = stats
            temporary = Path(path + ".tmp")
            temporary.write_text(json.dumps(stats))
            temporary.replace(path)
        time.sleep(0.01)


def start(function: str, **arguments: Any) -> int:
    """Runs a function of this module in a process of its own, in this test's runtime directory; returns its pid."""
    environment = {"WEIGHTWIRE_RUNTIME_DIR": os.environ["WEIGHTWIRE_RUNTIME_DIR"]}
    return fork(f"tests.batch.rollout_support:{function}", environment, **arguments)


class RemoteWorker:
    """A worker in a process of its own."""

    def __init__(self, directory: Path, *, slots: int = 4, pool: str | None = None) -> None:
        self.path = directory / f"worker-{time.monotonic_ns()}"
        self.pid = start("run_worker", path=str(self.path), slots=slots, pool=pool)
        eventually(self.path.exists, "the worker's store")

    @property
    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found

    def is_empty(self) -> bool:
        stats = self.stats
        return not stats["tasks"] and not stats["nbytes"] and not any(stats["held"])

    def kill(self) -> None:
        kill(self.pid)


def run_pool(path: str, payloads: dict[str, Any], silence_s: float, take: int) -> None:
    """In a process of its own: submits tasks, takes a batch of the first ones, and writes which have ended how."""
    ended: dict[str, list[str]] = {}
    with RolloutPool(silence_s=silence_s) as pool:

        def note(future: Any) -> None:
            error = future.exception()
            ended.setdefault(future.task_id, []).append(type(error).__name__ if error is not None else "done")
            temporary = Path(path + ".tmp")
            temporary.write_text(json.dumps(ended))
            temporary.replace(path)

        pool.on_complete(note)
        Path(path + ".there").touch()
        for task_id, payload in payloads.items():
            pool.submit(task_id, payload)
        if take:
            pool.next_batch(take, timeout_s=60)
            Path(path + ".taken").touch()
        threading.Event().wait(600)


class Proxy:
    """Between workers and a pool, on TCP: `swallows(body)` says which messages are lost, `repeats(body)` which come twice."""

    def __init__(self, pool: str) -> None:
        self.swallows: Callable[[Body], bool] = lambda body: False
        self.repeats: Callable[[Body], bool] = lambda body: False
        self.seen: list[Body] = []
        self._context = zmq.Context()
        self._front, self._back = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        self._front.bind("tcp://127.0.0.1:*")
        self.address: str = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._back.connect(pool)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        ways = {self._front: self._back, self._back: self._front}
        while not self._ends.is_set():
            for source, _ in zmq.zmq_poll([(socket, zmq.POLLIN) for socket in ways], 20):
                frames = source.recv_multipart()
                body = codec.decode(frames[-1]).body
                self.seen.append(body)
                if not self.swallows(body):
                    ways[source].send_multipart(frames)
                    if self.repeats(body):
                        ways[source].send_multipart(frames)

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self._context.destroy(linger=0)
