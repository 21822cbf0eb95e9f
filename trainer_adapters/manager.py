"""The SyncManager: one update of one group, from the trainer's ranks into every replica of the job on this host.

Rank 0 drives; the other ranks write what they hold and wait for the outcome:

1. scan: every rank looks at its model and makes the manifest;
2. agree: discover the replicas, open the group on new ones, begin the transaction on all workers;
3. stage: every trainer rank writes its slices; rank 0 keeps the workers' leases alive meanwhile;
4. seal: every worker checks the digests of what it needs and prepares its standby;
5. commit: the front of every replica whose workers all sealed installs at one step boundary;
6. report: the same on every rank. An error on any rank is raised on all.

All sockets belong to one thread of the manager's own; `update` waits for it, `update_async` returns its future. Between
updates rank 0 brings up replicas that join or fell behind: `trainer_adapters.catching_up`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from inference_plugin.transports.backends import current_device, use_device
from inference_plugin.transports.base import Transport
from inference_plugin.transports.registry import available_transports, transport_named
from inference_plugin.transports.spread import FAN_OUTS, FanOut
from inference_plugin.wire import addresses
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import CommitFailed, TransportUnavailable, WeightwireError
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import (
    CloseGroup,
    Describe,
    Done,
    InFlight,
    InstallPolicy,
    MemoryTag,
    Outcome,
    ReplicaCard,
    WorkerCard,
)
from inference_plugin.wire.reports import PauseReport, UpdateReport, VerifyReport
from inference_plugin.wire.tracing import Trace, flush, save, span, under
from trainer_adapters import registry
from trainer_adapters.catching_up import CatchingUp
from trainer_adapters.crew import Crew
from trainer_adapters.events import Event
from trainer_adapters.pausing import Pauses
from trainer_adapters.pending import PendingUpdate
from trainer_adapters.rank import CatchUpPolicy, Rank, Settings
from trainer_adapters.replicas import ReplicaSession
from trainer_adapters.roster import ReplicaStatus
from trainer_adapters.source import LocalSlice, WeightSource
from trainer_adapters.stragglers import BestEffort, Quorum, Stragglers
from trainer_adapters.update import Update
from trainer_adapters.verification import Verification

if TYPE_CHECKING:
    import torch.distributed as dist

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
      see `inference_plugin.transports.spread`.
    - `catch_up`: whether replicas that join, or fell behind, get the last version between updates: "auto" (where it lies in
      shared memory anyway), "always" (one more copy of each update, all trainer ranks on one host) or "never".
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
        catch_up: CatchUpPolicy = "auto",
        process_group: dist.ProcessGroup | None = None,
        config: Config | None = None,
    ) -> None:
        config = (config or Config.from_environment()).but(timeout_s=timeout_s, lease_s=lease_s)
        for value, allowed in (
            (install, ("auto", "copy", "standby")),
            (in_flight, ("keep", "recompute", "abort", "drain")),
            (fan_out, FAN_OUTS),
            (catch_up, ("auto", "always", "never")),
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
            catch_up=catch_up,
            config=config,
        )
        if catch_up == "always":
            transport_named("shm")  # an error now rather than in the first update
        crew = Crew(process_group, config.silence_s)
        if catch_up == "always" and not crew.on_one_host:
            crew.close()
            raise TransportUnavailable(
                "catch_up='always' keeps the last version in shared memory, and the trainer's ranks are on several hosts",
                hint="catch_up='auto': replicas that join then wait for the next update",
            )
        self._rank = Rank(self.settings, crew, registry.take() if crew.rank == 0 else None)
        self._catching_up = CatchingUp(self._rank) if crew.rank == 0 else None
        self._pauses = Pauses(self._rank)
        self._closing = False
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1,
            thread_name_prefix="weightwire-manager",
            initializer=use_device,  # sources that gather on a device need the one that this rank was given
            initargs=(current_device(),),
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
        what it served before and is caught up, as `catch_up` says, or by the next update. The source must not change until
        this returns.
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
        """Has `listener` called at an event, on rank 0: "staged", "committed", "failed", "replica_joined", "replica_lost",
        "replica_state", with the arguments that `trainer_adapters.events` lists. Returns what removes it again."""
        return self._rank.events.on(event, listener)

    def verify(self, source: WeightSource) -> VerifyReport:
        """Compares what every replica's live parameters hold with the source, byte for byte, in engine coordinates."""
        return self._thread.submit(self._verify, source).result()

    def pause(self, in_flight: InFlight | None = None) -> PauseReport:
        """Stops generation in every living replica until `resume`; updates may be committed meanwhile.

        `in_flight`: what happens to running requests, by default as in updates; new ones wait. Returns how each replica
        stands; raises if none could be paused. The pause is kept alive for as long as this process lives and isn't silent
        for `lease_s`; after that the replicas go on by themselves. Rank 0 does it; other ranks may call it too, and return
        at once.
        """
        return self._thread.submit(self._pauses.pause, in_flight or self.settings.in_flight, 0).result()

    def resume(self) -> PauseReport:
        """Has every living replica generate again, woken up first if it is asleep. Harmless where nothing is paused.

        Raises if no replica could, and `SyncTimeout` (in the report, where others could) if a replica has gone on before,
        because the pause's lease ran out. One that couldn't be woken is torn until it is woken and updated.
        """
        return self._thread.submit(self._pauses.resume).result()

    @contextlib.contextmanager
    def paused(self, in_flight: InFlight | None = None) -> Iterator[PauseReport]:
        """`pause` and, whatever happens inside, `resume`; raises if a replica couldn't go on."""
        try:
            yield self.pause(in_flight)
        except BaseException as error:
            try:
                self.resume()
            except WeightwireError as failed:
                error.add_note(f"and generation could not be resumed: {failed}")
            raise
        self.resume().raise_failed()

    def sleep(self, level: Literal[1, 2] = 1, in_flight: InFlight | None = None) -> PauseReport:
        """As `pause`, and every replica releases its device memory: the KV cache and the weights, which level 1 keeps on the
        host and level 2 discards. For trainers on the same devices.

        Keys and values go, so "keep" means "recompute" here. `EngineUnsupported` where the engine can't: nothing is
        changed then. After level 2 a replica refuses to generate until a full update.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level {level!r} is neither 1 nor 2")
        return self._thread.submit(self._pauses.pause, in_flight or self.settings.in_flight, level).result()

    def wake_up(self, tags: Sequence[MemoryTag] = ()) -> PauseReport:
        """Takes memory of sleeping replicas back, all of it or only `tags` ("weights", "kv_cache"). Once all is back they
        generate again. An update needs "weights" only, and may come before the rest. Raises as `resume` does."""
        return self._thread.submit(self._pauses.resume, tags).result()

    def discover(self) -> list[ReplicaCard]:
        """The living replicas of the job: those of this host by the runtime directory, on rank 0 also those that
        registered at `WEIGHTWIRE_REGISTRY`."""
        return self._rank.registry.cards() if self._rank.registry is not None else addresses.discover()

    def wait_for_replicas(self, count: int, *, timeout_s: float) -> list[ReplicaCard]:
        """Rank 0: `discover()` once at least `count` replicas are there. Raises `SyncTimeout`. Not collective."""
        if self._rank.registry is None:
            raise RuntimeError("only rank 0 waits for replicas; its update waits for the others anyway")
        return self._rank.registry.wait(count, timeout_s)

    def replicas(self) -> list[ReplicaStatus]:
        """Rank 0: every replica and what is known of it, without asking any; lost ones are listed until they are back (the
        last 32 of them). Any thread, also while an update runs. Not collective."""
        if self._rank.registry is None:
            raise RuntimeError("only rank 0 knows the replicas")
        self._rank.roster.look(self._rank.registry.cards, self._rank.registry.heard_s)
        return self._rank.roster.statuses()

    def versions(self) -> dict[str, int | None]:
        """Asks each living replica which version it serves, by replica id; None before its first update. Not collective."""
        return self._thread.submit(self._versions).result()

    def close_group(self) -> None:
        """Rank 0: every living replica forgets the group; the installed weights stay. The next update opens it again.
        Raises the first error. Not collective."""
        self._thread.submit(self._close_group).result()

    def close(self) -> None:
        """Closes sockets and frees segments; may be called twice. An update that is under way ends first; those behind it
        fail with `CommitFailed`. (The end of a `with` block that raised nothing waits for them.)"""
        self._closing = True
        with contextlib.suppress(RuntimeError):
            self._thread.submit(self._close).result()
        self._thread.shutdown()
        flush()

    def __enter__(self) -> SyncManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            with contextlib.suppress(RuntimeError):  # closed already
                self._thread.submit(lambda: None).result()
        self.close()

    # --- every rank, in the manager's thread -------------------------------------------------------------------------

    def _update(self, source: WeightSource, version: int, released: Callable[[], None]) -> UpdateReport:
        where = {"group": self.group, "version": version}
        if self._closing:
            source = _Nothing()
        self._rank.begin(released)
        named = {"role": "trainer", "rank": self.rank, "group": self.group, "version": version}
        trace = Trace.begun(self.settings.config.profile_dir, **named)
        try:
            with under(trace), self._rank.roster.updating():
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

    def _close(self) -> None:
        self._pauses.close()
        if self._catching_up is not None:
            self._catching_up.close()
            self._catching_up = None
        self._rank.close()

    def _close_group(self) -> None:
        with self._rank.roster.updating():
            cards = self.discover()
            names = [card.replica for card in cards]
            self._rank.roster.free(names, math.inf, self.settings.config.control_timeout_s)
            self._rank.adopt()
            self._rank.roster.forget()
            for session in self._rank.replicas.values():
                session.agreed = None
            for card in cards:
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


class _Nothing(WeightSource):
    """The source of an update that a closing manager doesn't begin: all ranks hear why."""

    def manifest(self) -> Manifest:
        raise CommitFailed(
            "the manager was closed before this update began", hint="the replicas serve what they served"
        )

    def slices(self) -> Iterator[LocalSlice]:
        return iter(())
