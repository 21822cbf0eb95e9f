"""TransferQueue with our store under it: a real TransferQueue, its controller and clients on a real Ray."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference_plugin.wire.errors import (
    BatchError,
    ConfigError,
    FetchFailed,
    PeerLost,
    StoreFull,
    SyncTimeout,
    TransportUnavailable,
)
from tests.batch.owners import MIB
from tests.batch.row_promises import ROWS, RowPromises, Rows
from tests.support.rig import eventually, few_descriptors
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.status import BatchStatus

tq = pytest.importorskip("transfer_queue")
tensordict = pytest.importorskip("tensordict")

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = {
    "backend": {"storage_backend": "weightwire", "weightwire": {"budget_bytes": 64 * MIB, "timeout_s": 60}}
}


class Writer:
    """An actor with a client of its own."""

    def __init__(self) -> None:
        import transfer_queue

        import trainer_adapters.integrations.transferqueue  # noqa: F401 -- registers the backend

        self.tq = transfer_queue
        self.tq.init()

    def put(self, keys: list[str], partition: str, fields: dict[str, Any]) -> None:
        self.tq.kv_batch_put(keys, partition, tensordict.TensorDict(fields, batch_size=len(keys)))

    def put_at_once(self, keys: list[str], partition: str) -> None:
        fields = [{"k": torch.full((1, 50), number)} for number in range(len(keys))]
        with ThreadPoolExecutor(len(keys)) as pool:
            list(pool.map(self.put, [[key] for key in keys], [partition] * len(keys), fields))

    def pid(self) -> int:
        return os.getpid()

    def shards(self) -> int:
        store = self.tq.get_client().storage_manager.store
        return 0 if store is None else int(store.stats().shards)


@pytest.fixture(scope="module")
def queue(ray: Any) -> Iterator[Any]:
    import trainer_adapters.integrations.transferqueue  # noqa: F401 -- registers the backend

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray.get_runtime_context().runtime_env["env_vars"].items():
            if name.startswith("WEIGHTWIRE_"):
                patch.setenv(name, value)
        from omegaconf import OmegaConf

        tq.init(OmegaConf.create(CONFIG))
        try:
            yield tq
        finally:
            tq.close()


@pytest.fixture(scope="module")
def writer(ray: Any, queue: Any) -> Any:
    return ray.remote(Writer).options(num_cpus=0).remote()


@pytest.fixture
def partition(queue: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """A partition of the test's own; at its end nothing of it is left."""
    name = request.node.name
    yield name
    queue.get_client().clear_partition(name)
    assert held(queue) == 0


def held(queue: Any) -> int:
    store = queue.get_client().storage_manager.store
    return 0 if store is None else int(store.stats().shards)


def put(queue: Any, keys: list[str], partition: str, fields: dict[str, Any]) -> None:
    queue.kv_batch_put(keys, partition, tensordict.TensorDict(fields, batch_size=len(keys)))


def rows_of(column: Any) -> list[Any]:
    if not isinstance(column, torch.Tensor):
        return list(column.tolist())
    return list(column.unbind())


class QueueRows:
    """TransferQueue as a place for rows: a sample for each row, in one partition. Only a test waits for room so shortly."""

    def __init__(self, queue: Any, partition: str) -> None:
        self._queue, self._partition = queue, partition
        self._samples: dict[str, list[str]] = {}
        self.budget_bytes = 64 * MIB

    def put(self, task_id: str, data: Mapping[str, Any]) -> DistributedBatch:
        from trainer_adapters.integrations.transferqueue import batch_of

        fields = {key: field_of(value) for key, value in data.items()}
        keys = [f"{task_id}/{i}" for i in range(len(next(iter(data.values()))))]
        manager = self._queue.get_client().storage_manager
        manager.timeout_s = 1.0
        try:
            put(self._queue, keys, self._partition, fields)
        finally:  # not what it was: several threads may put at once
            manager.timeout_s = CONFIG["backend"]["weightwire"]["timeout_s"]
        self._samples[task_id] = keys
        return batch_of(metadata_of(self._queue, keys, self._partition))

    def clear(self, task_ids: Iterable[str]) -> None:
        if keys := [key for task_id in task_ids for key in self._samples.get(task_id, ())]:
            self._queue.kv_clear(keys, self._partition)

    def shards(self) -> int:
        return held(self._queue)


def field_of(value: Any) -> Any:
    """Rows as TransferQueue takes them."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        return value.detach()
    if not isinstance(value[0], torch.Tensor):
        return tensordict.NonTensorStack(*map(tensordict.NonTensorData, value))
    if len({row.shape for row in value}) == 1:
        return torch.stack(value)
    return torch.nested.nested_tensor(value, layout=torch.jagged)


class TestBehindTransferQueue(RowPromises):
    """What every place for rows promises, of TransferQueue with our store under it."""

    @pytest.fixture
    def rows(self, queue: Any, partition: str) -> Rows:
        return QueueRows(queue, partition)


def raw(row: torch.Tensor) -> torch.Tensor:
    """A row's bytes: NaN and fp8 have no equality."""
    return row.contiguous().reshape(-1).view(torch.uint8)


TENSORS = {
    name: rows for name, rows in ROWS.items() if isinstance(rows, torch.Tensor) and name != "complex, lazily conjugated"
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_every_kind_come_back_row_by_row(queue: Any, partition: str, name: str) -> None:
    wanted = [row.detach() for row in TENSORS[name].unbind()]
    keys = [f"s{i}" for i in range(len(wanted))]
    put(queue, keys, partition, {"k": TENSORS[name].detach()})
    found = rows_of(queue.kv_batch_get(keys, partition)["k"])
    assert [(row.dtype, row.shape) for row in found] == [(row.dtype, row.shape) for row in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(raw(one), raw(other))
    assert held(queue) == len(keys)


def test_plain_values_come_back(queue: Any, partition: str) -> None:
    values = [None, True, 1, -0.5, "é\0", b"\xff", [1, ["a"]], {"k": [None]}]
    stack = tensordict.NonTensorStack(*(tensordict.NonTensorData(value) for value in values))
    keys = [f"s{i}" for i in range(len(values))]
    put(queue, keys, partition, {"k": stack})
    assert rows_of(queue.kv_batch_get(keys, partition)["k"]) == values


@pytest.mark.parametrize("name", ["a/b:c d", "../../etc/passwd", "é\U0001f600", " ", ":1/"])
def test_names_of_any_characters_are_kept_apart(queue: Any, partition: str, name: str) -> None:
    put(queue, [name, name + "/"], partition, {name: torch.tensor([[1], [2]]), name + ":": torch.tensor([[3], [4]])})
    found = queue.kv_batch_get([name + "/", name], partition)
    assert [int(row) for row in rows_of(found[name])] == [2, 1]
    assert [int(row) for row in rows_of(found[name + ":"])] == [4, 3]


def test_rows_of_another_process_are_mapped_and_cleared_there(
    ray: Any, queue: Any, writer: Any, partition: str
) -> None:
    keys = [f"s{i}" for i in range(6)]
    tokens = torch.arange(6 * 1000).reshape(6, 1000)
    ray.get(writer.put.remote(keys, partition, {"tokens": tokens}), timeout=600)
    put(queue, keys[:3], partition, {"reward": torch.arange(3.0)})
    found = queue.kv_batch_get(keys, partition, select_fields=["tokens"])["tokens"]
    assert torch.equal(torch.stack(found.unbind()), tokens)
    assert (ray.get(writer.shards.remote(), timeout=600), held(queue)) == (6, 3)
    # These five samples have one field in common; the other field of three of them must not be forgotten.
    queue.kv_clear(keys[:5], partition)
    assert (ray.get(writer.shards.remote(), timeout=600), held(queue)) == (1, 0)
    queue.get_client().clear_partition(partition)
    assert ray.get(writer.shards.remote(), timeout=600) == 0


def test_the_first_puts_of_a_process_may_come_at_once(ray: Any, queue: Any, partition: str) -> None:
    writer = ray.remote(Writer).options(num_cpus=0).remote()
    keys = [f"s{i}" for i in range(8)]
    ray.get(writer.put_at_once.remote(keys, partition), timeout=600)
    rows = rows_of(queue.kv_batch_get(keys, partition)["k"])
    assert [row.tolist() for row in rows] == [[number] * 50 for number in range(8)]
    assert ray.get(writer.shards.remote(), timeout=600) == 8


def test_a_put_that_fails_half_way_leaves_what_was_there(queue: Any, partition: str) -> None:
    put(queue, ["a", "b"], partition, {"k": torch.tensor([[1.0], [2.0]]), "l": torch.tensor([[3.0], [4.0]])})
    stack = tensordict.NonTensorStack(tensordict.NonTensorData("x"), tensordict.NonTensorData({"y"}))
    with pytest.raises(BatchError, match="a set is not a plain value"):
        put(queue, ["a", "b"], partition, {"k": torch.zeros(2, 1), "l": stack})
    found = queue.kv_batch_get(["a", "b"], partition)
    assert [[row.tolist() for row in rows_of(found[key])] for key in "kl"] == [[[1.0], [2.0]], [[3.0], [4.0]]]


def test_a_field_that_is_put_again_is_replaced_also_by_another_process(
    ray: Any, queue: Any, writer: Any, partition: str
) -> None:
    for number in range(3):
        put(queue, ["a", "b"], partition, {"k": torch.full((2, 50), number)})
    assert held(queue) == 2
    ray.get(writer.put.remote(["b"], partition, {"k": torch.full((1, 70), 9)}), timeout=600)
    assert (held(queue), ray.get(writer.shards.remote(), timeout=600)) == (1, 1)
    rows = rows_of(queue.kv_batch_get(["a", "b"], partition)["k"])
    assert [row.tolist() for row in rows] == [[2] * 50, [9] * 70]


@pytest.fixture
def impatient(queue: Any) -> Iterator[Any]:
    """A client's storage, whose drops last a second at most."""
    from transfer_queue.storage.managers.base import StorageManagerFactory

    config = {"budget_bytes": MIB, "timeout_s": 1}
    storage = StorageManagerFactory.create("weightwire", queue.get_client().storage_manager.controller_info, config)
    yield storage
    storage.close()


def metadata_of(queue: Any, keys: list[str], partition: str) -> Any:
    client = queue.get_client()
    asked = client.async_kv_retrieve_meta(keys, partition)
    return asyncio.run_coroutine_threadsafe(asked, client._loop).result(600)  # noqa: SLF001


def test_a_put_stands_whose_old_rows_cannot_be_dropped_and_a_clear_says_which_it_did_not_reach(
    ray: Any, queue: Any, impatient: Any, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = ray.remote(Writer).options(num_cpus=0).remote()  # whose rows stay until it ends
    ray.get(writer.put.remote(["a"], partition, {"k": torch.ones(1, 50), "l": torch.ones(1, 5)}), timeout=600)
    new, metadata = tensordict.TensorDict({"k": torch.zeros(1, 50)}, batch_size=1), metadata_of(queue, ["a"], partition)
    os.kill(pid := ray.get(writer.pid.remote(), timeout=600), signal.SIGSTOP)
    try:
        asyncio.run(impatient.put_data(new, metadata))
        assert "rows that were replaced may stay in the budget of queue-" in caplog.text
        assert queue.kv_batch_get(["a"], partition, select_fields=["k"])["k"].sum() == 0
        with pytest.raises(SyncTimeout, match=r"no reply from.*clear again"):
            asyncio.run(impatient.clear_data(metadata))
    finally:
        os.kill(pid, signal.SIGCONT)
    with few_descriptors(0), pytest.raises(TransportUnavailable, match="descriptors"):
        asyncio.run_coroutine_threadsafe(impatient.clear_data(metadata), queue.get_client()._loop).result(600)  # noqa: SLF001
    queue.kv_clear(["a"], partition)
    assert ray.get(writer.shards.remote(), timeout=600) <= 1, "the row that was replaced, at most"
    ray.kill(writer)


def test_puts_that_wait_for_room_keep_no_clear_waiting_that_makes_room(queue: Any, partition: str) -> None:
    put(queue, ["first"], partition, {"k": torch.zeros(1, 40 * MIB, dtype=torch.uint8)})
    rows = {"k": torch.zeros(1, 30 * MIB, dtype=torch.uint8)}
    with ThreadPoolExecutor(40) as pool:  # more than asyncio has threads
        waiting = {pool.submit(put, queue, [f"s{number}"], partition, rows): f"s{number}" for number in range(40)}
        time.sleep(1)
        queue.kv_clear(["first"], partition)
        for done in as_completed(waiting, timeout=50):
            done.result()
            queue.kv_clear([waiting[done]], partition)


def test_a_put_whose_caller_is_cancelled_goes_on_and_its_rows_can_be_cleared(queue: Any, partition: str) -> None:
    client = queue.get_client()

    def ask(call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, client._loop).result(600)  # noqa: SLF001

    put(queue, ["first"], partition, {"k": torch.zeros(1, 40 * MIB, dtype=torch.uint8)})
    rows = tensordict.TensorDict({"late": torch.zeros(1, 30 * MIB, dtype=torch.uint8)}, batch_size=1)
    with pytest.raises(TimeoutError):
        ask(asyncio.wait_for(client.async_put(rows, partition_id=partition), 1))
    queue.kv_clear(["first"], partition)
    eventually(lambda: "late" in ask(client._get_partition_meta(partition)).field_names, "the end of the put")
    assert held(queue) == 1


def test_what_was_cleared_meanwhile_is_the_error_that_transferqueue_s_callers_catch(queue: Any, partition: str) -> None:
    put(queue, ["a", "b"], partition, {"k": torch.ones(2, 5)})
    metadata = metadata_of(queue, ["a", "b"], partition)
    queue.kv_clear(["a"], partition)
    with pytest.raises(tq.StorageKeyNotFoundError, match="it was cleared"):
        queue.get_client().get_data(metadata)


def test_a_batch_of_metadata_is_remote_and_fetches_the_same_rows(queue: Any, partition: str) -> None:
    from trainer_adapters.integrations.transferqueue import batch_of

    ragged = torch.nested.nested_tensor([torch.arange(3.0), torch.arange(9.0)], layout=torch.jagged)
    put(queue, ["a", "b"], partition, {"tokens": ragged, "reward": torch.tensor([0.5, 1.5])})
    batch = batch_of(metadata_of(queue, ["b", "a"], partition))
    assert (batch.status, len(batch), set(batch.keys())) == (BatchStatus.REMOTE, 2, {"tokens", "reward"})
    batch.fetch()
    assert [row.tolist() for row in batch["tokens"].unbind()] == [list(range(9)), list(range(3))]
    assert batch["reward"].tolist() == [1.5, 0.5]
    del batch
    gc.collect()


def test_what_has_no_plain_form_is_refused_and_nothing_is_stored(queue: Any, partition: str) -> None:
    stack = tensordict.NonTensorStack(tensordict.NonTensorData({"x"}), tensordict.NonTensorData({"y"}))
    with pytest.raises(BatchError, match="a set is not a plain value"):
        put(queue, ["a", "b"], partition, {"good": torch.ones(2, 3), "bad": stack})
    assert held(queue) == 0


def test_a_put_beyond_the_budget_is_refused_with_the_numbers(queue: Any, partition: str) -> None:
    with pytest.raises(StoreFull, match="the whole budget is 67108864"):
        put(queue, ["a", "b"], partition, {"small": torch.ones(2, 1), "large": torch.zeros(2, 17 * MIB)})
    assert held(queue) == 0


def test_rows_of_a_process_that_ended_are_lost_and_can_be_cleared(ray: Any, queue: Any, partition: str) -> None:
    other = ray.remote(Writer).options(num_cpus=0).remote()
    ray.get(other.put.remote(["a"], partition, {"k": torch.ones(1, 500)}), timeout=600)
    put(queue, ["b"], partition, {"k": torch.ones(1, 500)})
    ray.kill(other)

    def lost() -> bool:
        try:
            queue.kv_batch_get(["a", "b"], partition)
        except FetchFailed as error:
            return [type(failure.error) for failure in error.failures] == [PeerLost]
        return False

    eventually(lost, "the loss of the killed writer's rows")
    queue.kv_clear(["a", "b"], partition)
    assert held(queue) == 0


@pytest.mark.parametrize(
    "config", [{}, {"budget_bytes": 0}, {"budget_bytes": "8GB"}, {"budget_bytes": 1, "timeout_s": 0}]
)
def test_a_wrong_setting_is_named(config: dict[str, Any]) -> None:
    from transfer_queue.storage.managers.base import StorageManagerFactory

    import trainer_adapters.integrations.transferqueue  # noqa: F401 -- registers the backend

    with pytest.raises(ConfigError, match=r"backend\.weightwire\.(budget_bytes|timeout_s)="):
        StorageManagerFactory.create("weightwire", None, config)


def test_a_hook_of_ray_registers_the_backend_in_processes_that_know_nothing_of_it() -> None:
    program = """
import os
import ray, torch, transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
import trainer_adapters.integrations.transferqueue

class Plain:
    def put(self):
        transfer_queue.init()
        transfer_queue.kv_batch_put(["a"], "p", TensorDict({"k": torch.arange(5).reshape(1, 5)}, batch_size=1))

hook = "trainer_adapters.integrations.transferqueue.register"
environment = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}, "worker_process_setup_hook": hook}
ray.init("local", num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False,
         runtime_env=environment)
backend = {"storage_backend": "weightwire", "weightwire": {"budget_bytes": 1 << 20}}
transfer_queue.init(OmegaConf.create({"backend": backend}))
plain = ray.remote(Plain).options(num_cpus=0).remote()
ray.get(plain.put.remote(), timeout=600)
print(transfer_queue.kv_batch_get(["a"], "p")["k"][0].tolist())
transfer_queue.close()
ray.shutdown()
"""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.stdout.strip().splitlines()[-1:] == ["[0, 1, 2, 3, 4]"], done.stdout + done.stderr


def test_without_transferqueue_the_module_says_what_to_install() -> None:
    program = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transfer_queue": raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
from inference_plugin.wire.errors import TransportUnavailable
try:
    import trainer_adapters.integrations.transferqueue
except TransportUnavailable as error:
    print(error.hint)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "pip install '.[transferqueue]' in a checkout of weightwire"
