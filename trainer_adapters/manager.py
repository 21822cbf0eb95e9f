"""The SyncManager: one update of one group, from the trainer's ranks into every replica of the job on this host.

Rank 0 drives; the other ranks write what they hold and wait for the outcome:

1. scan: every rank looks at its model and makes the manifest;
2. agree: discover the replicas, open the group on new ones, begin the transaction on all workers;
3. stage: every trainer rank writes its slices; rank 0 keeps the workers' leases alive meanwhile;
4. seal: every worker checks the digests of what it needs and prepares its standby;
5. commit: the front of every replica whose workers all sealed installs at one step boundary;
6. report: the same on every rank. An error on any rank is raised on all.

All sockets belong to one thread of the manager's own; `update` waits for it, `update_async` returns its future.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from inference_plugin.transports.base import Transport
from inference_plugin.transports.registry import available_transports, transport_named
from inference_plugin.transports.topology import FAN_OUTS, FanOut
from inference_plugin.wire import addresses
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import (
    CloseGroup,
    Describe,
    Done,
    InFlight,
    InstallPolicy,
    Outcome,
    ReplicaCard,
    WorkerCard,
)
from inference_plugin.wire.reports import UpdateReport, VerifyReport
from inference_plugin.wire.tracing import Trace, flush, save, span, under
from trainer_adapters.crew import Crew
from trainer_adapters.events import Event
from trainer_adapters.pending import PendingUpdate
from trainer_adapters.rank import Rank, Settings
from trainer_adapters.replicas import ReplicaSession
from trainer_adapters.stragglers import BestEffort, Quorum, Stragglers
from trainer_adapters.update import Update
from trainer_adapters.verification import Verification

if TYPE_CHECKING:
    import torch.distributed as dist

    from trainer_adapters.source import WeightSource

__all__ = ["SyncManager"]

Report = TypeVar("Report", UpdateReport, VerifyReport)


class SyncManager:
    """Moves a trainer's weights into the replicas of its job. Construct it on every rank; `update`,
    `update_async` and `verify` are collective: every rank calls them, in one order.

    - `group`: name of the weight-update group on the workers.
    - `transport`: a name, or "auto": the first that works between this host and each replica.
    - `install`: "copy" (overwrite at the step boundary), "standby" (swap a prepared set in) or "auto".
    - `in_flight`: what happens to running requests: "keep", "recompute", "abort" or "drain".
    - `timeout_s`: for a whole operation; every wait inside it ends by then. The first update of a replica takes longer
      than later ones: its placement plan is traced and proven (some seconds per GB).
    - `lease_s`: after this silence a worker drops an unfinished update.
    - `config`: every setting, these two among them; default the environment's `WEIGHTWIRE_*`, see docs/configuration.md.
    - `partial`: the group is a part of the model; what other groups don't write either keeps its values.
    - `stragglers`: which replicas a commit waits for; see `trainer_adapters.stragglers`.
    - `fan_out`: how bytes reach many replicas, on transports that send them: "direct" to each, "chain", "tree", or "auto";
      see `inference_plugin.transports.topology`.
    - `process_group`: the trainer's ranks, default all of torch.distributed (used once, here), or this process alone.

    Raises typed errors (`inference_plugin.wire.errors`), the same on every rank.
    """

    def __init__(
        self,
        group: str = "policy",
        *,
        transport: str = Transport.AUTO,
        install: InstallPolicy = "auto",
        in_flight: InFlight = "keep",
        timeout_s: float | None = None,
        lease_s: float | None = None,
        partial: bool = False,
        stragglers: Stragglers = "report",
        fan_out: FanOut = "auto",
        process_group: dist.ProcessGroup | None = None,
        config: Config | None = None,
    ) -> None:
        config = (config or Config.from_environment()).but(timeout_s=timeout_s, lease_s=lease_s)
        for value, allowed in (
            (install, ("auto", "copy", "standby")),
            (in_flight, ("keep", "recompute", "abort", "drain")),
            (fan_out, FAN_OUTS),
        ):
            if value not in allowed:
                raise ValueError(f"{value!r} is none of {', '.join(allowed)}")
        if not isinstance(stragglers, Quorum | BestEffort) and stragglers not in ("report", "all"):
            raise ValueError(f"stragglers={stragglers!r} is none of 'report', 'all', Quorum(n), BestEffort(seconds)")
        transports = available_transports() if transport == Transport.AUTO else [transport_named(transport)]
        self.settings = Settings(
            group,
            transports,
            install,
            in_flight,
            config.timeout_s,
            config.lease_s,
            partial=partial,
            stragglers=stragglers,
            fan_out=fan_out,
            config=config,
        )
        self._rank = Rank(self.settings, Crew(process_group, config.silence_s))
        cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1,
            thread_name_prefix="weightwire-manager",
            initializer=_use_device,
            initargs=(torch.cuda.current_device() if cuda else None,),
        )

    @property
    def group(self) -> str:
        return self.settings.group

    @property
    def rank(self) -> int:
        return self._rank.crew.rank

    def update(self, source: WeightSource, version: int) -> UpdateReport:
        """Brings `version` of the source's weights into every replica; returns the report, the same on every rank.

        Raises if no replica took it. A replica that failed beside others that didn't is in `report.failed`; it serves
        what it served before and is caught up by the next update. The source must not change until this returns.
        """
        return self.update_async(source, version).result()

    def update_async(
        self,
        source: WeightSource,
        version: int,
        callback: Callable[[PendingUpdate], object] | None = None,
    ) -> PendingUpdate:
        """As `update`, in the manager's thread. `callback` gets the finished future, in that thread.

        `wait_released()` of what is returned tells when the source may change, which is before the update is over.
        """
        pending = PendingUpdate()
        if callback is not None:
            pending.add_done_callback(callback)  # type: ignore[arg-type]
        self._thread.submit(pending.run, lambda: self._update(source, version, pending.release))
        return pending

    def on(self, event: Event, listener: Callable[..., Any]) -> Callable[[], None]:
        """Has `listener` called at an event, on rank 0: "staged", "committed", "failed", "replica_joined",
        "replica_lost", with the arguments that `trainer_adapters.events` lists. Returns what removes it again."""
        return self._rank.events.on(event, listener)

    def verify(self, source: WeightSource) -> VerifyReport:
        """Compares what every replica's live parameters hold with the source, byte for byte, in engine coordinates."""
        return self._thread.submit(self._verify, source).result()

    def discover(self) -> list[ReplicaCard]:
        """The living replicas of the job: those of this host by the runtime directory, on rank 0 also those that
        registered at `WEIGHTWIRE_REGISTRY`."""
        return self._rank.registry.cards() if self._rank.registry is not None else addresses.discover()

    def wait_for_replicas(self, count: int, *, timeout_s: float) -> list[ReplicaCard]:
        """Rank 0: `discover()` once at least `count` replicas are there. Raises `SyncTimeout`. Not collective."""
        if self._rank.registry is None:
            raise RuntimeError("only rank 0 waits for replicas; its update waits for the others anyway")
        return self._rank.registry.wait(count, timeout_s)

    def versions(self) -> dict[str, int | None]:
        """The version that each living replica serves, by replica id; None before its first update. Not collective."""
        return self._thread.submit(self._versions).result()

    def close_group(self) -> None:
        """Rank 0: every living replica forgets the group; the installed weights stay. The next update opens it again.
        Raises the first error. Not collective."""
        self._thread.submit(self._close_group).result()

    def close(self) -> None:
        """Closes sockets and frees segments; may be called twice."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(self._rank.close).result()
        self._thread.shutdown()
        flush()

    def __enter__(self) -> SyncManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- every rank, in the manager's thread -------------------------------------------------------------------------

    def _update(self, source: WeightSource, version: int, released: Callable[[], None]) -> UpdateReport:
        where = {"group": self.group, "version": version}
        self._rank.begin(released)
        named = {"role": "trainer", "rank": self.rank, "group": self.group, "version": version}
        trace = Trace.begun(self.settings.config.profile_dir, **named)
        try:
            with under(trace):
                report = self._together(
                    f"update:{version}",
                    source,
                    where,
                    lambda m: Update(self._rank, source, m, version).run(),
                    UpdateReport,
                )
        except WeightwireError as error:
            if self.rank == 0:
                self._rank.events.tell("failed", group=self.group, version=version, error=error)
            raise
        finally:
            save(trace)
        if self.rank == 0:
            self._rank.events.tell("committed", report=report)
        return report

    def _verify(self, source: WeightSource) -> VerifyReport:
        where = {"group": self.group, "phase": "verify"}
        self._rank.begin()
        return self._together(
            "verify", source, where, lambda m: Verification(self._rank, source, m).run(), VerifyReport
        )

    def _together(
        self,
        operation: str,
        source: WeightSource,
        where: dict[str, Any],
        lead: Callable[[Manifest], Report],
        kind: type[Report],
    ) -> Report:
        """One collective operation: rank 0 leads, the others follow; an error on any rank is raised on all."""
        deadline_s = time.monotonic() + self.settings.timeout_s
        if self.rank != 0:
            return decode_as(self._rank.follow(operation, source), kind)
        try:
            with span("scan"):
                manifest = source.manifest()
            report = lead(manifest)
        except BaseException as error:
            failed = WeightwireError.wrap(error).at(side="manager", **where)
            self._rank.crew.fail_all(failed, deadline_s=deadline_s)
            if isinstance(error, Exception):
                raise failed from error.__cause__
            raise
        self._rank.crew.tell_all(Outcome(msgspec.msgpack.encode(report)))
        return report

    def _close_group(self) -> None:
        for session in self._rank.replicas.values():
            session.agreed = None
        for card in self.discover():
            session = self._rank.replicas.get(card.replica) or ReplicaSession.connect(card, self.settings.config)
            try:
                session.ask_workers(CloseGroup(self.group), Done)
            finally:
                if card.replica not in self._rank.replicas:
                    session.close()

    def _versions(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for card in self.discover():
            session = self._rank.replicas.get(card.replica) or ReplicaSession.connect(card, self.settings.config)
            try:
                workers: list[WorkerCard] = session.ask_workers(Describe(), WorkerCard)
            finally:
                if card.replica not in self._rank.replicas:
                    session.close()
            held = {group.version for worker in workers for group in worker.groups if group.group == self.group}
            found[card.replica] = held.pop() if len(held) == 1 else None
        return found


def _use_device(device: int | None) -> None:
    """A new thread has the first GPU as its own; sources that gather there need the one that this rank was given."""
    if device is not None:
        torch.cuda.set_device(device)
