"""Channels from a consumer to owners, made or taken from those that were kept; and errors of channels, as they concern rows."""

from __future__ import annotations

from collections.abc import Mapping

import zmq

from inference_plugin.net.channel import Channel
from inference_plugin.wire.errors import PeerLost, ProtocolError, SyncTimeout, TransportUnavailable, WeightwireError
from trainer_adapters.batch.consumer import consumer
from trainer_adapters.batch.exchanges import LATE
from trainer_adapters.batch.records import Owner

__all__ = ["connect", "for_rows", "owner_named", "release"]

HINTS: dict[type[WeightwireError], str] = {
    SyncTimeout: LATE,
    PeerLost: "the rows that its process held are lost: go on without these tasks, or generate them again",
}


def connect(owner: Owner) -> Channel:
    """A channel to the owner. Raises `TransportUnavailable` for an owner of another kind, `ProtocolError` for an address that is
    none."""
    if (kept := consumer().connection(owner)) is not None:
        return kept
    scheme = owner.address.partition("://")[0]
    if scheme not in ("ipc", "tcp"):
        raise TransportUnavailable(
            f"owner {owner.id} is at {owner.address!r}; known are ipc://, tcp:// and ray://",
            hint="install the same weightwire version on both sides",
        )
    try:
        return Channel(
            owner.address,
            pid=owner.pid,
            start_ticks=owner.start_ticks,
            peer_boot_id=owner.boot_id,
            may_close=True,
            side="owner",
            replica=owner.id,
        )
    except TransportUnavailable:
        consumer().close_connections()  # the next attempt finds their descriptors
        raise
    except zmq.ZMQError as error:
        raise ProtocolError(f"owner {owner.id} is at {owner.address!r}, which is no address: {error}") from error


def release(owner: Owner, channel: Channel) -> None:
    """A channel is no longer needed: one to an owner of this host is kept, unless a request is still open on it."""
    if channel.is_open or not owner.address.startswith("ipc://"):
        channel.close()
    else:
        consumer().keep_connection(owner, channel)


def owner_named(owner_id: str, owners: Mapping[str, Owner]) -> Owner:
    """The owner of that id. Raises `ProtocolError` if it is not among `owners`."""
    if (owner := owners.get(owner_id)) is None:
        raise ProtocolError(
            f"the address of owner {owner_id} is not known", hint="pass the owners that came with the entries"
        )
    return owner


def for_rows(error: WeightwireError) -> WeightwireError:
    """The error with a hint about rows; the hints of a channel's own errors are about weights."""
    return error.advise(HINTS.get(type(error), error.hint))
