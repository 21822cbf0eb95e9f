"""TransferQueue (extra `transferqueue`) with our store under it: the storage backend "weightwire".

Import this module in each process before `transfer_queue.init` (Ray's `worker_process_setup_hook` does that for all workers of
a job), and configure:

    backend:
      storage_backend: weightwire
      weightwire: {budget_bytes: 8589934592}

1. put: the rows stay in the process that puts them, in shared memory: one entry for each sample and field. TransferQueue's
   controller keeps the entries as the backend's metadata of the samples;
2. get: the entries in a `BatchMeta` are fetched as any others are: mapped on the same host, pulled elsewhere, digests checked;
3. clear: all fields of the samples are dropped at their owners, also those that the given `BatchMeta` does not name.

Rows are never pickled: tensors, or plain values (None, bool, int, float, str, bytes, lists and dicts of them). TransferQueue's
own control messages are TransferQueue's. It was written against TransferQueue 0.1.11.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch

from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import (
    BatchError,
    ConfigError,
    FetchFailed,
    PeerLost,
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
    WeightwireError,
)
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.client import afetch_entries, clear_tasks
from trainer_adapters.batch.exchanges import WHY
from trainer_adapters.batch.limits import checked_seconds
from trainer_adapters.batch.parts import LocalPart
from trainer_adapters.batch.records import Entry, Kind, Owner, ShardId
from trainer_adapters.batch.store import Store

try:
    from tensordict import NonTensorStack, TensorDict
    from transfer_queue.metadata import BatchMeta, extract_field_schema
    from transfer_queue.storage import StorageKeyNotFoundError
    from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
    from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
    from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType
except ImportError as missing:
    raise TransportUnavailable(
        f"TransferQueue can't be imported: {missing}", hint="pip install '.[transferqueue]' in a checkout of weightwire"
    ) from missing

__all__ = ["BACKEND", "RowsNotFound", "WeightwireStorageManager", "batch_of", "register"]

logger = logging.getLogger(__name__)

BACKEND = "weightwire"
"""The name in TransferQueue's configuration."""

TIMEOUT_S = 300.0
"""Default time limit of a get, a clear, and of a put that waits for room."""

PUTS_AT_ONCE = 64
"""Puts of one client that copy or wait for room; others wait their turn."""

CONTROLLER_S = 30.0
"""Longest wait for TransferQueue's controller."""


class RowsNotFound(ProtocolError, StorageKeyNotFoundError):  # type: ignore[misc]
    """Samples without rows: never put, or cleared by somebody else since the metadata was made."""

    default_hint = "fetch the metadata again; reads and clears run beside each other"

    __str__ = ProtocolError.__str__


class StoredRow(msgspec.Struct, frozen=True, array_like=True):
    """What the controller keeps of one field of one sample, as msgpack."""

    entry: Entry
    owner: Owner


def register() -> None:
    """Does nothing: importing this module registers the backend. For configurations that want the name of a function."""


@StorageBootstrapProvider.register_provider(BACKEND)  # type: ignore[untyped-decorator]
def _start_storage(conf: Any) -> dict[str, Any]:
    """TransferQueue starts a backend's servers by this; the clients' processes are ours."""
    _checked(conf.backend[BACKEND])
    return {}


@StorageManagerFactory.register(BACKEND)
class WeightwireStorageManager(StorageManager):  # type: ignore[misc]
    """Puts rows into a store of this process, and fetches them from the stores of others.

    `config`: `budget_bytes` of this process's store; `timeout_s` (default `TIMEOUT_S`). The store is made by the first put and
    lives until the client is closed or its process ends: rows of a process that ended are lost, and a get of them raises
    `FetchFailed` with `PeerLost` for each.
    """

    def __init__(self, controller_info: Any, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        self.store: Store | None = None
        self._making = threading.Lock()
        # Not asyncio's own threads, of which there are few: puts that wait for room would keep the clear that makes it waiting.
        self._putting = ThreadPoolExecutor(PUTS_AT_ONCE, "weightwire-put")
        self._budget_bytes, self.timeout_s = _checked(config)
        super().__init__(controller_info, config, zmq_context=zmq_context)

    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Stores the fields of all samples, or none of them, then tells the controller. Raises `StoreFull`, `BatchError`.

        Rows of other processes that these replace are dropped there. The put stands where one can't be reached: that is logged. A
        put whose caller is cancelled goes on: rows of which the controller does not hear could not be cleared.
        """
        if data_parser is not None:
            raise BatchError(
                "a data_parser runs in the storage units of SimpleStorage; the backend 'weightwire' has none",
                hint="parse the data before the put, or keep SimpleStorage as the backend",
            )
        if data.batch_size[0] != metadata.size:
            raise BatchError(f"{data.batch_size[0]} rows were put for the metadata of {metadata.size} samples")
        if metadata.size:
            await asyncio.shield(self._put(data, metadata))

    async def _put(self, data: TensorDict, metadata: BatchMeta) -> None:
        old = [row for row in _stored(metadata, _fields(data)) if row is not None]
        stored = await asyncio.get_running_loop().run_in_executor(self._putting, self._put_rows, data, metadata)
        for held, fields in zip(metadata._custom_backend_meta, stored.values(), strict=True):
            held.update(fields)
        await self.notify_data_update(
            metadata.partition_ids[0], metadata.global_indexes, extract_field_schema(data), stored
        )
        assert self.store is not None
        own = self.store.owner.id
        for owner, error in await self._drop([row for row in old if row.owner.id != own]):  # this process has them now
            # Later the owner may have put rows of its own under these names: nobody may drop them then.
            logger.warning(
                "weightwire: rows that were replaced may stay in the budget of %s, until it puts them anew or ends: %s",
                owner,
                error.message,
            )

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields of the samples, packed as TransferQueue's own storage does. Raises `RowsNotFound`, `FetchFailed`."""
        fields = metadata.field_names
        rows = [_found(row, field, metadata) for field in fields for row in _stored(metadata, [field])]
        owners = {row.owner.id: row.owner for row in rows}
        have: dict[ShardId, LocalPart] = {}
        try:
            await afetch_entries([row.entry for row in rows], owners, timeout_s=self.timeout_s, have=have)
        except FetchFailed as error:
            _raise_not_found(error)
        values = [_value_of(have[row.entry.shard]) for row in rows]
        size = metadata.size
        packed = {
            field: AsyncSimpleStorageManager._pack_field_values(values[i * size : (i + 1) * size])
            for i, field in enumerate(fields)
        }
        return TensorDict(packed, batch_size=size)

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Drops all fields of the samples at their owners; an owner that has ended has dropped them. Raises the error of an owner
        that could not be reached, once all others have dropped theirs: the samples stay known, and may be cleared again.

        The metadata that a caller has may lack fields, and the controller forgets all of them: so it is asked for them first.
        """
        rows = list(_stored(metadata, metadata.field_names))
        for partition_id in dict.fromkeys(metadata.partition_ids):
            whole = await self._partition(partition_id)
            if whole is not None:
                indexes = {index for index, p in _samples(metadata) if p == partition_id}
                rows += [
                    row
                    for (index, _), row in zip(
                        _samples(whole) * len(whole.field_names), _stored(whole, whole.field_names), strict=True
                    )
                    if index in indexes
                ]
        failed = await self._drop([row for row in rows if row is not None])
        for owner, error in failed:
            logger.warning("weightwire: rows of %s were not cleared: %s", owner, error)
        if failed:
            raise failed[0][1]

    def close(self) -> None:
        """Closes the client's sockets and the store; rows of this process are gone then. May be called twice."""
        super().close()
        if (store := getattr(self, "store", None)) is not None:
            store.close()

    def _put_rows(self, data: TensorDict, metadata: BatchMeta) -> dict[int, dict[str, bytes]]:
        """By global index and field: what the controller is to keep."""
        with self._making:  # the first puts may come at once
            if self.store is None:
                self.store = Store(budget_bytes=self._budget_bytes, name="queue")
        tasks = {
            _task_id(partition_id, index, field): {field: value}
            for field in _fields(data)
            for (index, partition_id), value in zip(_samples(metadata), _rows_of(data.get(field)), strict=True)
        }
        entries = iter(self.store.put_tasks(tasks, timeout_s=self.timeout_s))
        stored: dict[int, dict[str, bytes]] = {index: {} for index in metadata.global_indexes}
        for field in _fields(data):
            for index in metadata.global_indexes:
                stored[index][field] = msgspec.msgpack.encode(StoredRow(next(entries), self.store.owner))
        return stored

    async def _drop(self, rows: Sequence[StoredRow]) -> list[tuple[str, WeightwireError]]:
        """Returns the owners that could not be asked, and why. The rows of one that has ended are gone."""
        if not rows:
            return []
        owners = {row.owner.id: row.owner for row in rows}
        tasks: dict[str, list[str]] = {}
        for row in rows:
            tasks.setdefault(row.owner.id, []).append(row.entry.shard.task_id)
        report = await asyncio.to_thread(clear_tasks, tasks, owners, timeout_s=self.timeout_s)
        return [(owner, error) for owner, error in report.failed if not isinstance(error, PeerLost)]

    async def _partition(self, partition_id: str) -> BatchMeta | None:
        """The controller's metadata of all samples and fields of a partition. None where it has no such partition."""
        request = ZMQMessage.create(
            request_type=ZMQRequestType.GET_PARTITION_META,
            sender_id=self.storage_manager_id,
            receiver_id=self.controller_info.id,
            body={"partition_id": partition_id},
        )
        asked = asyncio.run_coroutine_threadsafe(self._ask_controller(request.serialize()), self._notify_loop)
        return (await asyncio.wrap_future(asked)).get("metadata")

    async def _ask_controller(self, request: list[Any]) -> dict[str, Any]:
        """On the loop of TransferQueue's own notifications, whose sockets these are."""
        async with self.notify_pool.alease(self.controller_info) as socket:
            try:
                await socket.send_multipart(request)
                frames = await asyncio.wait_for(socket.recv_multipart(copy=False), CONTROLLER_S)
            except BaseException as error:
                socket.close(linger=0)  # a late reply must not become another request's
                if isinstance(error, TimeoutError):
                    raise SyncTimeout(f"TransferQueue's controller did not answer within {CONTROLLER_S:g} s") from error
                raise
        reply = ZMQMessage.deserialize(frames)
        if reply.request_type != ZMQRequestType.GET_PARTITION_META_RESPONSE:
            raise ProtocolError(f"TransferQueue's controller answered {reply.request_type}: {reply.body}")
        body: dict[str, Any] = reply.body
        return body


def batch_of(metadata: BatchMeta) -> DistributedBatch:
    """The REMOTE batch of the samples and fields that `metadata` names, in its order. Nothing is fetched.

    Clear such rows through TransferQueue, which counts them. Raises `RowsNotFound` for samples that lack a field.
    """
    rows = [_found(row, field, metadata) for field in metadata.field_names for row in _stored(metadata, [field])]
    return DistributedBatch.of_entries([row.entry for row in rows], {row.owner.id: row.owner for row in rows}.values())


def _checked(config: Mapping[str, Any]) -> tuple[int, float]:
    """`budget_bytes` and `timeout_s` of a configuration. Raises `ConfigError`."""
    budget_bytes, timeout_s = config.get("budget_bytes"), config.get("timeout_s", TIMEOUT_S)
    if type(budget_bytes) is not int or budget_bytes <= 0:
        raise ConfigError(
            f"backend.weightwire.budget_bytes={budget_bytes!r}: give a number of bytes above 0",
            hint="it bounds what one process may put and not clear",
        )
    return budget_bytes, checked_seconds("backend.weightwire.timeout_s", timeout_s, above_zero=True)


def _task_id(partition_id: str, index: int, field: str) -> str:
    """One task for each field of each sample: fields may come from different processes and are cleared wherever they are."""
    return f"{index}/{len(partition_id)}:{partition_id}/{field}"


def _fields(data: TensorDict) -> list[str]:
    """Its keys; those of tensordicts inside it are refused by the store, as they are no rows."""
    return [str(field) for field in data.keys()]  # noqa: SIM118 -- a TensorDict iterates over its rows


def _samples(metadata: BatchMeta) -> list[tuple[int, str]]:
    return list(zip(metadata.global_indexes, metadata.partition_ids, strict=True))


def _stored(metadata: BatchMeta, fields: Iterable[str]) -> Iterator[StoredRow | None]:
    """What metadata says of each field of each sample, field by field; None where the field was not put."""
    for field in fields:
        for (index, partition_id), held in zip(_samples(metadata), metadata._custom_backend_meta, strict=True):
            if (encoded := held.get(field)) is None:
                yield None
                continue
            row = decode_as(encoded, StoredRow)
            if row.entry.shard != ShardId(_task_id(partition_id, index, field), field):
                raise ProtocolError(f"sample {index} of {partition_id!r} names the rows of {row.entry.shard}")
            yield row


def _found(row: StoredRow | None, field: str, metadata: BatchMeta) -> StoredRow:
    if row is None:
        raise RowsNotFound(f"a sample of {metadata.partition_ids[0]!r} has no {field!r}: it was never put, or cleared")
    return row


def _raise_not_found(error: FetchFailed) -> NoReturn:
    gone = {WHY[why][0] for why in ("unknown", "cleared")}
    if all(isinstance(failure.error, ProtocolError) and failure.error.message in gone for failure in error.failures):
        raise RowsNotFound(error.message) from error
    raise error


def _rows_of(column: Any) -> Iterator[Any]:
    """Each sample's value, as rows of a task of one row."""
    if not isinstance(column, torch.Tensor):
        yield from ([value] for value in (column.tolist() if isinstance(column, NonTensorStack) else column))
    elif not column.is_nested:
        yield from (column[i : i + 1] for i in range(len(column)))
    else:
        rows = column.unbind()
        is_jagged = all(row.dim() and row.shape[1:] == rows[0].shape[1:] for row in rows)
        for row in rows:
            if is_jagged:
                yield LocalPart(Kind.JAGGED, 1, (row,), offsets=np.array([0, row.shape[0]]))
            else:
                yield row.unsqueeze(0)


def _value_of(part: LocalPart) -> Any:
    if part.kind is Kind.VALUES:
        return part.values[0]
    return part.tensor if part.kind is Kind.JAGGED else part.tensor[0]
