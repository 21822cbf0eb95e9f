"""For engines that the trainer does not reach at speed, and for those that come late: bytes lie in a directory or an object
store, and messages only say where.

1. a rank packs its pieces into objects and uploads each once, however many workers there are: all bytes (an anchor), or, of each
   piece, the elements that changed since the update before;
2. it tells each worker the objects that lead from the bytes that the worker says it holds to the new ones: this update's, also
   those of updates that it missed, or the anchor and all since. What was uploaded before is not uploaded again;
3. the worker reads the ranges that it needs, some objects at once, and makes the changes in its staging memory, in their order;
4. at the seal it compares every piece in that memory with the trainer's digest: nothing of the store is trusted before;
5. a worker that can't make the new bytes of what it reads says so at the next update, for which the ranks upload an anchor.
"""

from __future__ import annotations

import copy
import itertools
import logging
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import msgspec

from inference_plugin.transports.base import Delivery, Target, Transport, WriteStats, digested_pieces
from inference_plugin.transports.chain import Chain, Link, Told, Upload
from inference_plugin.transports.delta import NAME_BYTES, LastSent
from inference_plugin.transports.lanes import Buffer, Lane, WriteTerms
from inference_plugin.transports.objects import ObjectStore, why_no_fsspec
from inference_plugin.transports.spread import FanOut
from inference_plugin.transports.store_staging import Holds, ObjectPlace, Probe, StoreReceiver, Terms, store_of
from inference_plugin.transports.zmq import ANSWER_SHARE, ZmqSender
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Bucket

__all__ = ["TRANSPORT"]

logger = logging.getLogger(__name__)

WRITE_SHARE = 0.8
"""Share of the time for writing that uploads may take: the error that names the store is to arrive before all time is over."""

READ_SHARE = 0.5
"""Share of an operation's time that one read of a worker may take."""

PROBE_S = 30.0
"""How long a probe holds: the store's own rules may delete the object while a manager lives."""

PROBE_ERROR_S = 2.0
"""How long the error of a probe holds: an update asks for each replica, one after the other."""

CLOSE_S = 5.0
"""How long a closing sender waits until its objects are deleted."""


class StoreLane(Lane):
    """A channel on which a worker is told where bytes lie."""

    def _make_buffers(self, config: Config) -> list[Buffer]:
        return []

    def tell(self, told: Told) -> None:
        """Queues a message about the pieces of which the worker needs a part."""
        with self.failing():
            if chosen := [i for i, piece in enumerate(told.pieces) if self.needs(piece)]:
                told, terms = told.only(chosen), self._terms
                place = msgspec.msgpack.encode(ObjectPlace(told.key, told.follows, tuple(told.offsets)))
                pieces, sizes = tuple(told.pieces), tuple(told.sizes)
                bucket = Bucket(terms.group, terms.txn, terms.rank, self._seq, pieces, place, sizes)
                self._seq += 1
                self._packed.append((bucket, None))
                self.advance()


class StoreSender(ZmqSender):
    """Keeps a copy of what this rank uploaded last, in the host's memory, and knows which of its objects are in the store."""

    def __init__(self) -> None:
        super().__init__()
        self._last = LastSent()
        self._chain = Chain()
        self._store: ObjectStore | None = None
        self._folder = time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(4)
        self._token = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._objects: set[str] = set()
        """Of this rank, in the store."""
        self._given_up: set[str] = set()
        """Objects of updates that failed: a call that was left to itself may still write one."""
        self._deleting: tuple[Future[None], set[str]] | None = None
        self._timeout_s = 0.0
        self._probe: Probe | None = None
        self._probe_until_s = 0.0
        self._probe_error: WeightwireError | None = None

    def probe(self) -> bytes:
        """Writes the object, if that is long ago."""
        if self._probe is None or time.monotonic() >= self._probe_until_s:
            self._probe_error = None
            try:
                self._write_probe()
            except WeightwireError as error:
                self._probe_error = error
            self._probe_until_s = time.monotonic() + (PROBE_S if self._probe_error is None else PROBE_ERROR_S)
        if self._probe_error is not None:
            raise copy.copy(self._probe_error)
        return msgspec.msgpack.encode(self._probe)

    def meet(self, targets: Sequence[Target], trainer_ranks: int, timeout_s: float, fan_out: FanOut) -> None:
        """Each worker is told by the rank itself, and reads the store."""
        self._timeout_s = timeout_s

    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        super().allocate(manifest, busy)
        name, read_s = secrets.token_bytes(NAME_BYTES), READ_SHARE * self._timeout_s
        wait_s = min(self.config.control_timeout_s, read_s)
        return msgspec.msgpack.encode(Terms(name, self._folder, self.config.buffers, read_s, wait_s))

    def write(self, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
        terms, left_s = decode_as(delivery.description, Terms), max(0.0, delivery.deadline_s - time.monotonic())
        silence_s = min(self.config.control_timeout_s, ANSWER_SHARE * left_s)
        told_by = WriteTerms(delivery.group, delivery.txn, delivery.rank, 0, delivery.deadline_s, silence_s)
        lanes = self._used = self._spread(told_by, delivery.targets)
        held = self._held(lanes)
        known, pieces, stats = set(self._objects), list[Piece](), WriteStats()
        try:
            with self._last.replaced(delivery.manifest.fingerprint, terms.name):
                behind = self._upload(delivery, terms, held, pieces, stats)
        except BaseException:
            self._given_up |= self._objects - known
            self._chain = Chain()  # an anchor comes next, and may need the room
            self._delete_old()
            raise
        started_s = time.perf_counter()
        paths: dict[bytes, list[Told]] = {}
        for late in behind:
            if (name := held[late].name) not in paths:
                paths[name] = self._chain.path(name, delivery.manifest)
            for told in paths[name]:
                late.tell(told)
        self._finish(stats, started_s)
        self._delete_old()
        return pieces, stats

    def close(self) -> None:
        super().close()
        self._last.clear()
        self._chain, self._probe = Chain(), None
        keys, self._objects, self._given_up = sorted(self._objects | self._given_up), set(), set()
        if keys and self._store is not None:
            try:
                self._store.result(
                    self._store.delete(keys, folder=True), "deleting objects", time.monotonic() + CLOSE_S
                )
            except WeightwireError as error:
                logger.warning("weightwire: objects of folder %s are left: %s", self._folder, error)

    def _upload(
        self, delivery: Delivery, terms: Terms, held: dict[StoreLane, Holds], pieces: list[Piece], stats: WriteStats
    ) -> list[StoreLane]:
        """Uploads the rank's slices. Workers that need nothing else are told meanwhile; returns the lanes to the others."""
        store, before = self._opened(), self._last.name_before
        refused = {each.refused for each in held.values()} & {link.name for link in self._chain.links}
        anchor = Link(b"", terms.name) if not before or refused or self._chain.is_long else None
        changes = Link(before, terms.name) if before and (anchor is None or self._chain.changes_little) else None
        current = [lane for lane in held if changes is not None and held[lane].name == before]
        others = [lane for lane in held if lane not in current]
        left_s = max(0.0, delivery.deadline_s - time.monotonic())
        until_s = time.monotonic() + WRITE_SHARE * left_s

        def new_key() -> str:
            key = f"{terms.folder}/{delivery.rank}-{self._token}-{next(self._numbers)}"
            self._objects.add(key)
            return key

        uploads = [
            Upload(link, store, new_key, self.config, until_s, partial(_tell, lanes))
            for link, lanes in ((anchor, others), (changes, current))
            if link is not None
        ]
        for piece, part in digested_pieces(delivery, stats):
            pieces.append(piece)
            changed = None if self.writes_once else self._last.changes(delivery.manifest, piece, part)
            for upload in uploads:
                upload.add(piece, part if changed is None or upload.link is anchor else changed)
            del part, changed  # before the next one is made
        started_s = time.perf_counter()
        for upload in uploads:
            upload.finish()
        stats.move_s += time.perf_counter() - started_s
        stats.sent_bytes = sum(upload.link.nbytes for upload in uploads)
        stats.held_bytes = len(uploads) * (self.config.buffers + 1) * self.config.bucket_bytes + self._last.nbytes
        if anchor is not None:
            self._chain.begin(anchor, changes)
            return []
        assert changes is not None
        self._chain.extend(changes)
        return others

    def _held(self, lanes: Sequence[Lane]) -> dict[StoreLane, Holds]:
        """What the worker of each lane holds."""
        held = {}
        for lane in lanes:
            assert isinstance(lane, StoreLane)
            held[lane] = Holds()
            with lane.failing():
                if lane.target.landing:
                    held[lane] = decode_as(lane.target.landing, Holds)
        return held

    def _write_probe(self) -> None:
        store, wait_s = self._opened(), self.config.control_timeout_s
        if self._probe is None:
            self._probe = Probe(store.shown, f"{self._folder}/probe", secrets.token_bytes(32), wait_s)
            self._objects.add(self._probe.key)
        call = store.write(self._probe.key, self._probe.content)
        store.result(call, f"writing object {self._probe.key}", time.monotonic() + wait_s)

    def _delete_old(self) -> None:
        """Deletes the objects of which nobody is told any more, in the background."""
        if self._deleting is not None:
            call, keys = self._deleting
            if not call.done():
                return
            if (error := call.exception()) is None:
                self._objects -= keys
            else:
                logger.warning("weightwire: old objects of folder %s are left: %s", self._folder, error)
            self._deleting = None
        old = self._objects - self._chain.keys - ({self._probe.key} if self._probe is not None else set())
        if old and self._store is not None:
            try:
                self._deleting = self._store.delete(sorted(old)), old
            except WeightwireError as error:  # the update is as good without
                logger.warning("weightwire: old objects of folder %s are left: %s", self._folder, error)

    def _opened(self) -> ObjectStore:
        if self._store is None:
            self._store = store_of(self.config)
        return self._store

    def _lane(self, target: Target) -> Lane:
        """It has no buffers: a rank's take no more memory with more workers."""
        if (lane := self.lanes.get(target.address)) is None:
            lane = self.lanes[target.address] = StoreLane(target, self.config)
        return lane


def _tell(lanes: Sequence[StoreLane], told: Told) -> None:
    for lane in lanes:
        lane.tell(told)


TRANSPORT = Transport(
    name="store",
    summary="a directory or object store that both sides see: what changed is uploaded once, for any number of engines",
    preference=94,
    why_not=why_no_fsspec,
    sender=StoreSender,
    receiver=StoreReceiver,
    copies_per_byte=6,  # trainer -> object -> its upload -> store -> read -> staging -> parameter
    sends=True,
    named_only=True,
)
