"""Gives every rank's bytes to every rank: of any length, without pickle, by two collectives or by the process group's store."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ConfigError, ErrorInfo, PeerLost, SyncTimeout, WeightwireError
from trainer_adapters.sources.left_behind import any_left, still_made_on

__all__ = ["Collectives", "OwnGroup", "exchange_bytes", "exchange_device", "exchange_tensors", "in_buckets", "meet"]

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

HOST = torch.device("cpu")

PREFIX = "weightwire/rendezvous"
OPEN = f"{PREFIX}/open"
NUMBER = f"{PREFIX}/number"
WARN_AFTER_S = 10.0
"""A wait is logged after this time. Also the longest single wait in the store, which other threads of this process may need."""

ANSWER_S = 1.0
"""The other ranks wait this many seconds longer than rank 0, which tells them which ranks are missing."""


FAILED_S = 2.0
"""How long a rank's failure is not told, so that ranks that fail together tell the same error."""

GIVEN_UP = 1 << 32


class _Record(msgspec.Struct, frozen=True):
    """What a rank brings to a rendezvous, and for which call."""

    making: str
    mine: bytes


class _Met(msgspec.Struct, frozen=True):
    """The result of a rendezvous: every rank's record, or the error that ended it."""

    records: tuple[bytes, ...] = ()
    error: ErrorInfo | None = None


def meet(mine: bytes, group: dist.ProcessGroup | None, *, timeout_s: float, making: str = "SyncManager") -> list[bytes]:
    """Every rank's `mine`, in order of rank, through the group's store: a rendezvous with a deadline.

    For a call that some ranks may never make. `making`: what that call makes, for errors.

    1. rank 0 takes the rendezvous' number and opens it;
    2. every other rank stores its record, and what it makes, under that number;
    3. rank 0 closes the rendezvous and stores all records, or its error, for the others.

    Called on every rank of `group` (None: the default group). Ranks that called it raise `SyncTimeout`, which names the missing
    ranks; where ranks make different things, all raise `ConfigError`. A failed rendezvous doesn't affect the next one.
    """
    deadline_s = time.monotonic() + timeout_s
    store: Any = dist.distributed_c10d._get_process_group_store(group or dist.distributed_c10d._get_default_group())
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank == 0:
        return _lead(store, mine, size, deadline_s, timeout_s, making)
    _wait(store, [OPEN], [0], deadline_s, timeout_s, making)
    number = store.add(NUMBER, 0)
    store.set(f"{PREFIX}/{number}/{rank}", msgspec.msgpack.encode(_Record(making, mine)))
    _wait(store, [f"{PREFIX}/{number}"], [0], deadline_s + ANSWER_S, timeout_s, making)
    met = decode_as(store.get(f"{PREFIX}/{number}"), _Met)
    if met.error is not None:
        raise WeightwireError.of(met.error)
    return list(met.records)


class Collectives:
    """What the ranks of a group do together now, and may use collectives in. Made on every rank.

    A collective that a rank never joins ends with the backend's error after the group's time limit, and the group is of no use
    from then on. So the ranks `meet` before, for as long as they would wait in a collective. Raises as `meet` does, and
    `ProtocolError` if a rank still makes slices of an update that failed.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, making: str) -> None:
        whole = group or dist.distributed_c10d._get_default_group()
        backend: Any = whole._get_backend(exchange_device(group))
        limit = getattr(getattr(backend, "options", None), "_timeout", dist.distributed_c10d.default_pg_timeout)
        self._limit_s = limit.total_seconds()
        mine = bytes([any_left()]) + secrets.token_bytes(8)
        met = meet(mine, group, timeout_s=self._limit_s, making=making)
        if late := [rank for rank, told in enumerate(met) if told[0]]:
            raise still_made_on(late)
        self._store: Any = dist.distributed_c10d._get_process_group_store(whole)
        self._size = len(met)
        self._name = f"{PREFIX}/{met[0][1:].hex()}"

    def end(self, error: ErrorInfo | None) -> None:
        """This rank uses none from now on, because it has finished or has failed. Returns once all ranks have: collectives of
        another kind may follow. Raises the error of a rank that failed if some other rank, which may wait for it in a collective,
        has not come `FAILED_S` later; `SyncTimeout` after the group's time limit."""
        out, everyone, failed = (f"{self._name}/{what}" for what in ("out", "everyone", "failed"))
        deadline_s = time.monotonic() + self._limit_s
        until_s = math.inf
        if error is not None:
            self._store.set(failed, msgspec.msgpack.encode(error))
        if self._store.add(out, 1) == self._size:
            self._store.set(everyone, b"")
        while not _is_set(self._store, everyone):
            now_s = time.monotonic()
            if until_s == math.inf and self._store.check([failed]):
                until_s = now_s + FAILED_S
            # Who gives up makes the count one that the last rank does not take for everyone.
            if now_s >= until_s and self._store.add(out, GIVEN_UP) - GIVEN_UP != self._size:
                raise WeightwireError.of(decode_as(self._store.get(failed), ErrorInfo))
            if now_s >= deadline_s:
                raise SyncTimeout(
                    f"a trainer rank has not finished within {self._limit_s:g} s what the ranks make together",
                    hint="it failed or hangs: its own log says why",
                    side="trainer",
                )


class OwnGroup:
    """A gloo group of a source's own over the ranks of `process_group`, so that its collectives don't mix with those of a running
    training. Made on every rank, in the same order as other process groups. Raises as `meet` does.

    A rank that ends, or is held up for longer than the time limit, breaks it: `renew` then makes another one.

    `new_group(use_local_synchronization=True)` would name it by the number of groups that a rank has: where ranks have different
    numbers (embeddings on the first and the last pipeline stage), they would wait for each other under different names.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._of = process_group
        self._store: Any = dist.distributed_c10d._get_process_group_store(
            process_group or dist.distributed_c10d._get_default_group()
        )
        self._timeout_s = Config.from_environment().timeout_s
        self._make("adapter")

    def configure(self, config: Config) -> None:
        """Takes how long a lost rank may block the others (`timeout_s`)."""
        if config.timeout_s != self._timeout_s:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=config.timeout_s), self.group)
            self._timeout_s = config.timeout_s

    def renew(self) -> None:
        """Collective, between operations: makes the group anew if it has failed on any rank."""
        if self._store.check([self._failed]):
            self._make(f"group anew after {self._failed}")  # two that are made at once must not be taken for each other

    @contextlib.contextmanager
    def used(self) -> Iterator[dist.ProcessGroup]:
        """The group, for collectives. Raises `PeerLost` for what the backend raises, and has it renewed on all ranks."""
        try:
            yield self.group
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # without the store's process there is no next time
                self._store.set(self._failed, b"")
            raise PeerLost(
                f"the trainer's ranks can't exchange what they know: {error}",
                hint="one of them ended, or was held up: its own log says why; if all run, the next update works",
                side="trainer",
            ) from error

    def _make(self, making: str) -> None:
        met = meet(secrets.token_bytes(8), self._of, timeout_s=self._timeout_s, making=making)
        c10d, name = dist.distributed_c10d, f"weightwire-{met[0].hex()}"
        ranks = sorted(dist.get_process_group_ranks(self._of or dist.group.WORLD))
        self.group: dist.ProcessGroup
        self.group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend("gloo"),
            c10d._get_default_store(),
            name,  # type: ignore[arg-type]
            timeout=timedelta(seconds=self._timeout_s),  # a lost rank must not block the others
        )
        c10d._world.pg_group_ranks[self.group] = {rank: place for place, rank in enumerate(ranks)}
        self._failed = f"{PREFIX}/failed/{name}"


def _is_set(store: Any, key: str) -> bool:
    """Waits for a key, a second at most. Raises `PeerLost` if the store is gone."""
    try:
        store.wait([key], timedelta(seconds=1))
    except RuntimeError as error:
        if "timeout" not in str(error).lower() and "timed out" not in str(error).lower():
            raise PeerLost(f"the store of torch.distributed is gone: {error}", side="trainer") from error
        return False
    return True


def _lead(store: Any, mine: bytes, size: int, deadline_s: float, timeout_s: float, making: str) -> list[bytes]:
    number = store.add(NUMBER, 1)
    store.set(OPEN, b"")
    met = _Met(error=WeightwireError(f"rank 0's {making} could not be made").info())
    places = {rank: f"{PREFIX}/{number}/{rank}" for rank in range(1, size)}
    try:
        _wait(store, list(places.values()), list(places), deadline_s, timeout_s, making)
        others = [decode_as(store.get(place), _Record) for place in places.values()]
        for rank, other in enumerate(others, 1):
            if other.making != making:
                raise ConfigError(
                    f"trainer rank {rank} makes its {other.making} while rank 0 makes its {making}",
                    hint="make managers and adapters on every rank in the same order",
                    side="trainer",
                    rank=rank,
                    phase="start",
                )
        met = _Met((mine, *(other.mine for other in others)))
    except WeightwireError as error:
        met = _Met(error=error.info())
        raise
    finally:
        store.delete_key(OPEN)
        store.set(f"{PREFIX}/{number}", msgspec.msgpack.encode(met))
    for place in places.values():
        store.delete_key(place)
    return list(met.records)


def _wait(
    store: Any, keys: Sequence[str], ranks: Sequence[int], deadline_s: float, timeout_s: float, making: str
) -> None:
    """Waits until `ranks` have set all `keys`. Raises `SyncTimeout`, and `PeerLost` if the store is gone."""
    warn_at_s = time.monotonic() + WARN_AFTER_S
    missing: list[int] = []
    try:
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                store.wait(list(keys), timedelta(seconds=max(0.001, min(left_s, WARN_AFTER_S))))
                return
            except RuntimeError as error:
                if "timeout" not in str(error).lower() and "timed out" not in str(error).lower():
                    raise
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
            if missing and time.monotonic() >= deadline_s:
                break
            if missing and time.monotonic() >= warn_at_s:
                logger.warning("weightwire: this %s waits for those of trainer ranks %s", making, missing)
                warn_at_s = deadline_s
    except RuntimeError as error:
        raise PeerLost(f"the store of torch.distributed is gone: {error}", side="trainer", phase="start") from error
    raise SyncTimeout(
        f"trainer ranks {missing} have not made their {making} within {timeout_s:g} s",
        hint="make one on every rank of the process group, in the same order on each; if only some ranks are the "
        "trainer, name them with process_group=",
        side="trainer",
        rank=missing[0],
        phase="start",
    )


def exchange_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's `data`, in order of rank. Collective over `group` (None: the default group)."""
    mine = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return [one.numpy().tobytes() for one in exchange_tensors(mine, group)]


def exchange_tensors(mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """`exchange_bytes` for 1-D tensors of uint8, which may differ in length. The result is where `mine` is."""
    device = exchange_device(group, mine.device)
    length = torch.tensor([mine.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(one.item()) for one in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine.to(device)
    everybody = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everybody, padded, group=group)
    return [one[:size].to(mine.device) for one, size in zip(everybody, sizes, strict=True)]


def exchange_device(group: dist.ProcessGroup | None, near: torch.device = HOST) -> torch.device:
    """Where a tensor must be for a collective of `group` (None: the default group): on `near` if the group reaches it, else in
    the host's memory, else on the current device of the first kind that the group has a backend for. gloo gathers in the
    host's memory only."""
    backends = dict(one.split(":") for one in dist.get_backend_config(group).split(","))
    if near.type in backends and (near == HOST or backends[near.type] != "gloo"):
        return near
    if "cpu" in backends:
        return HOST
    kind = next(iter(backends))
    return torch.device(kind, torch.get_device_module(kind).current_device())


def in_buckets(items: Iterable[Item], nbytes_of: Callable[[Item], int], bucket_bytes: int) -> Iterator[list[Item]]:
    """The items, in order, in lists of at most `bucket_bytes` together; a larger item is alone."""
    bucket: list[Item] = []
    used = 0
    for item in items:
        nbytes = nbytes_of(item)
        if bucket and used + nbytes > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(item)
        used += nbytes
    if bucket:
        yield bucket
