"""Ray's object store, and TransferQueue's own storage on Ray. Owners and consumers are actors, the controller is the driver.

Ray: an owner puts the rows of a task as one object, a dict of lists of numpy arrays, which Ray reads without a copy (a torch
tensor it would copy); references go through the controller to the consumers.
TransferQueue: an owner puts a task's rows by `kv_batch_put`, a consumer gets its half by one `kv_batch_get`; the controller
hands out the keys. Two storage units. What is counted is the traffic of TransferQueue's controller, which keeps the metadata.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.batches.data import CONSUMERS, KEYS, OWNERS, Case, Rows, Times, digests_of, flat, now_s, read
from benchmarks.batches.tcp import grown, tcp_bytes
from benchmarks.processes import ROOT

OBJECT_STORE_BYTES = 4 << 30
TIMEOUT_S = 120
PARTITION = "rows"


class RayPeer:
    """An owner or a consumer."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        self._rows: dict[int, Any] = {}
        self._got: list[Any] = []
        self._digests: list[list[int]] = []

    def prepare(self, case: Case, owner: int) -> dict[int, list[int]]:
        made = case.make(owner)
        self._rows = {task: self._input(rows) for task, rows in made.items()}
        return digests_of(made)

    def put(self) -> dict[int, Any]:
        """What the controller hands out, by task."""
        import ray

        return {task: ray.put(rows) for task, rows in self._rows.items()}

    def consume(self, tasks: list[Any]) -> None:
        import ray

        got = ray.get(tasks)
        self._got = [{key: [torch.from_numpy(row) for row in of_key] for key, of_key in rows.items()} for rows in got]
        self._digests = [read(rows) for rows in self._got]

    def digests(self) -> list[int]:
        return flat(self._digests)

    def clear(self) -> None:
        self._got, self._digests = [], []

    def _input(self, rows: Rows) -> Any:
        return {key: [row.numpy() for row in of_key] for key, of_key in rows.items()}


class QueuePeer(RayPeer):
    """The same on TransferQueue. The tensordicts are made before the time counts."""

    def __init__(self) -> None:
        super().__init__()
        import transfer_queue

        transfer_queue.init()
        self._queue = transfer_queue
        self._put: list[str] = []

    def put(self) -> dict[int, list[str]]:
        keys = {task: [f"{task}-{i}" for i in range(rows.batch_size[0])] for task, rows in self._rows.items()}
        for task, rows in self._rows.items():
            self._queue.kv_batch_put(keys=keys[task], partition_id=PARTITION, fields=rows)
        self._put = [key for of_task in keys.values() for key in of_task]
        return keys

    def consume(self, tasks: list[list[str]]) -> None:
        got = self._queue.kv_batch_get(keys=[key for task in tasks for key in task], partition_id=PARTITION)
        self._got = [{key: got[key].unbind() for key in KEYS}]
        self._digests = [read(rows) for rows in self._got]

    def clear(self) -> None:
        super().clear()
        if self._put:
            self._queue.kv_clear(keys=self._put, partition_id=PARTITION)
            self._put = []

    def _input(self, rows: Rows) -> Any:
        from tensordict import TensorDict

        values = {
            key: of_key[0][None] if len(of_key) == 1 else torch.nested.as_nested_tensor(of_key, layout=torch.jagged)
            for key, of_key in rows.items()
        }
        return TensorDict(values, batch_size=len(rows[KEYS[0]]))


class RayWay:
    """The controller's side of both."""

    def __init__(self, peer: type[RayPeer], counted_pid: int) -> None:
        import ray

        actor = ray.remote(num_cpus=0)(peer)
        self._ray = ray
        self._owners = [actor.remote() for _ in range(OWNERS)]
        self._consumers = [actor.remote() for _ in range(CONSUMERS)]
        self._counted_pid = counted_pid

    def prepare(self, case: Case) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for digests in self._all(owner.prepare.remote(case, i) for i, owner in enumerate(self._owners)):
            found |= digests
        return found

    def run(self, case: Case) -> Times:
        before = tcp_bytes(self._counted_pid)
        start_s = now_s()
        tasks: dict[int, Any] = {}
        for put in self._all(owner.put.remote() for owner in self._owners):
            tasks |= put
        put_s = now_s()
        shares = [[tasks[task] for task in case.of_consumer(i)] for i in range(CONSUMERS)]
        self._all(consumer.consume.remote(share) for consumer, share in zip(self._consumers, shares, strict=True))
        end_s = now_s()
        return Times(start_s, put_s, end_s, grown(before, tcp_bytes(self._counted_pid)))

    def digests(self) -> list[list[int]]:
        return self._all(consumer.digests.remote() for consumer in self._consumers)

    def clear(self) -> None:
        for peers in (self._consumers, self._owners):
            self._all(peer.clear.remote() for peer in peers)

    def _all(self, calls: Iterator[Any]) -> list[Any]:
        got: list[Any] = self._ray.get(list(calls), timeout=TIMEOUT_S)
        return got


@contextmanager
def ray_way(scratch: Path) -> Iterator[RayWay]:
    with _cluster(scratch):
        yield RayWay(RayPeer, os.getpid())


@contextmanager
def queue_way(scratch: Path) -> Iterator[RayWay]:
    with _cluster(scratch):
        import ray
        import transfer_queue

        transfer_queue.init()
        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        pid = ray.get(controller.__ray_call__.remote(lambda _: os.getpid()), timeout=TIMEOUT_S)
        try:
            yield RayWay(QueuePeer, pid)
        finally:
            transfer_queue.close()


@contextmanager
def _cluster(scratch: Path) -> Iterator[None]:
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_memory_monitor_refresh_ms": "0"}
    import ray

    ray.init(
        address="local",
        num_cpus=16,  # places for actors, not cores
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(scratch / "ray"),
    )
    try:
        yield
    finally:
        ray.shutdown()
