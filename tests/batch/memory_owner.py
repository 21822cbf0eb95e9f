"""An owner in this process's memory, behind the boundary that the real client stands behind.

`MemoryOwner.put` makes entries as a store does, and keeps their bytes; `MemoryClient` has the functions of
`trainer_adapters.batch.client`. Nothing is shared between what was put and what is fetched but bytes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import PeerLost, ProtocolError
from trainer_adapters.batch.inputs import local_part
from trainer_adapters.batch.parts import LocalPart, buffers_of, entry_of, part_of
from trainer_adapters.batch.records import ClearReport, Entry, Owner, ShardId, VersionSpan

_numbers = itertools.count()


class MemoryOwner:
    def __init__(self, client: MemoryClient, name: str = "") -> None:
        self.owner = Owner(name or f"owner-{next(_numbers)}", "ipc:///nowhere")
        self.held: dict[ShardId, torch.Tensor] = {}
        client.stores[self.owner.id] = self

    def put(
        self, task_id: str, data: Mapping[str, Any], versions: VersionSpan | None = None, timeout_s: float = 0
    ) -> tuple[Entry, ...]:
        entries = []
        for key, value in data.items():
            shard, part = ShardId(task_id, key), local_part(value)
            buffers = buffers_of(part)
            stored = torch.from_numpy(np.concatenate(buffers)) if buffers else torch.zeros(0, dtype=torch.uint8)
            self.held[shard] = stored
            entries.append(entry_of(shard, part, self.owner.id, digest_bytes(stored.numpy()), versions))
        return tuple(entries)


class MemoryClient:
    """`broken`: shards whose fetch fails. `asked`: the shards of each fetch."""

    def __init__(self) -> None:
        self.stores: dict[str, MemoryOwner] = {}
        self.broken: set[ShardId] = set()
        self.asked: list[list[ShardId]] = []
        self.cleared: list[dict[str, list[str]]] = []

    def fetch_entries(
        self,
        entries: Sequence[Entry],
        owners: Mapping[str, Owner],
        *,
        timeout_s: float,
        have: MutableMapping[ShardId, LocalPart],
    ) -> None:
        assert timeout_s > 0
        self.asked.append([entry.shard for entry in entries])
        failed = []
        for entry in entries:
            stored = self.stores[owners[entry.owner].id].held.get(entry.shard)
            if stored is None or entry.shard in self.broken:
                failed.append(f"{entry.shard}@{entry.owner}")
                continue
            if digest_bytes(stored.numpy()) != entry.digest:
                raise ProtocolError(f"digest of {entry.shard}")
            have[entry.shard] = part_of(entry, stored.clone())
        if failed:
            raise PeerLost(f"not fetched: {', '.join(failed)}")

    async def afetch_entries(
        self,
        entries: Sequence[Entry],
        owners: Mapping[str, Owner],
        *,
        timeout_s: float,
        have: MutableMapping[ShardId, LocalPart],
    ) -> None:
        await asyncio.sleep(0)
        self.fetch_entries(entries, owners, timeout_s=timeout_s, have=have)

    def clear_tasks(
        self, task_ids: Mapping[str, Iterable[str]], owners: Mapping[str, Owner], *, timeout_s: float
    ) -> ClearReport:
        asked = {owner: list(ids) for owner, ids in task_ids.items()}
        self.cleared.append(asked)
        cleared, unknown = set(), set()
        for owner, ids in asked.items():
            held = self.stores[owners[owner].id].held
            for task in ids:
                gone = [shard for shard in held if shard.task_id == task]
                for shard in gone:
                    del held[shard]
                (cleared if gone else unknown).add(task)
        return ClearReport(len(cleared), len(unknown - cleared))
