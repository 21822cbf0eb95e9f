"""Brings replicas up to the last version between updates: those that joined, fell behind, or came back.

The last version's bytes still lie in the segment into which the trainer's ranks wrote them, with the digests that they made.
From there an `Update` of its own, in a thread and with connections of its own, goes to one replica; on the trainer's host its
workers map that very segment. Nobody else is asked, and an update that begins meanwhile takes another segment.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Sequence

from inference_plugin.transports.base import Sender as TransportSender
from inference_plugin.transports.base import Slice, Target, WriteStats
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.manifest import Manifest, Piece
from inference_plugin.wire.messages import ReplicaCard, Sealed
from inference_plugin.wire.reports import UpdateReport
from inference_plugin.wire.tensors import box_view
from inference_plugin.wire.tracing import Trace, save, under
from trainer_adapters.crew import Crew
from trainer_adapters.rank import Rank, Settings
from trainer_adapters.replicas import ReplicaSession
from trainer_adapters.roster import Kept
from trainer_adapters.source import LocalSlice, WeightSource
from trainer_adapters.update import Update

__all__ = ["CatchingUp", "SegmentSource"]

logger = logging.getLogger(__name__)

CLOSING_S = 5.0
"""A closing manager waits so long for replicas that are being caught up; they drop what they got when its process ends."""


class SegmentSource(WeightSource):
    """The last version, as a source: its slices are views of the segment where it lies, one for each piece."""

    may_be_cut = False

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def manifest(self) -> Manifest:
        return self._kept.manifest

    def slices(self) -> Iterator[LocalSlice]:
        for piece in self._kept.pieces:
            yield LocalSlice(piece.box, box_view(self._kept.memory, self._kept.manifest, piece.box))


class KeptSender(TransportSender):
    """The sending half where the bytes lie: they are there, so it writes nothing."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def probe(self) -> bytes:
        return self._kept.probe

    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        return self._kept.segment

    def write(
        self,
        txn: str,
        group: str,
        rank: int,
        manifest: Manifest,
        description: bytes,
        slices: Iterator[Slice],
        targets: Sequence[Target],
        *,
        deadline_s: float,
    ) -> tuple[list[Piece], WriteStats]:
        return list(self._kept.pieces), WriteStats()

    def close(self) -> None:
        """The segment is not its own."""


class CatchUp(Update):
    """The last version for one replica. It is no update of the group: it leaves no report and tells no listener of one."""

    def __init__(self, settings: Settings, session: ReplicaSession, kept: Kept) -> None:
        alone = dataclasses.replace(settings, stragglers="report", catch_up="never")
        rank = Rank(alone, Crew(alone=True), senders={kept.transport: KeptSender(kept)})
        rank.begin()
        super().__init__(rank, SegmentSource(kept), kept.manifest, kept.version)
        self._session = session
        self._kept = kept

    def run(self) -> UpdateReport:
        try:
            return super().run()
        finally:
            self.rank.close()

    def connect(self, needed: float = 1) -> list[ReplicaSession]:
        return [self._session]

    def _seal(self, pieces: tuple[Piece, ...]) -> dict[str, list[Sealed]]:
        return super()._seal(self._kept.pieces)  # the trainer's digests, not those of what was sent now

    def _tell_staged(self) -> None:
        pass

    def _publish(self, report: UpdateReport) -> None:
        pass


class CatchingUp:
    """Rank 0's thread that follows what becomes of replicas: it tells listeners, and has those caught up that need it."""

    def __init__(self, rank: Rank) -> None:
        assert rank.registry is not None, "rank 0 has it"
        self._rank = rank
        self._registry = rank.registry
        self._running: set[threading.Thread] = set()
        self._forget = self._registry.on_change(rank.roster.poke)
        self._thread = threading.Thread(target=self._run, name="weightwire-replicas", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tells what is still to be told, and ends; whoever is being caught up has a moment to get ready."""
        self._forget()
        self._rank.roster.close()
        self._thread.join()
        until_s = time.monotonic() + CLOSING_S
        for thread in self._running:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while self._rank.roster.wait_for_news():
            self._look()
        self._tell()

    def _look(self) -> None:
        roster = self._rank.roster
        try:
            roster.look(self._registry.cards, self._registry.heard_s)
        except Exception as error:  # noqa: BLE001 -- a card that can't be read; updates raise it
            logger.warning("weightwire: %s", error)
        self._tell()
        self._running = {thread for thread in self._running if thread.is_alive()}
        wanted = self._rank.settings.catch_up != "never"
        for card, kept in roster.claim(self._registry.heard_s) if wanted else ():
            name = f"weightwire-catch-up-{card.replica}"
            thread = threading.Thread(target=self._catch_up, args=(card, kept), name=name, daemon=True)
            self._running.add(thread)
            thread.start()

    def _tell(self) -> None:
        for event, facts in self._rank.roster.events():
            self._rank.events.tell(event, **facts)

    def _catch_up(self, card: ReplicaCard, kept: Kept) -> None:
        group, started_s = self._rank.settings.group, time.monotonic()
        session = ReplicaSession.connect(card, self._rank.settings.config)
        named = {"role": "catch-up", "replica": card.replica, "group": group, "version": kept.version}
        trace = Trace.begun(self._rank.settings.config.profile_dir, **named)
        try:
            with under(trace):
                CatchUp(self._rank.settings, session, kept).run()
        except Exception as raised:  # noqa: BLE001 -- it is this replica's, and an update's it must not become
            error = WeightwireError.wrap(raised)
            logger.warning(
                "weightwire: replica %s was not caught up with version %d of %r: %s",
                card.replica, kept.version, group, error,
            )  # fmt: skip
            self._rank.roster.not_caught_up(session, error)
        else:
            logger.info(
                "weightwire: replica %s was caught up with version %d of %r in %.3f s",
                card.replica, kept.version, group, time.monotonic() - started_s,
            )  # fmt: skip
            self._rank.roster.caught_up(session)
        finally:
            save(trace)
