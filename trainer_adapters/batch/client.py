"""The consumer's side: fetches shards from their owners, and clears tasks.

1. group the shards by owner; an owner of this host is asked for a lease (one request for thousands of shards), any other
   one for bytes, in replies of at most `bucket_bytes`, two under way at a time;
2. all owners are waited for at once, with one deadline. A channel repeats requests that a broken link may have lost; what an
   owner refuses is not asked for again;
3. every shard is checked against the digest in its entry, and becomes a part: a view of the mapped bytes, or of the memory
   that its bytes were pulled into;
4. what failed is one `FetchFailed`, which lists every shard. What arrived is kept. So are a few connections to owners of this
   host, for the next fetch (`connections`).

Owners of another kind (`backends`) are asked meanwhile, on a thread for each kind, with the same deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

from inference_plugin.devices import start_thread
from inference_plugin.net.addresses import boot_id
from inference_plugin.net.channel import Channel, Outgoing, fan_out, take_ready
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import (
    FetchFailed,
    FetchFailure,
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
    WeightwireError,
    first_few,
)
from inference_plugin.wire.messages import ClearTasks, TasksCleared
from inference_plugin.wire.messages.batch import MAX_PULL_BYTES, MAX_TASKS, MAX_WANTED
from trainer_adapters.batch.backends import BackendClear, BackendFetch, scheme_of_backend
from trainer_adapters.batch.consumer import consumer
from trainer_adapters.batch.exchanges import LATE, Arrivals, Exchange, LeaseExchange, pull_exchanges
from trainer_adapters.batch.limits import checked_seconds
from trainer_adapters.batch.owner_link import connect, for_rows, owner_named, release
from trainer_adapters.batch.parts import LocalPart
from trainer_adapters.batch.records import ClearReport, Entry, Owner, ShardId, listed_tasks

__all__ = ["afetch_entries", "clear_tasks", "fetch_entries"]

logger = logging.getLogger(__name__)

PULLS_AT_ONCE = 2
"""Requests under way to one owner: one reply travels while another is copied."""

AGAIN = "clear again: it is idempotent"

MOST_TOLD = 16
"""Largest number of reasons in the text of one error."""

CANCEL_S = 1.0
"""Longest time, in seconds, until a cancelled fetch stops."""


def fetch_entries(
    entries: Sequence[Entry],
    owners: Mapping[str, Owner],
    *,
    timeout_s: float,
    have: MutableMapping[ShardId, LocalPart],
) -> None:
    """Fetches the shards that are not in `have`, into `have`. `owners`: by id.

    Raises `FetchFailed` where some can't be fetched; the others are in `have` then.
    """
    _Fetch(entries, owners, timeout_s, have).run()


async def afetch_entries(
    entries: Sequence[Entry],
    owners: Mapping[str, Owner],
    *,
    timeout_s: float,
    have: MutableMapping[ShardId, LocalPart],
) -> None:
    """As `fetch_entries`, on a thread of its own. If it is cancelled, the thread ends within `CANCEL_S`."""
    fetch = _Fetch(entries, owners, timeout_s, have)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[BaseException | None] = loop.create_future()

    def run() -> None:
        error: BaseException | None = None
        try:
            fetch.run()
        except BaseException as caught:  # noqa: BLE001 -- it is raised where the caller awaits
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, done, error)

    start_thread(run, name="weightwire-fetch", stop=fetch.cancel)
    try:
        error = await done
    except BaseException:  # cancelled, or the loop ends
        fetch.cancel()
        raise
    if error is not None:
        raise error


def clear_tasks(
    task_ids: Iterable[str] | Mapping[str, Iterable[str]], owners: Mapping[str, Owner], *, timeout_s: float
) -> ClearReport:
    """Has owners drop tasks. Idempotent; unknown ids are counted.

    `task_ids` by owner id: each owner is sent only its own. Without that, every owner is asked for all. Owners that can't be
    reached within `timeout_s` are in the report and don't keep the others waiting.
    """
    timeout_s = checked_seconds("timeout_s", timeout_s)
    if isinstance(task_ids, Mapping):
        by_owner = {owner: listed_tasks(ids) for owner, ids in task_ids.items()}
    else:
        everything = listed_tasks(task_ids)
        by_owner = dict.fromkeys(owners, everything)
    failed: dict[str, WeightwireError] = {}
    cleared: set[str] = set()
    unknown: set[str] = set()
    requests: list[tuple[str, list[str], Outgoing]] = []
    by_scheme: dict[str, list[tuple[Owner, list[str]]]] = {}
    for owner_id in list(by_owner):
        if (known := owners.get(owner_id)) is not None and (scheme := scheme_of_backend(known)) is not None:
            by_scheme.setdefault(scheme, []).append((known, by_owner.pop(owner_id)))
    deadline_s = time.monotonic() + timeout_s
    backends = [BackendClear(scheme, asked_of, deadline_s) for scheme, asked_of in by_scheme.items()]
    with contextlib.ExitStack() as stack:
        for owner_id, ids in by_owner.items():
            for start in range(0, len(ids), MAX_TASKS):
                asked = ids[start : start + MAX_TASKS]
                request = ClearTasks(consumer().session, consumer().next_number(), tuple(asked))
                try:
                    owner = owner_named(owner_id, owners)
                    channel = connect(owner)
                    stack.callback(release, owner, channel)
                    requests.append((owner_id, asked, Outgoing(channel, request)))
                except WeightwireError as error:
                    failed[owner_id] = error
        replies = fan_out([request for _, _, request in requests], TasksCleared, timeout_s=timeout_s)
        for (owner_id, asked, _), reply in zip(requests, replies, strict=True):
            if isinstance(reply, WeightwireError):
                failed[owner_id] = for_rows(reply.advise(AGAIN) if isinstance(reply, SyncTimeout) else reply)
            else:
                unknown.update(reply.unknown)
                cleared.update(set(asked) - set(reply.unknown))
    for backend in backends:
        late = SyncTimeout(f"no answer within {timeout_s:g} s", hint=AGAIN)
        for (owner, of_owner), answer in zip(backend.asked, backend.finish(late), strict=True):
            if isinstance(answer, WeightwireError):
                failed[owner.id] = for_rows(answer)
            else:
                unknown.update(answer)
                cleared.update(set(of_owner) - set(answer))
    return ClearReport(len(cleared), len(unknown - cleared), tuple(failed.items()))


def _settle(done: asyncio.Future[BaseException | None], error: BaseException | None) -> None:
    if not done.done():
        done.set_result(error)


class _Fetch:
    """One fetch, on one thread."""

    def __init__(
        self,
        entries: Sequence[Entry],
        owners: Mapping[str, Owner],
        timeout_s: float,
        have: MutableMapping[ShardId, LocalPart],
    ) -> None:
        self.is_cancelled = False
        self._timeout_s = checked_seconds("timeout_s", timeout_s)
        self._owners = owners
        self._wanted = {entry.shard: entry for entry in entries if not have or entry.shard not in have}
        self._bucket_bytes = min(Config.from_environment().bucket_bytes, MAX_PULL_BYTES)
        self._arrivals = Arrivals(have)
        self._sources: list[_Source] = []
        self._backends: list[BackendFetch] = []

    def cancel(self) -> None:
        """Any thread: `run` ends within `CANCEL_S`."""
        self.is_cancelled = True

    def run(self) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        try:
            self._ask_all(deadline_s)
            while (open_channels := self._open_channels()) and not self.is_cancelled:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                for channel, reply in take_ready(list(open_channels), object, timeout_s=min(left_s, CANCEL_S)):
                    self._take(open_channels[channel], channel, reply, deadline_s)
            late = SyncTimeout(f"not delivered within {self._timeout_s:g} s", hint=LATE)
            for source in self._sources:
                source.give_up(late)
            for backend in self._backends:
                backend.finish(self._arrivals, late, lambda: self.is_cancelled)
        finally:
            for source in self._sources:
                source.close()
            for backend in self._backends:
                backend.cancel()
            self._arrivals.end()
        self._raise_failures()

    def _ask_all(self, deadline_s: float) -> None:
        by_owner: dict[str, list[Entry]] = {}
        by_scheme: dict[str, list[tuple[Owner, list[Entry]]]] = {}
        to_copy: dict[str, _Source] = {}
        for entry in self._wanted.values():
            by_owner.setdefault(entry.owner, []).append(entry)
        for owner_id, entries in by_owner.items():
            try:
                owner = owner_named(owner_id, self._owners)
                if (scheme := scheme_of_backend(owner)) is not None:
                    by_scheme.setdefault(scheme, []).append((owner, entries))
                    continue
                source = _Source(owner, self._arrivals)
                self._sources.append(source)
                if source.owner.boot_id == boot_id() and source.owner.pid:
                    starts = range(0, len(entries), MAX_WANTED)
                    source.add([LeaseExchange(source.owner, entries[i : i + MAX_WANTED]) for i in starts])
                else:
                    to_copy[owner_id] = source
            except WeightwireError as error:
                self._arrivals.fail(entries, error)
        copied: dict[str, list[Entry]] = {}
        # All owners at once: a look for free memory takes 0.4 ms.
        for entry in self._arrivals.admit(entry for owner_id in to_copy for entry in by_owner[owner_id]):
            copied.setdefault(entry.owner, []).append(entry)
        for owner_id, entries in copied.items():
            try:
                to_copy[owner_id].add(pull_exchanges(entries, self._bucket_bytes))
            except WeightwireError as error:
                self._arrivals.fail(entries, error)
        self._backends += [BackendFetch(scheme, wanted, deadline_s) for scheme, wanted in by_scheme.items()]

    def _open_channels(self) -> dict[Channel, _Source]:
        return {channel: source for source in self._sources for channel in source.open}

    def _take(self, source: _Source, channel: Channel, reply: object, deadline_s: float) -> None:
        if (exchange := source.open.get(channel)) is None:
            return  # the owner was given up for what another channel told at the same time
        try:
            if isinstance(reply, WeightwireError):
                raise reply
            exchange.take(reply, channel.payload, self._arrivals, deadline_s)
        except TransportUnavailable as error:
            logger.info(
                "weightwire: the rows of %s can't be mapped and are copied over its socket instead: %s",
                source.owner.id,
                error,
            )
            source.add(pull_exchanges(self._arrivals.admit(exchange.entries), self._bucket_bytes))
        except WeightwireError as error:
            self._arrivals.fail(exchange.entries, for_rows(error))
            if not isinstance(error, ProtocolError):  # the owner is gone or can't be spoken to
                source.give_up(error)
        finally:
            exchange.give_up()  # also after Ctrl-C
            source.open.pop(channel, None)
        source.ask(channel)

    def _raise_failures(self) -> None:
        failures = tuple(
            FetchFailure(shard.task_id, shard.key, self._wanted[shard].owner, for_rows(error))
            for shard, error in self._arrivals.failed.items()
        )
        if failures:
            raise FetchFailed(
                f"{len(failures)} of {len(self._wanted)} shards could not be fetched: {_told(failures)}",
                failures=failures,
            )


class _Source:
    """One owner in one fetch: its channels, the requests under way, and those still to be sent."""

    def __init__(self, owner: Owner, arrivals: Arrivals) -> None:
        self.owner = owner
        self.open: dict[Channel, Exchange] = {}
        self._arrivals = arrivals
        self._channels: list[Channel] = []
        self._waiting: list[Exchange] = []

    def add(self, exchanges: Sequence[Exchange]) -> None:
        """Queues requests, and opens the channels that they need. Raises `WeightwireError` where there is none."""
        self._waiting += reversed(exchanges)
        try:
            while len(self._channels) < min(PULLS_AT_ONCE, len(self._waiting)):
                self._channels.append(connect(self.owner))
        except WeightwireError:
            if not self._channels:
                raise  # else the others do: no descriptor is free for more, say
        for channel in self._channels:
            if channel not in self.open:
                self.ask(channel)

    def ask(self, channel: Channel) -> None:
        """Sends the next request, if there is one."""
        while self._waiting and channel not in self.open:
            exchange = self._waiting.pop()
            if not self._arrivals.missing(exchange.entries):
                continue
            try:
                channel.send(exchange.request)
                self.open[channel] = exchange
            except WeightwireError as error:
                self._arrivals.fail(exchange.entries, for_rows(error))

    def give_up(self, error: WeightwireError) -> None:
        """Fails all shards that have not arrived."""
        exchanges = [*self.open.values(), *self._waiting]
        for exchange in self.open.values():
            exchange.give_up()
        self.open.clear()
        self._waiting.clear()
        for exchange in exchanges:
            self._arrivals.fail(exchange.entries, for_rows(error))

    def close(self) -> None:
        for exchange in self.open.values():
            exchange.give_up()
        while self._channels:
            release(self.owner, self._channels.pop())


def _told(failures: Iterable[FetchFailure]) -> str:
    """The failures as text, grouped by owner and reason."""
    shards: dict[tuple[str, str], list[str]] = {}
    for one in failures:
        reason = f"{type(one.error).__name__}: {one.error.message}" + (
            f" -- {one.error.hint}" if one.error.hint else ""
        )
        shards.setdefault((one.owner, reason), []).append(f"{one.task_id!r}:{one.key!r}")
    told = [f"{first_few(names, 4)} at {owner}: {reason}" for (owner, reason), names in shards.items()]
    return "; ".join(told[:MOST_TOLD]) + (f"; and {len(told) - MOST_TOLD} other reasons" if told[MOST_TOLD:] else "")
