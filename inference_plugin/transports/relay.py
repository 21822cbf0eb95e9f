"""A worker that passes on what it is sent: a log of one transaction's buckets, and a thread for each worker that it feeds.

- A bucket goes on as it came, the received frame itself while it is fresh, else packed anew from the staging memory. So
  nobody waits for a slower one: neither who sends to this worker, nor the other children, and no memory is needed for it.
- A child that is lost, refuses, or doesn't answer for `silence_s` is stepped over: those below it are fed from here, each
  from the bucket on that it doesn't have. One that was only slow goes on when it answers.
- The trainer's digests go with the bytes: whatever happens on the way, each worker compares for itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from inference_plugin.transports.spread import branches
from inference_plugin.wire.channel import Channel
from inference_plugin.wire.errors import PeerLost, SyncTimeout, WeightwireError
from inference_plugin.wire.listening import check_listen_address
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Body, Bucket, Done, Hop, Relay, Relaying
from inference_plugin.wire.tensors import box_view, bytes_view

__all__ = ["PassingOn"]

logger = logging.getLogger(__name__)

FRESH = 2
"""So many of the last buckets are kept as they came."""

LOOK_S = 1.0
"""At most so long a child that there is nothing to send to isn't asked whether it is still there; those below it need it."""

PATIENCE = 3
"""So many times as long as one is waited for, a worker waits to be fed: there may be several to step over."""

Reply = TypeVar("Reply")


@dataclass
class _Entry:
    """A bucket that was taken, and its payload while that is fresh."""

    bucket: Bucket
    payload: memoryview | None


class PassingOn:
    """One transaction's log and children. `add`, `feed` and `settle` are called by the worker's threads, the rest by ours.

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
        """This worker is being fed. Who merely asks whether it is there may itself wait in vain."""
        self._heard_s = time.monotonic()

    def check_heard(self, missing: str) -> None:
        """Raises `PeerLost` if nobody has for long enough that some who didn't answer could have been stepped over."""
        if time.monotonic() - self._heard_s > PATIENCE * self.silence_s:
            raise PeerLost(
                f"no other worker passes this update on to this one: {missing}",
                hint="workers must reach each other's WEIGHTWIRE_LISTEN addresses; fan_out='direct' does without",
            )

    def add(self, bucket: Bucket, payload: memoryview) -> None:
        """A bucket that was compared and placed is to be passed on."""
        self.heard()
        with self._changed:
            self._log.append(_Entry(bucket, payload))
            if len(self._log) > FRESH:
                self._log[-FRESH - 1].payload = None
            self._changed.notify_all()

    def feed(self, request: Relay) -> None:
        """Begins to feed these, all of the log and what will come. Those that are fed already stay as they are.

        Raises `AuthError` for an address to which nothing may be sent unprotected.
        """
        chosen = branches(request.below, request.degree)
        for child, _ in chosen:
            check_listen_address(child.address)
        with self._changed:
            for child, below in chosen:
                if child.address not in self._fed and not self.settled:
                    feed = _Feed(self, child, Relay(request.group, request.txn, below, request.degree))
                    self._fed[child.address] = feed
                    self._running += 1
                    feed.start()

    def settle(self, release: Callable[[], None] | None = None) -> None:
        """Nothing more will come. What is there is still passed on; then, or at once, `release` gets the memory back."""
        with self._changed:
            self.settled = True
            self._release = release or self._release
            self._changed.notify_all()
            self._when_idle()

    def entry(self, position: int) -> _Entry | None:
        """The bucket at that position, once it is there; None if it isn't within `LOOK_S`, or will never be."""
        look_s = min(LOOK_S, self.silence_s / 3)
        with self._changed:
            self._changed.wait_for(lambda: position < len(self._log) or self.settled, look_s)
            return self._log[position] if position < len(self._log) else None

    def payload(self, entry: _Entry) -> memoryview:
        """A bucket's bytes, as they came."""
        if (fresh := entry.payload) is not None:
            return fresh
        parts = []
        for piece in entry.bucket.pieces:
            rows = self._manifest.rows(piece.box)
            if rows is not None and rows.rows == 1:
                parts.append(self._memory.numpy()[rows.start : rows.start + rows.row_bytes])
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
    """Passes the log on to one child, one bucket in flight."""

    def __init__(self, passing: PassingOn, child: Hop, request: Relay) -> None:
        super().__init__(name="weightwire-relay", daemon=True)
        self._passing = passing
        self._child = child
        self._request = request
        self._stepped_over = False

    def run(self) -> None:
        child = self._child
        try:
            with Channel(
                child.address,
                pid=child.pid,
                peer_boot_id=child.boot_id,
                side="worker",
                replica=child.replica,
                rank=child.rank,
                phase="stage",
                silence_s=self._passing.silence_s,
            ) as channel:
                self._pass_all(channel)
        except Exception as error:  # noqa: BLE001 -- the child's replica is the manager's to judge; those below are ours
            logger.info("weightwire: no longer passing on to %s: %s", child.replica, WeightwireError.wrap(error))
            self._step_over()
        finally:
            self._passing.ended()

    def _pass_all(self, channel: Channel) -> None:
        has = self._ask(channel, self._request, Relaying).next_seq
        position = 0
        while True:
            entry = self._passing.entry(position)
            if entry is not None:
                position += 1
                if entry.bucket.seq >= has.get(entry.bucket.rank, 0):
                    self._ask(channel, entry.bucket, Done, self._passing.payload(entry))
            elif self._passing.settled:
                return
            else:
                self._ask(channel, self._request, Relaying)

    def _ask(self, channel: Channel, body: Body, kind: type[Reply], payload: memoryview | None = None) -> Reply:
        """The child's reply. While it is silent those below it are fed from here."""
        channel.send(body, payload)
        while True:
            try:
                return channel.receive(kind, timeout_s=self._passing.silence_s)
            except SyncTimeout:
                if self._passing.settled:
                    raise
                self._step_over()

    def _step_over(self) -> None:
        if not (self._stepped_over or self._passing.settled):
            self._stepped_over = True
            if self._request.below:
                self._passing.feed(self._request)
