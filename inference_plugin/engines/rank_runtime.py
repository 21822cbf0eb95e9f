"""The part of each worker process that is the same on every engine: groups, socket, and the operations that the coordinator
runs on all ranks at a step boundary."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import get_args

import msgspec

from inference_plugin.devices import device_of
from inference_plugin.engines.keepsakes import Keepsakes
from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.operations import RankOperation, RankReply
from inference_plugin.net import addresses
from inference_plugin.net.processes import start_ticks
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import EngineUnsupported, WeightwireError, asleep_by_engine
from inference_plugin.wire.messages import MemoryTag, WorkerCard
from inference_plugin.worker.engine_side import EngineSide
from inference_plugin.worker.groups import GroupTable
from inference_plugin.worker.server import WorkerServer

__all__ = ["RankIdentity", "RankRuntime", "rank_timeout_s"]

logger = logging.getLogger(__name__)


@functools.cache
def rank_timeout_s() -> float:
    """Limit of one operation on all ranks, from this process's environment at the first call."""
    return Config.from_environment().rank_timeout_s


@dataclass(frozen=True)
class RankIdentity:
    """Who this worker is, within its replica of `ranks` workers."""

    replica: str
    rank: int
    tp_rank: int
    pp_rank: int = 0
    ranks: int = 1


class RankRuntime:
    """Groups and server of one worker; lives from the engine's start to its shutdown."""

    def __init__(self, identity: RankIdentity, model: LiveModel) -> None:
        self.identity = identity
        self.model = model
        model.ranks = identity.ranks
        config = Config.from_environment()
        beside = identity.ranks if model.device.type == "cpu" else 1
        self._where = {"side": "worker", "replica": identity.replica, "rank": identity.rank}
        self._asleep: set[MemoryTag] = set()
        self._has_loads_to_tell = False
        self.moves_memory = False
        """Whether a sleep or a wake-up of ours is under way."""
        self._asleep_by_engine = False
        self._keepsakes = Keepsakes()
        listen = addresses.listen_address(identity.replica, str(identity.rank))
        device = device_of(model.device)
        before = device.current()
        device.use(model.device.index)  # the worker's threads take over the current device of this one
        try:
            self._table = GroupTable(identity.replica, identity.rank, model.installer, model.decoding, config, beside)
            self._server = WorkerServer(self._table, listen, self.card, self._where)
        finally:
            device.use(before)
        try:
            self._server.start()
        except BaseException:
            self._server.close()
            raise

    def card(self) -> WorkerCard:
        """This worker's card, as of now."""
        return WorkerCard(
            replica=self.identity.replica,
            rank=self.identity.rank,
            tp_rank=self.identity.tp_rank,
            pp_rank=self.identity.pp_rank,
            pid=os.getpid(),
            start_ticks=start_ticks(),
            boot_id=addresses.boot_id(),
            address=self._server.address,
            device=str(self.model.device),
            free_bytes=self.model.free_bytes(),
            groups=self._table.statuses(),
        )

    def unsure(self) -> str:
        """Which groups may hold another version here than on the other ranks, in words; "" if none."""
        doubtful = [group for group in self._table.statuses() if group.state in ("committing", "torn")]
        return ", ".join(f"group {group.group!r} was {group.state}" for group in doubtful)

    def note_load(self, reason: str) -> dict[str, str]:
        """On the engine's own thread: somebody else is about to write the weights. Returns the groups whose version is
        unknown from then on, and who wrote them; none if no version was ever known."""
        self._keepsakes.drop()  # memory that can be written never went
        return self._lose_versions(reason)

    def _lose_versions(self, reason: str) -> dict[str, str]:
        self._has_loads_to_tell = True
        return self._table.forget_versions(reason)

    @property
    def is_asleep(self) -> bool:
        """Whether a manager has put this rank to sleep, and not all of its memory is awake."""
        return bool(self._asleep)

    @property
    def is_asleep_by_engine(self) -> bool:
        """Whether a command of the engine's own has released the memory of the weights."""
        return self._asleep_by_engine

    def free_kept(self) -> None:
        """On the engine's own thread, before memory of the engine goes or comes back: frees what updates keep on the device. It
        may be what the trainer counts on, or what the engine needs."""
        if self.model.device.type != "cpu":
            self._table.free_kept()
            device_of(self.model.device).return_cached()

    def note_sleep(self, lost: str) -> dict[str, str]:
        """A command of the engine's own is about to release the memory of the weights: waits for the threads that read it.
        `lost`: why the contents will be lost; "" if they are kept. Returns what `note_load` returns."""
        is_there = "weights" not in self._asleep and not self._asleep_by_engine
        self._asleep_by_engine = True
        self._table.falls_asleep()
        self.free_kept()
        unknown = self._lose_versions(lost) if lost else {}
        if lost and is_there:
            models = self.model.and_draft()
            try:
                self._keepsakes.take(models)
            except Exception:  # the engine sleeps all the same
                logger.exception("weightwire: what no update brings back could not be kept over a sleep")
                for model in models:
                    model.lost = (
                        "before a sleep of the engine's own not everything could be kept that no update brings back"
                    )
        return unknown

    def note_wake_up(self, failed: str = "") -> None:
        """A command of the engine's own has taken the memory of the weights back. `failed`: why it could not release it, if it
        could not."""
        if self._asleep_by_engine:
            self._asleep_by_engine = False
            if failed:
                self._keepsakes.drop()
            self._keepsakes.give_back()
            self._table.awake()

    def _forget_versions(self, reason: str) -> dict[str, str]:
        """For a `reason`; without one, for the loads since the last call, unless an update has replaced them."""
        told = bool(reason) or self._has_loads_to_tell
        self._has_loads_to_tell = False
        return self._table.forget_versions(reason) if told else {}

    def call(self, request: bytes) -> bytes:
        """Runs one operation on the engine's own thread. Never raises: the executor would mix up later answers."""
        nonce = ""
        started_s = time.perf_counter()
        try:
            operation = decode_as(request, RankOperation)
            nonce = operation.nonce
            reply = self._run(operation)
        except Exception as error:
            if not isinstance(error, WeightwireError):
                logger.exception("weightwire: an operation failed on rank %d", self.identity.rank)
            reply = RankReply(nonce, self.identity.rank, error=WeightwireError.wrap(error).at(**self._where).info())
        return msgspec.msgpack.encode(msgspec.structs.replace(reply, seconds=time.perf_counter() - started_s))

    def close(self) -> None:
        """Ends the server and frees what was staged; may be called twice."""
        self._server.close()

    @contextlib.contextmanager
    def _moving_memory(self) -> Iterator[None]:
        self.moves_memory = True
        try:
            yield
        finally:
            self.moves_memory = False

    def _wake(self, tags: tuple[MemoryTag, ...]) -> None:
        """Takes back what we released of the memory among `tags`. Memory that came back stays, also where the rest fails."""
        for tag in tags:
            if tag in self._asleep:
                self.free_kept()
                with self._moving_memory():
                    self.model.wake_up(tag)
                self._asleep.remove(tag)
        if "weights" not in self._asleep and not self._asleep_by_engine:
            self._keepsakes.give_back()
            self._table.awake()

    def _run(self, operation: RankOperation) -> RankReply:
        """The answer, but for the time that it took."""
        reply = partial(RankReply, operation.nonce, self.identity.rank)
        table = self._table
        if self._asleep_by_engine and operation.name in ("check", "install", "verify", "read_on", "may_sleep"):
            raise asleep_by_engine()
        match operation.name:
            case "tear":
                table.tear(operation.group, operation.txn, operation.reason)
            case "tear_all":
                table.tear_all(operation.reason)
                return reply(card=self.card())
            case "may_sleep":
                if why := self.model.why_no_sleep(operation.level):
                    raise EngineUnsupported(
                        why, hint="pause() stops generation on every engine, and releases no memory", phase="sleep"
                    )
                table.may_sleep(discard=operation.level == 2)
            case "sleep":
                if operation.level == 2:
                    self._keepsakes.take(self.model.and_draft())
                self._asleep = set(get_args(MemoryTag))
                self.free_kept()
                with self._moving_memory():
                    self.model.sleep(operation.level)
            case "wake":
                self._wake(operation.tags)
            case "forget":
                return reply(unknown=self._forget_versions(operation.reason))
            case "note_sleep":
                unknown = self.note_sleep(operation.reason)
                self._has_loads_to_tell = False
                return reply(unknown=unknown)
            case "note_wake_up":
                self.note_wake_up(operation.reason)
            case _:
                return self._run_on(table.named(operation.group), operation, reply)
        return reply()

    @staticmethod
    def _run_on(group: EngineSide, operation: RankOperation, reply: Callable[..., RankReply]) -> RankReply:
        match operation.name:
            case "check":
                commit = group.check_sealed(operation.txn, operation.version)
                if commit is not None:
                    return reply(commit=commit)
                return reply(share=group.share(), scales_cache=group.installer.scales_cache)
            case "release":
                group.release()
            case "install":
                return reply(left=group.install(operation.txn, operation.shares))
            case "undo":
                group.undo(operation.reason)
            case "finish":
                return reply(commit=group.finish(operation.txn, operation.install_s))
            case "stop_reading":
                group.stop_reading(operation.txn)
            case "verify" | "read_on":
                if operation.name == "verify":
                    group.start_reading(operation.txn)
                verify, left = group.read_on(operation.txn)
                return reply(verify=verify, left=left)
        return reply()
