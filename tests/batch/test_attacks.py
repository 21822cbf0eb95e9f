"""Attacks on rows: whatever is asked in whatever order, rows are right or refused, and nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from inference_plugin.net.channel import Channel
from inference_plugin.wire.errors import BatchError, FetchFailed, ProtocolError, TransportUnavailable
from inference_plugin.wire.messages import Done, EndLeases, Leased
from inference_plugin.wire.messages.batch import LeaseEnd
from tests.batch.owners import descriptors, fetched
from tests.support.rig import eventually, few_descriptors, runtime
from trainer_adapters.batch import consumer
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.exchanges import LeaseExchange
from trainer_adapters.batch.nested import localize
from trainer_adapters.batch.store import Store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with runtime(monkeypatch), Store(budget_bytes=1 << 24) as store:
        yield store


def test_rows_that_were_replaced_are_not_filled_with_the_later_ones(store: Store) -> None:
    old, new = (
        DistributedBatch.of_entries(store.put("t", {"a": torch.full((4,), number)}), [store.owner]) for number in (1, 2)
    )
    with pytest.raises(BatchError, match="two different entries"):
        localize({"old": old, "new": new})


def test_a_lease_whose_end_comes_first_does_not_begin(store: Store) -> None:
    lease = LeaseExchange(store.owner, store.put("t", {"a": torch.zeros(8)}))
    session = lease.request.consumer.session  # type: ignore[union-attr]
    with Channel(store.owner.address) as channel:
        channel.request(EndLeases(session, (LeaseEnd(lease.request.number),)), Done, timeout_s=60)  # type: ignore[union-attr]
        with pytest.raises(ProtocolError, match="has ended"):
            channel.request(lease.request, Leased, timeout_s=60)
    store.clear(["t"])
    assert store.stats().leased_bytes == 0


def test_fetched_rows_keep_no_descriptor(store: Store) -> None:
    entries = [store.put(f"t{i}", {"a": torch.full((8,), i)}) for i in range(100)]
    fetched(entries[0], store.owner)
    before = descriptors()
    held = [fetched(some, store.owner) for some in entries]
    assert descriptors() < before + 20
    assert [int(part.tensor[0]) for have in held for part in have.values()] == list(range(100))


def test_without_a_free_descriptor_puts_and_fetches_fail_with_a_typed_error_and_later_ones_succeed(
    store: Store,
) -> None:
    batch = DistributedBatch.of_entries(store.put("a", {"a": torch.arange(8)}), [store.owner])
    with Store(budget_bytes=1 << 20) as other:
        near = DistributedBatch.of_entries(other.put("a", {"a": torch.arange(8)}), [other.owner])
        fetched(other.put("b", {"a": torch.arange(8)}), other.owner)  # what is made once in a process is there
        # Its lease goes back over a connection of its own; libzmq ends a process without a descriptor for one that is let in.
        other.clear(["b"])
        eventually(lambda: other.stats().leased_bytes == 0, "the lease to be given back")
        with few_descriptors(0):
            near.fetch(timeout_s=60)
        assert near["a"].tolist() == list(range(8)), "over the connection that was kept"
        del near
        other.clear(["a"])
        eventually(lambda: other.stats().leased_bytes == 0, "that lease to be given back")
    large = {"a": torch.zeros(1, 9 << 20, dtype=torch.uint8)}
    with few_descriptors(0):
        with pytest.raises(TransportUnavailable):
            store.put("c", large)
        with pytest.raises(FetchFailed, match="too few file descriptors"):
            batch.fetch(timeout_s=60)
    assert batch.fetch(timeout_s=60)["a"].tolist() == list(range(8))
    assert store.put("c", large) and store.stats().tasks == 2
    assert store.stats().nbytes == 64 + large["a"].nbytes, "what could not be put holds nothing"


def test_a_number_that_no_message_carries_is_refused(store: Store) -> None:
    with pytest.raises(BatchError, match="not a plain value"):
        store.put("t", {"a": [np.longdouble(1)]})


def test_leases_go_back_although_no_socket_could_be_made_for_a_while(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [zmq.ZMQError(24), zmq.ZMQError(24)]

    def channel(*arguments: Any, **options: Any) -> Channel:
        if refusals:
            raise refusals.pop()
        return Channel(*arguments, **options)

    monkeypatch.setattr(consumer, "Channel", channel)
    have = fetched(store.put("t", {"a": torch.zeros(8)}), store.owner)
    store.clear(["t"])
    assert store.stats().leased_bytes
    have.clear()
    eventually(lambda: not store.stats().leased_bytes, "the lease given back")
