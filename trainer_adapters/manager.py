"""The SyncManager: one update of one group, from the trainer's ranks into every replica of the job.

Rank 0 leads; the other ranks write what they hold and wait for the outcome:

1. scan: every rank looks at its model and makes the manifest;
2. agree: rank 0 opens the group on replicas that do not know it, and begins the transaction on all workers;
3. stage: every trainer rank writes its slices; rank 0 keeps the workers' leases alive meanwhile;
4. seal: every worker checks the digests of what it needs and prepares its standby;
5. commit: each replica whose workers have all sealed installs the version at one step boundary;
6. report: the same on every rank. An error on any rank is raised on all.

All sockets belong to one thread of the manager; `update` waits for it, `update_async` returns its future. Between updates
rank 0 brings up replicas that join or fell behind: `trainer_adapters.update.catching_up`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from inference_plugin.net import addresses
from inference_plugin.transports.base import Transport
from inference_plugin.transports.registry import available_transports, transport_named
from inference_plugin.transports.spread import FanOut
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import CommitFailed, ManagerClosed, TransportUnavailable, WeightwireError
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import InFlight, InstallPolicy, MemoryTag, ReplicaCard
from inference_plugin.wire.reports import PauseReport, UpdateReport, VerifyReport
from inference_plugin.wire.tracing import Trace, flush, save, under
from trainer_adapters.events import Event, harmless
from trainer_adapters.fleet import registry
from trainer_adapters.fleet.fleet import Fleet, leading
from trainer_adapters.fleet.machine_io import ReplicaStatus
from trainer_adapters.fleet.pauses import Pauses
from trainer_adapters.fleet.versions import versions_of
from trainer_adapters.settings import CatchUpPolicy, OnFailure, Settings, Stragglers, check_choice, config_of
from trainer_adapters.sources.base import WeightSource
from trainer_adapters.update.attempts import in_engine_dtypes, take_part
from trainer_adapters.update.catching_up import CatchingUp
from trainer_adapters.update.follower import follow
from trainer_adapters.update.given import FailingSource, GivenModels, checked_version
from trainer_adapters.update.handle import PendingUpdate, called_from_inside
from trainer_adapters.update.leader import lead
from trainer_adapters.update.outcome import failure_of
from trainer_adapters.update.rank_context import RankContext
from trainer_adapters.update.thread import OperationThread
from trainer_adapters.update.trainer_ranks import TrainerRanks
from trainer_adapters.update.verification import verify

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from trainer_adapters.sources.chosen import Sendable

__all__ = ["SyncManager"]


class SyncManager:
    """Moves a trainer's weights into the replicas of its job. Construct it on every rank; `update`,
    `update_async` and `verify` are collective: every rank calls them, in one order.

    - `group`: name of the weight-update group on the workers.
    - `transport`: a name, or "auto": the first that works between this host and each replica.
    - `install`: "copy" (overwrite at the step boundary), "standby" (swap a prepared set in), "streaming" (write into the live
      parameters as the bytes come, while generation stands) or "auto"; docs/how-it-works.md says what each costs.
    - `in_flight`: what happens to running requests: "keep", "recompute", "abort" or "drain".
    - `timeout_s`: for a whole operation; every wait inside it ends by then. The first update of a replica takes longer
      than later ones: its placement plan is traced and proven (some seconds per GB).
    - `lease_s`: after this silence a worker drops an unfinished update.
    - `config`: every setting that the environment may give, these two among them; default: the `WEIGHTWIRE_*` variables, see
      docs/configuration.md.
    - `partial`: the group is a part of the model; parameters that no group writes keep their values.
    - `stragglers`: which replicas a commit waits for; see `trainer_adapters.settings`.
    - `on_failure`: "raise": an update raises if a replica that lives did not take the version, although others did; "report":
      it returns, and the report says so. The same on every rank.
    - `fan_out`: how bytes reach many replicas, on transports that send them: "direct" to each, "chain", "tree", or "auto";
      see `inference_plugin.transports.spread`.
    - `catch_up`: whether replicas that join, or fell behind, get the last version between updates: "auto" (where it lies in
      shared memory anyway), "always" (one more copy of each update, all trainer ranks on one host) or "never".
    - `replicas`: which replicas of the job this manager is for, where the job has other engines too: those of one model, by the
      name that the engine was started with, or those for which a function of a card says True (called on several threads).
    - `check_finite`: NaN or infinity in any rank's weights makes an update raise `NotFinite`, and nothing is applied; a replica
      into which they are streamed is torn, as by any failure.
    - `process_group`: the trainer's ranks, default all of torch.distributed, or this process alone.

    Make several managers in the same order on every rank. Raises `ConfigError` for an argument or a variable with a wrong value,
    `TransportUnavailable`, `AuthError` for a job, directory or key that can't be used; and on every rank `ConfigError` where the
    ranks' arguments differ, `SyncTimeout` after `timeout_s` where only some ranks make one.
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
        on_failure: OnFailure = "raise",
        fan_out: FanOut = "auto",
        catch_up: CatchUpPolicy = "auto",
        check_finite: bool = False,
        replicas: Callable[[ReplicaCard], bool] | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        config: Config | None = None,
    ) -> None:
        self.settings = settings = Settings(
            group,
            available_transports() if transport == Transport.AUTO else [transport_named(transport)],
            config_of(config).but(timeout_s=timeout_s, lease_s=lease_s),
            install=install,
            in_flight=in_flight,
            partial=partial,
            stragglers=stragglers,
            fan_out=fan_out,
            catch_up=catch_up,
            on_failure=on_failure,
            check_finite=check_finite,
            replicas=replicas,
        )
        if catch_up == "always":
            transport_named("shm")  # an error now rather than in the first update
        self.fleet: Fleet | None = None
        self._pauses: Pauses | None = None
        self._catching_up: CatchingUp | None = None
        self._models, self._under_way = GivenModels(group, process_group), False
        with contextlib.ExitStack() as undo:
            ranks = TrainerRanks(process_group, settings)
            undo.callback(ranks.close)
            if catch_up == "always" and not ranks.on_one_host:
                raise TransportUnavailable(
                    "catch_up='always' keeps the last version in shared memory; the trainer's ranks are on several hosts",
                    hint="catch_up='auto': replicas that join then wait for the next update",
                )
            if ranks.rank == 0:
                self.fleet = Fleet(settings, registry.take())
                undo.callback(registry.give_back, self.fleet.registry)
            self.context = context = RankContext(settings, ranks, self.fleet)
            if self.fleet is not None:
                self._pauses = Pauses(settings, self.fleet, context.trainer)
                self._catching_up = CatchingUp(settings, self.fleet, context.events, context.trainer, self)
                undo.callback(self._catching_up.close)
            self._thread = OperationThread(settings)
            undo.pop_all()

    @property
    def group(self) -> str:
        return self.settings.group

    @property
    def rank(self) -> int:
        return self.context.ranks.rank

    def update(
        self,
        model: Sendable,
        version: int | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        hf_config: Any = None,
    ) -> UpdateReport:
        """Brings the weights into every replica, as `version`; returns the report, the same on every rank.

        `model`: a `WeightSource`, or what `trainer_adapters.sources.chosen` finds the adapter for: a module (plain, DDP, FSDP,
        DTensors, PEFT), Megatron's chunks with `hf_config`, a mapping of tensors. The adapter is kept for as long as the same
        model is given; making it is collective for Megatron and PEFT. `dtype`: in which all tensors travel ("engine": each in the
        engine's own). `version`: by default one more than the highest that was sent or that a replica serves, as rank 0 decides.
        A number that is served already is taken again with the same weights alone, and is a `VersionConflict` with others.

        Raises if no replica took it, and if a replica that lives did not take it although others did: the error's `report` says
        what became of each. Replicas that took it keep it; the others serve what they served before, and are caught up, as
        `catch_up` says, or by the next update. Lost replicas are only in `report.failed`, and with `on_failure="report"` all are.
        The weights must not change until this returns. `timeout_s` counts from this call, waiting for others included.
        """
        if self._thread.is_this_thread:
            raise called_from_inside("update()")
        return self.update_async(model, version, dtype=dtype, hf_config=hf_config).result()

    def update_async(
        self,
        model: Sendable,
        version: int | None = None,
        callback: Callable[[PendingUpdate], object] | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        hf_config: Any = None,
    ) -> PendingUpdate:
        """As `update`, in the manager's thread. `callback` gets the finished future, in that thread.

        `wait_released()` of the returned future tells when the source may change, which is before the update is over. Callbacks
        and listeners may call this too. There, `update` and `verify`, which would wait for themselves, raise `ProtocolError`."""
        deadline_s = time.monotonic() + self.settings.timeout_s
        number = checked_version(version)
        self._thread.check_open()
        source = self._models.source_of(model, dtype, hf_config, timeout_s=self.settings.timeout_s)
        pending = PendingUpdate(deadline_s, lambda: self._thread.is_this_thread, self._failure_of)
        if callback is not None:
            pending.add_done_callback(callback)  # type: ignore[arg-type]
        work = partial(self._update, source, number, pending, deadline_s)
        self._thread.submit(deadline_s, pending.run, work, reads=True)
        return pending

    def on(self, event: Event, listener: Callable[..., Any]) -> Callable[[], None]:
        """Has `listener` called at an event, on rank 0, with the arguments in docs/trainers.md: "staged", "committed", "failed",
        "replica_joined", "replica_lost", "replica_state". Returns what removes it again. Raises `ArgumentError`."""
        self._thread.check_open()
        return self.context.events.on(event, listener)

    def verify(self, model: Sendable, *, dtype: torch.dtype | str | None = None, hf_config: Any = None) -> VerifyReport:
        """Compares every replica's parameters with the model, byte for byte, in engine coordinates. Arguments as in `update`, by
        default the last update's. A difference, or a silent replica, makes the report's `ok` False; raises without replicas."""
        self._thread.check_open()
        source = self._models.source_to_verify(model, dtype, hf_config, timeout_s=self.settings.timeout_s)
        return self._thread.call("verify()", lambda deadline_s: self._verify(source, deadline_s), reads=True)

    def pause(self, in_flight: InFlight | None = None) -> PauseReport:
        """Stops generation in every living replica until `resume`; updates may be committed meanwhile.

        `in_flight`: what happens to running requests, by default as in updates; new ones wait. Returns the state of each
        replica; raises if none could be paused. The pause lasts while this process lives; if it is silent for `lease_s`, the
        replicas resume by themselves. Rank 0 pauses; other ranks may call it too, and return at once.
        """
        policy = self.settings.in_flight if in_flight is None else in_flight
        return self._of_pauses("pause()", lambda pauses, deadline_s: pauses.pause(policy, 0, deadline_s))

    def resume(self) -> PauseReport:
        """Has every living replica generate again; a sleeping replica is woken first. Harmless if nothing is paused.

        Raises if no replica could resume. A replica that resumed earlier, because the pause's lease ran out, counts as failed
        with `SyncTimeout`. A replica that could not be woken is torn until it is woken and updated.
        """
        return self._of_pauses("resume()", lambda pauses, deadline_s: pauses.resume((), deadline_s))

    @contextlib.contextmanager
    def paused(self, in_flight: InFlight | None = None) -> Iterator[PauseReport]:
        """`pause` and, whatever happens inside, `resume`; raises if a replica could not resume."""
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

        The KV cache is lost, so "keep" means "recompute" here. Raises `EngineUnsupported`, and changes nothing, if the engine
        cannot sleep. After level 2 a replica refuses to generate until a full update.
        """
        check_choice("level", level, (1, 2))
        policy = self.settings.in_flight if in_flight is None else in_flight
        return self._of_pauses("sleep()", lambda pauses, deadline_s: pauses.pause(policy, level, deadline_s))

    def wake_up(self, tags: Sequence[MemoryTag] = ()) -> PauseReport:
        """Gives sleeping replicas their memory back, all of it or only `tags` ("weights", "kv_cache"). A replica generates again
        once it has all of it. An update needs "weights" only, and may come before the rest. Raises as `resume` does."""
        return self._of_pauses("wake_up()", lambda pauses, deadline_s: pauses.resume(tags, deadline_s))

    def discover(self) -> list[ReplicaCard]:
        """The living replicas that the manager is for: this host's, on rank 0 also those registered at `WEIGHTWIRE_REGISTRY`."""
        self._thread.check_open()
        return self.fleet.cards() if self.fleet is not None else self.settings.chosen(addresses.discover())

    def wait_for_replicas(self, count: int, *, timeout_s: float) -> list[ReplicaCard]:
        """Rank 0: `discover()` once at least `count` replicas are there. Raises `SyncTimeout`, RuntimeError on other ranks. Not
        collective: if other ranks call `update` meanwhile, their `timeout_s` runs."""
        self._thread.check_open()
        return leading(self.fleet).wait(count, timeout_s)

    def replicas(self) -> list[ReplicaStatus]:
        """Rank 0: every replica and what is known of it, without asking any: an update by another manager shows in `versions()`.
        The last 32 lost replicas are listed as well. Any thread, also during an update. RuntimeError on other ranks."""
        self._thread.check_open()
        return leading(self.fleet).statuses()

    def versions(self) -> dict[str, int | None]:
        """Asks all living replicas at once which version they serve. None stands for a replica before its first update, a torn
        replica, and (with a warning in the log) one that does not answer. Raises the first error if none answers. Any thread,
        also while an update runs. Not collective."""
        config = self.settings.config
        return versions_of(self.discover(), self.group, config.control_timeout_s, config.silence_s)

    def close_group(self) -> None:
        """Rank 0: every living replica forgets the group and keeps the installed weights. The next update opens the group again.
        All replicas are asked at once; raises the first error. Not collective."""
        self._thread.call("close_group()", self._close_group, inside=not self._under_way)

    def close(self) -> None:
        """Closes sockets and frees segments; may be called twice. An update under way ends first; updates behind it fail with
        `CommitFailed`. (The end of a `with` block that raised nothing waits for them.)

        Called from a callback or a listener it returns at once, and the manager is closed after the operation under way. Raises
        `SyncTimeout` if that does not end by its deadline.
        """
        if self._thread.is_foreign:
            return
        is_listener = self._catching_up is not None and self._catching_up.is_this_thread
        self._thread.close(self._close, wait=not is_listener)
        if not self._thread.is_this_thread and not is_listener:
            flush()

    def __del__(self) -> None:
        if (thread := vars(self).get("_thread")) is not None:
            thread.warn_if_open(f"a SyncManager of group {self.group!r}")

    def __enter__(self) -> SyncManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not (self._thread.is_closing or self._thread.is_foreign):
                with contextlib.suppress(CommitFailed):  # closed meanwhile
                    last_s = self._thread.last_deadline_s
                    self._thread.call("the end of a `with` block", lambda _: None, inside=True, deadline_s=last_s)
        finally:
            self.close()

    # --- every rank, in the manager's thread -------------------------------------------------------------------------

    def _update(
        self, source: WeightSource, version: int | None, pending: PendingUpdate, deadline_s: float
    ) -> UpdateReport:
        context = self.context
        if self._thread.is_closing:
            source = FailingSource(ManagerClosed("the manager was closed before this update began", side="manager"))
        named = {"rank": self.rank, "group": self.group, "version": version}
        trace = Trace.begun(self.settings.config.profile_dir, role="trainer", **named)
        self._under_way = True
        try:
            with under(trace):
                report = take_part(context, source, version, pending, deadline_s)
            if self.fleet is None:
                return report
        except WeightwireError as error:
            if self.fleet is not None:
                context.events.tell("failed", group=self.group, version=error.version, error=error)
            raise
        finally:
            self._under_way = False
            context.end()
            with harmless("saving a trace"):
                save(trace)
        if len(report.failed) < len(report.replicas):
            context.events.tell("committed", report=report)
        elif (failed := self._failure_of(report)) is not None:
            context.events.tell("failed", group=self.group, version=report.version, error=failed)
        return report

    def _failure_of(self, report: UpdateReport) -> WeightwireError | None:
        return failure_of(report, self.settings.on_failure, self.settings.stragglers)

    def _verify(self, source: WeightSource, deadline_s: float) -> VerifyReport:
        context = self.context
        context.begin(deadline_s)
        self._under_way = True

        def attempt() -> VerifyReport:
            if self.fleet is None:
                return decode_as(follow(context, "verify", source), VerifyReport)
            work: Callable[[Manifest], VerifyReport] = lambda manifest: verify(context, source, manifest)  # noqa: E731
            return lead(context, "verify", source, work, lambda _: None, group=self.group, phase="verify")

        try:
            return in_engine_dtypes(source, attempt)
        finally:
            self._under_way = False

    def _of_pauses(self, what: str, work: Callable[[Pauses, float], PauseReport]) -> PauseReport:
        """Has rank 0 pause or resume; on other ranks there is nothing to do."""
        self._thread.check_open()
        if (pauses := self._pauses) is None:
            return PauseReport(())
        return self._thread.call(what, lambda deadline_s: work(pauses, deadline_s), inside=True)

    def _close(self) -> None:
        self._models.close()
        steps: list[Callable[[], None]] = [self.context.close]
        if (fleet := self.fleet) is not None and self._pauses is not None and self._catching_up is not None:
            steps = [self._pauses.close, self._catching_up.close, *steps, lambda: registry.give_back(fleet.registry)]
        for step in steps:
            with harmless("closing a part of the manager"):
                step()

    def _close_group(self, deadline_s: float) -> None:
        if self.fleet is None:
            raise RuntimeError("only rank 0 closes the group")
        self.fleet.close_group(min(self.settings.config.control_timeout_s, deadline_s - time.monotonic()))
