"""What one trainer rank has for its operations, in the manager's thread: settings, sockets, memory, what was agreed."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from inference_plugin.transports.base import Sender as TransportSender
from inference_plugin.transports.base import Target, Transport, WriteStats
from inference_plugin.transports.registry import transport_named
from inference_plugin.transports.spread import FanOut, classes_of
from inference_plugin.wire.channel import Outgoing, fan_out
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ManifestMismatch, WeightwireError
from inference_plugin.wire.manifest import Box, ExactCover, Manifest, Piece
from inference_plugin.wire.messages import Done, Go, GoTarget, InFlight, InstallPolicy, Ready, Release, Wrote
from inference_plugin.wire.tracing import call_it, span, span_since
from trainer_adapters.agreement import Claims, digests_of
from trainer_adapters.crew import Crew
from trainer_adapters.cutting import cut_slices, edges_of
from trainer_adapters.events import Events
from trainer_adapters.registry import Registry, give_back
from trainer_adapters.replicas import ReplicaSession
from trainer_adapters.roster import Roster
from trainer_adapters.stragglers import Stragglers

if TYPE_CHECKING:
    from trainer_adapters.source import LocalSlice, WeightSource

__all__ = ["CatchUpPolicy", "Rank", "Settings", "as_target"]

logger = logging.getLogger(__name__)

CatchUpPolicy: TypeAlias = Literal["auto", "always", "never"]
"""Whether the last version's bytes are kept for replicas that come between updates: `auto`: where they lie in a shared segment
anyway; `always`: in one of their own where they don't, which costs one more copy and a segment of the model's size."""


@dataclass
class Settings:
    """A manager's, as `SyncManager` documents them. Those of time and policy may be changed between operations, on every
    rank."""

    group: str
    transports: Sequence[Transport]
    install: InstallPolicy
    in_flight: InFlight
    timeout_s: float
    lease_s: float
    partial: bool
    stragglers: Stragglers
    fan_out: FanOut
    catch_up: CatchUpPolicy
    config: Config


class Rank:
    """This rank. `count` numbers its operations, `began_s` (of `perf_counter`) is when the present one began. `senders`: halves
    of transports that are there already, by name."""

    def __init__(
        self,
        settings: Settings,
        crew: Crew,
        registry: Registry | None = None,
        senders: dict[str, TransportSender] | None = None,
    ) -> None:
        self.settings = settings
        self.crew = crew
        self.claims = Claims()
        self.registry = registry
        self.roster = Roster(settings.group)
        self.session = secrets.token_hex(8)
        self.replicas: dict[str, ReplicaSession] = {}
        self.events = Events()
        self.count = 0
        self.began_s = 0.0
        self.released: Callable[[], None] = _nobody_waits
        self._senders = senders or {}
        self._covered: tuple[Manifest, ExactCover] | None = None

    def begin(self, released: Callable[[], None] | None = None) -> None:
        """The next operation. `released` is called once this rank's source is no longer read."""
        self.count += 1
        self.released = released or _nobody_waits
        self.began_s = time.perf_counter()

    def follow(self, operation: str, source: WeightSource) -> bytes:
        """A rank above 0: report, write, report."""
        manifest: Manifest | None = None
        claims: tuple[Box, ...] | None = None
        error: WeightwireError | None = None
        try:
            with span("scan"):
                manifest = source.manifest()
                claims = source.claims()
        except Exception as raised:  # noqa: BLE001 -- it travels to rank 0 and is raised on all
            error = WeightwireError.wrap(raised).at(side="trainer", rank=self.crew.rank)
        ready = Ready(
            self.count,
            operation,
            self.crew.rank,
            manifest.fingerprint if manifest else "",
            error.info() if error else None,
            *(self.claims.news(self.crew.rank, manifest, claims) if manifest else (None, False)),
        )
        # The manager answers by its own deadline; a little more lets its answer arrive first.
        timeout_s = self.settings.timeout_s + 10
        with span("agree"):
            go = self.crew.ask_go(ready, timeout_s=timeout_s)
        call_it(go.txn)
        assert manifest is not None
        self.claims.agree(self.crew.rank, manifest, claims)
        with span("stage"):
            wrote = self.write(go, manifest, source, tick=lambda: None)
        with span("outcome"):
            return self.crew.ask_outcome(wrote, timeout_s=timeout_s)

    def write(self, go: Go, manifest: Manifest, source: WeightSource, tick: Callable[[], None]) -> Wrote:
        """Writes this rank's slices over every transport of the update. An error is in the result, never raised."""
        deadline_s = time.monotonic() + go.timeout_s
        started_s = time.perf_counter()
        pieces: list[Piece] | None = None
        copies: tuple[Piece, ...] = ()
        total = WriteStats()
        passes = 0
        try:
            ways = [(transport_named(way.name), way) for way in go.transports]
            sent = [target.needs for transport, way in ways if transport.sends for target in way.targets]
            classes = classes_of((needs, needs) for needs in sent) if source.may_be_cut else []
            edges = edges_of(members[0] for members in classes)
            for transport, way in ways:
                sender = self.sender(transport)
                passes += 1
                way_s = time.perf_counter()
                with _taken(source) as slices:
                    written, stats = sender.write(
                        go.txn,
                        self.settings.group,
                        self.crew.rank,
                        manifest,
                        way.segment,
                        cut_slices(_ticking(slices, tick), edges),
                        [as_target(target) for target in way.targets],
                        deadline_s=deadline_s,
                    )
                costs = {"bytes": stats.nbytes, "move_s": stats.move_s, "digest_s": stats.digest_s}
                span_since(way_s, "write", transport=way.name, costs=costs)
                if pieces is not None and pieces != written:
                    raise ManifestMismatch("the source gave other slices, or other bytes, the second time")
                pieces = written
                total.nbytes += stats.nbytes
                total.messages += stats.messages
                total.sent_bytes += stats.sent_bytes
                total.move_s += stats.move_s
                total.digest_s += stats.digest_s
                total.lost |= stats.lost
            if go.copies:
                with span("compare copies"):
                    copies = tuple(digests_of(manifest, cut_slices(_ticking(source.copies(), tick), edges)))
        except Exception as error:  # noqa: BLE001 -- it travels to rank 0 and is raised on all
            info = (
                WeightwireError.wrap(error)
                .at(side="trainer", rank=self.crew.rank, group=self.settings.group, phase="stage")
                .info()
            )
            _keep_company(source, len(go.transports) - passes)
            return Wrote(go.txn, self.crew.rank, error=info)
        self.released()
        return Wrote(
            go.txn,
            self.crew.rank,
            tuple(pieces or ()),
            total.nbytes,
            total.messages,
            total.move_s,
            total.digest_s,
            time.perf_counter() - started_s,
            {replica: error.info() for replica, error in total.lost.items()},
            sent_bytes=total.sent_bytes,
            copies=copies,
        )

    def cover(self, manifest: Manifest) -> ExactCover:
        """What checks that pieces cover the manifest; the last one is kept."""
        if self._covered is None or self._covered[0] is not manifest:
            self._covered = manifest, ExactCover(manifest)
        return self._covered[1]

    def sender(self, transport: Transport) -> TransportSender:
        """This rank's half of a transport; made once."""
        if transport.name not in self._senders:
            sender = self._senders[transport.name] = transport.sender()
            sender.config = self.settings.config
        return self._senders[transport.name]

    def lose(self, replica: str, reason: str) -> None:
        """On rank 0: a replica takes part no longer; should it come back, it is connected to anew."""
        if (session := self.replicas.pop(replica, None)) is not None:
            session.close()
        self.roster.lose(replica, reason)

    def adopt(self) -> None:
        """On rank 0: those that were caught up are from now on replicas like the others."""
        for name, session in self.roster.sessions().items():
            if (before := self.replicas.pop(name, None)) is not None:
                session.replaces(before)
            self.replicas[name] = session

    def close(self) -> None:
        """Releases what replicas keep for the next update, closes sockets, frees segments."""
        self.adopt()
        for replica in self.replicas.values():
            requests = [Outgoing(channel, Release(self.settings.group)) for channel in replica.workers]
            for reply in fan_out(requests, Done, timeout_s=2.0):
                if isinstance(reply, WeightwireError):
                    logger.info("weightwire: release on %s: %s", replica.card.replica, reply)
            replica.close()
        self.replicas.clear()
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        if self.registry is not None:
            give_back(self.registry)
            self.registry = None
        self.crew.close()


def as_target(target: GoTarget) -> Target:
    """As transports take it."""
    return Target(target.replica, target.rank, target.address, target.pid, target.boot_id, target.needs)


def _nobody_waits() -> None:
    pass


def _ticking(slices: Iterator[LocalSlice], tick: Callable[[], None]) -> Iterator[LocalSlice]:
    for item in slices:
        yield item
        tick()


@contextlib.contextmanager
def _taken(source: WeightSource) -> Iterator[Iterator[LocalSlice]]:
    """The source's slices, closed in the end: a source that works together with other ranks then finishes its part."""
    slices = source.slices()
    try:
        yield slices
    finally:
        if isinstance(slices, Generator):
            slices.close()


def _keep_company(source: WeightSource, passes: int) -> None:
    """Runs through the slices as often as the other ranks still will, after an error, where they need this one for it."""
    for _ in range(passes if source.made_together() else 0):
        with contextlib.suppress(Exception), _taken(source) as slices:
            for _ in slices:
                pass
