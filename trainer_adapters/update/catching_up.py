"""Brings replicas up to the last version between updates: those that joined, fell behind, or came back.

The last version's bytes still lie where the trainer's ranks wrote them, with the ranks' digests: in a segment, or in the zones of
a replica, whose memory this process also keeps. A transaction in a thread of its own, with connections of its own, brings them
from there to one replica; on the trainer's host, the replica's workers map that same segment. No other replica is asked, and an
update that begins meanwhile takes another segment.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

from inference_plugin.devices import start_thread
from inference_plugin.net.gate import no_thread
from inference_plugin.transports.base import Delivery, Sender, Transport, WriteStats
from inference_plugin.wire.digest import digest_group
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Go, ReplicaCard
from inference_plugin.wire.tracing import Trace, save, under
from trainer_adapters.events import Events, harmless
from trainer_adapters.fleet.fleet import Fleet
from trainer_adapters.fleet.machine_io import RetainedVersion
from trainer_adapters.fleet.session import ReplicaSession
from trainer_adapters.settings import Settings
from trainer_adapters.sources.base import LocalSlice, WeightSource
from trainer_adapters.update.transaction import Transaction
from trainer_adapters.update.writer import Writer

__all__ = ["CatchingUp", "SegmentSource"]

logger = logging.getLogger(__name__)

CLOSING_S = 5.0
"""How long a closing manager waits for catch-ups, and for a listener of replicas. Replicas drop the bytes that they received when
its process ends."""


class SegmentSource(WeightSource):
    """The last version as a source: its slices are views of the memory in which it lies, one for each piece."""

    may_be_cut = False

    def __init__(self, retained: RetainedVersion) -> None:
        self._retained = retained

    def manifest(self) -> Manifest:
        return self._retained.manifest

    def slices(self) -> Iterator[LocalSlice]:
        for piece in self._retained.pieces:
            if (kept := self._retained.kept(piece.box)) is not None:
                yield LocalSlice(piece.box, kept)


class RetainedSender(Sender):
    """The sending half of the transport in whose segment the bytes already lie: it writes nothing."""

    def __init__(self, retained: RetainedVersion) -> None:
        self._retained = retained

    def probe(self) -> bytes:
        return self._retained.probe

    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        return self._retained.segment

    def write(self, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
        return list(self._retained.pieces), WriteStats()

    def close(self) -> None:
        """The segment belongs to the manager's own sender."""


def bring_up(settings: Settings, trainer: str, session: ReplicaSession, retained: RetainedVersion) -> None:
    """Runs one transaction for one replica. Raises the error with which it failed."""
    deadline_s = time.monotonic() + settings.timeout_s
    writer = Writer(settings, senders={retained.transport: RetainedSender(retained)} if retained.segment else {})
    transaction = Transaction(
        "catch_up",
        settings,
        # The retained pieces were cut for other replicas: they can't be written into a zone.
        [(each, writer.sender(each)) for each in settings.offered() if not each.lands_in_zone],
        retained.manifest,
        retained.version,
        trainer=trainer,
        deadline_s=deadline_s,
        digest=digest_group(retained.manifest, retained.pieces),
    )

    def place(transport: Transport, sender: Sender, users: Sequence[ReplicaSession]) -> bytes:
        sender.writes_once = True
        targets = [target for user in users for target in user.targets()]
        sender.meet(targets, 1, max(0.0, deadline_s - time.monotonic()), settings.fan_out)
        return sender.allocate(retained.manifest, frozenset())

    try:
        with transaction.running():
            with transaction.phase("agree"):
                ways = transaction.agree([session], place)
            with transaction.phase("stage"):
                go = Go(transaction.txn, ways, max(0.0, deadline_s - time.monotonic()))
                wrote = writer.write(go, retained.manifest, SegmentSource(retained), deadline_s)
                if wrote.error is not None:
                    raise WeightwireError.of(wrote.error)
                transaction.drop({name: WeightwireError.of(info) for name, info in wrote.lost.items()})
            with transaction.phase("seal"):
                transaction.seal(retained.pieces)  # with the trainer's digests, not those of the bytes sent now
            with transaction.phase("commit"):
                transaction.commit()
    finally:
        with harmless("closing what a catch-up used"):
            writer.close()
    if (error := transaction.errors[session.card.replica]) is not None:
        raise error


class CatchingUp:
    """Rank 0's thread for changes of replicas: it calls listeners, and starts the catch-ups that are due.

    None starts once `manager`, whose catch-ups they are, was dropped without `close`: engines that start later would get the
    weights of a training that is over, and nobody could stop that.
    """

    def __init__(self, settings: Settings, fleet: Fleet, events: Events, trainer: str, manager: object) -> None:
        self._settings = settings
        self._fleet = fleet
        self._listeners = events
        self._trainer = trainer
        self._running: set[threading.Thread] = set()
        self._is_abandoned = False
        weakref.finalize(manager, self._abandon).atexit = False
        self._forget = fleet.registry.on_change(fleet.poke)
        self._thread = threading.Thread(target=self._run, name="weightwire-replicas", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._forget()
            raise no_thread(error, "a manager") from error

    @property
    def is_this_thread(self) -> bool:
        """Whether the calling thread is the one that calls listeners of replicas."""
        return threading.current_thread() is self._thread

    def _abandon(self) -> None:
        """Takes no lock: the garbage collector may call it on any thread."""
        self._is_abandoned = True

    def close(self) -> None:
        """Calls the listeners that are still due, and ends; running catch-ups have a moment to finish."""
        self._forget()
        self._fleet.close()
        until_s = time.monotonic() + CLOSING_S
        _join(self._thread, until_s)
        for thread in self._running:  # no thread is added from here on
            _join(thread, until_s)

    def _run(self) -> None:
        while self._fleet.wait_for_news():
            try:
                self._look()
            except Exception:  # the next attempt may succeed; without this thread no replica would be caught up
                logger.exception("weightwire: replicas could not be looked after")
        self._tell()

    def _look(self) -> None:
        try:
            self._fleet.look()
        except Exception as error:  # noqa: BLE001 -- a card can't be read; updates raise that error
            logger.warning("weightwire: %s", error)
        self._tell()
        self._running = {thread for thread in self._running if thread.is_alive()}
        for due in () if self._is_abandoned else self._fleet.due():
            name = f"weightwire-catch-up-{due.card.replica}"
            try:
                thread = start_thread(partial(self._catch_up, due.card, due.retained), name=name)
            except Exception as error:  # noqa: BLE001 -- no thread can be started: the catch-up is tried again
                self._not_caught_up(due.card, due.retained, WeightwireError.wrap(error))
            else:
                self._running.add(thread)

    def _tell(self) -> None:
        for tell in self._fleet.to_tell():
            self._listeners.tell(tell.event, **tell.facts)

    def _catch_up(self, card: ReplicaCard, retained: RetainedVersion) -> None:
        """Catches one replica up. However that ends, the retained bytes are given back."""
        started_s = time.monotonic()
        session: ReplicaSession | None = None
        try:
            session = ReplicaSession.connect(card, self._settings.config)
            self._bring_up(session, retained)
            self._fleet.caught_up(session)
        except BaseException as error:  # noqa: BLE001 -- the error concerns this replica, and must not fail an update
            self._not_caught_up(card, retained, WeightwireError.wrap(error), session)
        else:
            logger.info(
                "weightwire: replica %s was caught up with version %d of %r in %.3f s",
                card.replica, retained.version, self._settings.group, time.monotonic() - started_s,
            )  # fmt: skip

    def _bring_up(self, session: ReplicaSession, retained: RetainedVersion) -> None:
        settings = self._settings
        named = {"role": "catch-up", "replica": session.card.replica, "group": settings.group}
        trace = Trace.begun(settings.config.profile_dir, **named, version=retained.version)
        try:
            with under(trace):
                bring_up(settings, self._trainer, session, retained)
        finally:
            with harmless("saving a trace"):
                save(trace)

    def _not_caught_up(
        self,
        card: ReplicaCard,
        retained: RetainedVersion,
        error: WeightwireError,
        session: ReplicaSession | None = None,
    ) -> None:
        logger.warning(
            "weightwire: replica %s was not caught up with version %d of %r: %s",
            card.replica, retained.version, self._settings.group, error,
        )  # fmt: skip
        self._fleet.not_caught_up(card.replica, error, session)


def _join(thread: threading.Thread, until_s: float) -> None:
    thread.join(max(0.0, until_s - time.monotonic()))
    if thread.is_alive():
        logger.warning("weightwire: %s still runs while its manager is closed; it is left to itself", thread.name)
