"""Writes a trainer rank's slices over every transport of an update. Rank 0 and the others use the same function."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from inference_plugin.devices import in_use
from inference_plugin.transports.base import Delivery, Sender, Transport, WriteStats
from inference_plugin.transports.registry import transport_named
from inference_plugin.transports.spread import classes_of
from inference_plugin.wire.config import PIECE_BYTES
from inference_plugin.wire.errors import ManifestMismatch, SyncTimeout, WeightwireError
from inference_plugin.wire.geometry import Box, Edges, Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Go, GoTransport, Wrote
from inference_plugin.wire.tracing import span, span_since
from trainer_adapters.settings import Settings
from trainer_adapters.sources.base import LocalSlice, WeightSource
from trainer_adapters.update.agreement import digests_of
from trainer_adapters.update.cutting import cut_slices, edges_of
from trainer_adapters.update.finite import FiniteCheck
from trainer_adapters.update.samples import Samples
from trainer_adapters.update.together import SlicesTogether

__all__ = ["Writer"]

logger = logging.getLogger(__name__)


class Writer:
    """This rank's halves of the transports, for one thread. `senders`: halves that exist already, by transport name.
    `look`: called repeatedly while slices are made together; raises what another rank reported meanwhile."""

    def __init__(
        self,
        settings: Settings,
        rank: int = 0,
        *,
        secret: str = "",
        look: Callable[[], None] = lambda: None,
        senders: dict[str, Sender] | None = None,
    ) -> None:
        self.senders = senders or {}
        self._settings = settings
        self._rank = rank
        self._secret = secret
        self._look = look
        self._together: SlicesTogether | None = None
        self._cut = _Cut([], {})

    def sender(self, transport: Transport) -> Sender:
        """This rank's half of a transport; made once."""
        if transport.name not in self.senders:
            sender = self.senders[transport.name] = transport.sender()
            sender.config = self._settings.config
        return self.senders[transport.name]

    def retire(self, segments: frozenset[str]) -> None:
        """Manager rank: segments of these ids are never written again."""
        for sender in self.senders.values():
            sender.retire(segments)

    def write(
        self,
        go: Go,
        manifest: Manifest,
        source: WeightSource,
        deadline_s: float,
        *,
        released: Callable[[], None] = lambda: None,
    ) -> Wrote:
        """Writes this rank's slices over every transport of the update. An error is in the result, never raised.

        `released` is called once the source is no longer read.
        """
        deadline_s = min(time.monotonic() + go.timeout_s, deadline_s)
        pieces: list[Piece] | None = None
        costs: list[WriteStats] = []
        together, passes = False, 0
        finite = FiniteCheck(manifest) if self._settings.check_finite else None
        try:
            together = bool(source.made_together())
            if not source.slices_last():  # it may compute its slices, on the host as well: from what has arrived there
                in_use().synchronise()
            cuts = self._cuts(go, manifest) if source.may_be_cut else []
            if cuts != self._cut.cuts:
                self._cut = _Cut(cuts, edges_of(cuts))
            edges = self._cut.edges
            piece_bytes = _piece_bytes(go)
            source.expect_reads(len(go.transports))
            samples = Samples(manifest, len(source.claims() or ())) if source.slices_last() else None
            for passes, way in enumerate(go.transports, 1):
                with self._taken(source, together, deadline_s) as slices:
                    arrived = _arrived(slices)
                    read = samples.watch(arrived) if samples is not None and passes == 1 else arrived
                    cut = cut_slices(read, edges, self._cut.parts)
                    watched = finite.watch(cut) if finite is not None and passes == 1 else cut
                    delivery = Delivery(
                        go.txn,
                        self._settings.group,
                        self._rank,
                        manifest,
                        way.segment,
                        watched,
                        way.targets,
                        deadline_s,
                        source.slices_last(),
                        piece_bytes,
                    )
                    written, stats = self._write_over(way, delivery)
                if pieces is not None and pieces != written:
                    raise ManifestMismatch("the source yielded other slices, or other bytes, the second time")
                pieces = written
                costs.append(stats)
            if samples is not None:
                samples.check()
            if finite is not None:
                finite.raise_found()
            copies, kept_equal = _compared(manifest, source, edges, piece_bytes) if go.copies else ((), ())
        except Exception as error:  # noqa: BLE001 -- it travels to rank 0 and is raised on all ranks
            failed = WeightwireError.wrap(error)
            failed.at(side="trainer", rank=self._rank, group=self._settings.group, phase="stage")
            if together:  # the other ranks run through the slices once more for each remaining transport
                self._keep_company(source, len(go.transports) - passes, deadline_s)
            return Wrote(go.txn, self._rank, error=failed.info(), secret=self._secret)
        in_use().synchronise()  # other ranks may still read this rank's part from its device
        released()
        return Wrote(
            go.txn,
            self._rank,
            tuple(pieces or ()),
            sum(each.messages for each in costs),
            sum(each.move_s for each in costs),
            sum(each.digest_s for each in costs),
            {replica: error.info() for each in costs for replica, error in each.lost.items()},
            sent_bytes=sum(each.sent_bytes for each in costs),
            copies=copies,
            kept_equal=kept_equal,
            secret=self._secret,
            held_bytes=sum(each.held_bytes for each in costs),
        )

    def close(self) -> None:
        """Frees segments and closes sockets; may be called twice."""
        with contextlib.ExitStack() as stack:  # all of them, also where a plug-in's raises
            while self.senders:
                stack.callback(self.senders.popitem()[1].close)

    def _cuts(self, go: Go, manifest: Manifest) -> list[Sequence[Box]]:
        """The boxes at whose edges slices are cut, of each kind of worker that is sent its own bytes."""
        ways = [(transport_named(way.name), way.targets) for way in go.transports]
        sent = [
            tuple(self.sender(transport).edges(manifest, target))
            for transport, targets in ways
            if transport.sends
            for target in targets
        ]
        return [members[0] for members in classes_of((boxes, boxes) for boxes in sent)]

    def _write_over(self, way: GoTransport, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
        began_s = time.perf_counter()
        pieces, stats = self.sender(transport_named(way.name)).write(delivery)
        costs = {"bytes": stats.nbytes, "move_s": stats.move_s, "digest_s": stats.digest_s}
        span_since(began_s, "write", transport=way.name, costs=costs)
        return pieces, stats

    @contextlib.contextmanager
    def _taken(self, source: WeightSource, together: bool, deadline_s: float) -> Iterator[Iterator[LocalSlice]]:
        """The source's slices. Slices that the ranks make together are run through to the end even if nobody takes them any more,
        because the other ranks wait in the source's collectives."""
        if not together:
            slices = source.slices()
            try:
                yield slices
            finally:
                if isinstance(slices, Generator):
                    slices.close()
            return
        if self._together is not None and not self._together.wait(deadline_s):
            raise SyncTimeout(
                "an earlier operation's slices are still being made: another rank doesn't take part in them",
                hint="that operation's error says which rank; the process group's timeout ends it",
                side="trainer",
            )

        self._together = SlicesTogether(source, deadline_s, self._look)
        try:
            yield iter(self._together)
        finally:
            self._together.close()

    def _keep_company(self, source: WeightSource, passes: int, deadline_s: float) -> None:
        for _ in range(passes):
            try:
                with self._taken(source, True, deadline_s):
                    pass
            except SyncTimeout as error:
                logger.warning("weightwire: this rank's part in the other ranks' slices: %s", error)


@dataclass(frozen=True)
class _Cut:
    """The boxes that slices are cut at, their edges, and the parts of each slice's box: every update asks for the same."""

    cuts: list[Sequence[Box]]
    edges: Edges
    parts: dict[Box, list[Box]] = field(default_factory=dict)


def _piece_bytes(go: Go) -> int:
    """The largest piece of an update: all its transports cut alike, and so do the copies that are compared."""
    return min((transport_named(way.name).piece_bytes for way in go.transports), default=PIECE_BYTES)


def _compared(
    manifest: Manifest, source: WeightSource, edges: Edges, piece_bytes: int
) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Digests of slices that other ranks send and this rank also holds: of its copies, and of the first piece of each slice that
    training keeps equal."""
    with span("compare copies"):
        copies = tuple(digests_of(manifest, cut_slices(_arrived(source.copies()), edges), piece_bytes))
        equal = cut_slices(_arrived(source.kept_equal()), edges)
        return copies, tuple(next(digests_of(manifest, [item], piece_bytes)) for item in equal)


def _arrived(slices: Iterable[LocalSlice]) -> Iterator[LocalSlice]:
    """The slices, each once its values are in memory. A step may only have queued their copy from the device into page-locked
    memory (`to("cpu", non_blocking=True)`), and reading the host's memory waits for no queue."""
    device = in_use()
    for item in slices:
        if item.tensor.is_cpu and device.is_page_locked(item.tensor):
            device.synchronise()
        yield item
        del item  # before the next one is made
