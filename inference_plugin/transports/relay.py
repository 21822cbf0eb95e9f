"""A worker that relays buckets: a log of one transaction's buckets, and a thread for each child that it feeds.

- A recent bucket is relayed as the frame that was received, an older one is packed anew from the staging memory. So
  neither the sender nor the other children wait for a slow child, and no extra memory is needed.
- A child that is lost, refuses, or does not answer for `silence_s` is stepped over: this worker feeds the children below
  it, each from the first bucket that it lacks. A child that was only slow continues when it answers.
- The trainer's digests travel with the bytes, and every worker compares them itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import torch

from inference_plugin.net.channel import Channel, bytes_channel
from inference_plugin.net.listening import check_listen_address
from inference_plugin.transports.spread import branches
from inference_plugin.wire.errors import PeerLost, ProtocolError, SyncTimeout, WeightwireError
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Body, Bucket, Done, Hop, Relay, Relaying
from inference_plugin.wire.tensors import box_view, bytes_view

__all__ = ["BucketRelay", "RelayTerms"]

logger = logging.getLogger(__name__)

FRESH = 2
"""Most recent buckets whose received frames are kept."""

MAX_FEEDS = 256
"""Limit on the workers that one worker feeds: its own branches, and those below children that were stepped over."""

LOOK_S = 1.0
"""Longest time an idle child goes unprobed, in seconds: the children below depend on it."""

PATIENCE = 3
"""A worker waits this many times `silence_s` to be fed: several workers above may have to be stepped over."""

Reply = TypeVar("Reply")


class RelayTerms(msgspec.Struct, frozen=True):
    """The description of an update in which workers relay buckets; without one, none does."""

    degree: Annotated[int, msgspec.Meta(ge=1, lt=65)]
    silence_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]


@dataclass
class _Entry:
    """A bucket that was received, and its payload while that is recent."""

    bucket: Bucket
    payload: memoryview | None


class BucketRelay:
    """One transaction's log and children. The worker's threads call `add`, `feed` and `settle`, the feeding threads the rest.

    `memory` is the staging, in which every piece of every bucket lies whole.
    """

    def __init__(self, manifest: Manifest, memory: torch.Tensor, silence_s: float) -> None:
        self.silence_s = silence_s
        self._manifest = manifest
        self._memory = memory
        self._changed = threading.Condition()
        self._log: list[_Entry] = []
        self._fed: dict[str, _Feed] = {}
        self._running = 0
        self._release: Callable[[], None] | None = None
        self._heard_s = time.monotonic()
        self.settled = False

    def heard(self) -> None:
        """This worker was just fed. A mere probe does not count: its sender may itself be waiting in vain."""
        self._heard_s = time.monotonic()

    def check_heard(self, missing: str) -> None:
        """Raises `PeerLost` if nobody fed this worker for so long that the workers above would have been stepped over."""
        if time.monotonic() - self._heard_s > PATIENCE * self.silence_s:
            raise PeerLost(
                f"no other worker passes this update on to this one: {missing}",
                hint="workers must reach each other's WEIGHTWIRE_LISTEN addresses; fan_out='direct' does without",
            )

    def add(self, bucket: Bucket, payload: memoryview) -> None:
        """Relays a bucket that was compared and placed."""
        self.heard()
        with self._changed:
            self._log.append(_Entry(bucket, payload))
            if len(self._log) > FRESH:
                self._log[-FRESH - 1].payload = None
            self._changed.notify_all()

    def feed(self, request: Relay) -> None:
        """Begins to feed these workers: the log so far, and every later bucket. Workers that are fed already stay fed.

        Raises `AuthError` for an address to which nothing may be sent unprotected, `ProtocolError` beyond `MAX_FEEDS`.
        """
        chosen = branches(request.below, request.degree)
        for child, _ in chosen:
            check_listen_address(child.address)
        with self._changed:
            for child, below in chosen:
                if child.address not in self._fed and not self.settled:
                    if self._running >= MAX_FEEDS:
                        raise ProtocolError(f"{MAX_FEEDS} workers are fed from here, which is the limit")
                    feed = _Feed(self, child, Relay(request.group, request.txn, below, request.degree))
                    feed.start()
                    self._fed[child.address] = feed
                    self._running += 1  # it takes the lock before it counts itself out

    def settle(self, release: Callable[[], None] | None = None) -> None:
        """No more buckets will come. `release` gets the memory back once the log has been relayed."""
        with self._changed:
            self.settled = True
            self._release = release or self._release
            self._changed.notify_all()
            self._when_idle()

    def entry(self, position: int) -> _Entry | None:
        """The bucket at that position, once it is there; None if it did not come within `LOOK_S`, or never will."""
        look_s = min(LOOK_S, self.silence_s / 3)
        with self._changed:
            self._changed.wait_for(lambda: position < len(self._log) or self.settled, look_s)
            return self._log[position] if position < len(self._log) else None

    def payload(self, entry: _Entry) -> memoryview:
        """A bucket's bytes, as they were received."""
        if (fresh := entry.payload) is not None:
            return fresh
        parts = []
        for piece in entry.bucket.pieces:
            region = self._manifest.region(piece.box)
            if region is not None and region.sizes[0] == 1:
                parts.append(self._memory.numpy()[region.offset : region.offset + region.sizes[1]])
            else:
                parts.append(bytes_view(box_view(self._memory, self._manifest, piece.box).contiguous()).numpy())
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).data

    def ended(self) -> None:
        with self._changed:
            self._running -= 1
            self._when_idle()

    def _when_idle(self) -> None:
        if self.settled and not self._running:
            self._log.clear()
            release, self._release = self._release, None
            if release is not None:
                release()


class _Feed(threading.Thread):
    """Sends the log to one child, one bucket in flight."""

    def __init__(self, relay: BucketRelay, child: Hop, request: Relay) -> None:
        super().__init__(name="weightwire-relay", daemon=True)
        self._relay = relay
        self._child = child
        self._request = request
        self._stepped_over = False

    def run(self) -> None:
        child = self._child
        try:
            with bytes_channel(child, "worker", self._relay.silence_s) as channel:
                self._pass_all(channel)
        except Exception as error:  # noqa: BLE001 -- the child's replica is the manager's to judge; those below are ours
            logger.info("weightwire: no longer relaying to %s: %s", child.replica, WeightwireError.wrap(error))
            self._step_over()
        finally:
            self._relay.ended()

    def _pass_all(self, channel: Channel) -> None:
        has = self._ask(channel, self._request, Relaying).next_seq
        position = 0
        while True:
            entry = self._relay.entry(position)
            if entry is not None:
                position += 1
                if entry.bucket.seq >= has.get(entry.bucket.rank, 0):
                    self._ask(channel, entry.bucket, Done, self._relay.payload(entry))
            elif self._relay.settled:
                return
            else:
                self._ask(channel, self._request, Relaying)

    def _ask(self, channel: Channel, body: Body, kind: type[Reply], payload: memoryview | None = None) -> Reply:
        """The child's reply. If the child falls silent, this worker feeds the children below it."""
        channel.send(body, payload)
        while True:
            try:
                return channel.receive(kind, timeout_s=self._relay.silence_s)
            except SyncTimeout:
                if self._relay.settled:
                    raise
                self._step_over()

    def _step_over(self) -> None:
        if not (self._stepped_over or self._relay.settled):
            self._stepped_over = True
            if self._request.below:
                try:
                    self._relay.feed(self._request)
                except Exception as error:  # noqa: BLE001 -- theirs to notice: nobody feeds them
                    logger.warning("weightwire: those below %s are not fed: %s", self._child.replica, error)
