"""The front: where an engine orders its work. It commits on all ranks of its replica at one step boundary.

A control thread owns a ROUTER socket, so that a commit that waits for its boundary holds nobody up. Commits and
verifications go to the engine's own thread through `EngineControl.submit`; their replies come back through a queue.

Pauses and sleeps (`hold.py`) take turns with commits on that thread (`pending.py`).

A commit, in order: check on all ranks that the transaction is sealed (nothing is written); pause by the caller's policy
for requests in flight; install on all ranks; where one failed, undo on all; finish, reset caches, stamp the version;
resume. Where the way back fails too, the replica is torn: it refuses to generate until a full update commits.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import zmq

from inference_plugin.engines.hold import Hold, PendingPause, PendingResume
from inference_plugin.engines.pending import Pending
from inference_plugin.engines.rank import RankOperation, RankReply
from inference_plugin.engines.registration import Registration
from inference_plugin.hooks import plugin_manager
from inference_plugin.wire import addresses, codec
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import (
    CommitFailed,
    PeerLost,
    ProtocolError,
    SyncTimeout,
    TornReplica,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.listening import Listener
from inference_plugin.wire.messages import (
    Body,
    Commit,
    Committed,
    Describe,
    Failed,
    InFlight,
    MemoryTag,
    Pause,
    RenewPause,
    ReplicaCard,
    ReplicaState,
    Resume,
    Verified,
    Verify,
    WorkerCard,
)
from inference_plugin.wire.tracing import Trace, save, span, span_since, under

__all__ = ["EngineControl", "Front", "open_front"]

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1 << 20
MODEL = ""
"""Among the torn groups: the model, where no group of it is open yet; an update of the whole of it heals that too."""


class EngineControl(Protocol):
    """What an engine file gives its front. All but `submit` are called on the engine's own thread, between steps."""

    def submit(self, command: Callable[[], None]) -> None:
        """Any thread: has `command` run on the engine's own thread between two steps, soon even if the engine is idle."""

    def call_ranks(self, request: bytes) -> list[bytes]:
        """Runs `RankRuntime.call(request)` on every rank at one place in their order of work. Raises if one is lost."""

    def pause(self, in_flight: InFlight, paused: Callable[[BaseException | None], None]) -> None:
        """Stops stepping by that policy; then `paused` is called on the engine's thread (perhaps at once).

        No step runs until `paused` returns. On a replica that is held it only does to its requests what the policy says;
        "drain" is not asked for there.
        """

    def hold(self, asleep: frozenset[MemoryTag]) -> None:
        """After `pause`: no step runs until `resume`. `asleep`: the memory that is released; called again as it changes."""

    def resume(self) -> None:
        """Undoes `pause` and `hold`; harmless if nothing is paused."""

    def installed(self, group: str, version: int, in_flight: InFlight) -> None:
        """All ranks hold `version`: caches of the old one are to go, outputs are to be stamped."""

    def refuse(self, reason: str | None) -> None:
        """From now on every request is refused with `reason`; None: generation is allowed again."""


def open_front(control: EngineControl, replica: str, workers: Iterable[WorkerCard | None], **card: Any) -> Front:
    """Starts a replica's front and publishes its card: from now on trainers find it.

    `card`: the fields of `ReplicaCard` that the engine knows (engine, engine_version, model, tp, ...).
    """
    front = Front(control, addresses.listen_address(replica, "f"), {"side": "front", "replica": replica})
    ordered = sorted((worker for worker in workers if worker is not None), key=lambda worker: worker.rank)
    front.publish(replica_card(replica=replica, address=front.address, workers=tuple(ordered), **card))
    logger.info("weightwire: replica %s is ready for weight updates at %s", replica, front.address)
    return front


class Front:
    """Control thread of one replica, and what the engine's thread does for it."""

    def __init__(self, control: EngineControl, address: str, where: dict[str, Any]) -> None:
        self.control = control
        self.where = where
        self.hold = Hold(self)
        self.at_work: Pending | None = None
        self.in_line: collections.deque[Pending] = collections.deque()
        self._card: ReplicaCard | None = None
        self._torn: dict[str, str] = {}
        self._lost: str | None = None
        self._listener = Listener(zmq.ROUTER, address, max_bytes=MAX_REQUEST_BYTES)
        self._socket, self.address = self._listener.socket, self._listener.address
        self._context = self._listener.context
        self._wake_receiver = self._context.socket(zmq.PULL)
        self._wake_receiver.bind("inproc://wake")
        self._replies: collections.deque[tuple[list[bytes], bytes]] = collections.deque()
        self._deadlines: list[tuple[float, Pending]] = []
        self._stopping = False
        self._registration: Registration | None = None
        self._profile_dir = Config.from_environment().profile_dir
        self._thread = threading.Thread(target=self._serve, name="weightwire-front", daemon=True)

    def publish(self, card: ReplicaCard) -> None:
        """Starts serving and writes the card: from now on trainers find this replica."""
        registry = addresses.registry_address()  # one that can't be meant is an error before anything is told
        self._card = card
        self._thread.start()
        addresses.write_card(card)
        self._registration = Registration(registry, card)

    @property
    def torn(self) -> str | None:
        """Why the replica refuses to generate; None if it doesn't."""
        reasons = [f"group {group!r}: {reason}" if group else reason for group, reason in self._torn.items()]
        return "; ".join(reasons) or None

    def ask_ranks(self, name: str, **arguments: Any) -> list[RankReply]:
        """Engine's thread: one operation on all ranks. Raises `PeerLost` if the executor lost one or mixes answers up."""
        if self._lost is not None:
            raise PeerLost(self._lost, phase=name, **self.where)
        nonce = secrets.token_hex(8)
        request = msgspec.msgpack.encode(RankOperation(nonce, name, **arguments))  # type: ignore[arg-type]
        try:
            replies = [codec.decode_as(reply, RankReply) for reply in self.control.call_ranks(request)]
        except Exception as error:
            self._lost = f"the engine lost a worker in {name!r}: {type(error).__name__}: {error}"
            raise PeerLost(self._lost, phase=name, **self.where) from error
        if any(reply.nonce != nonce for reply in replies):
            self._lost = f"the engine's executor returned another call's answer to {name!r}"
            raise PeerLost(self._lost, hint="restart the engine", phase=name, **self.where)
        if self._card is not None and len(replies) != len(self._card.workers):
            self._lost = f"{len(replies)} of {len(self._card.workers)} workers answered {name!r}"
            raise PeerLost(self._lost, hint="restart the engine", phase=name, **self.where)
        return replies

    def close(self) -> None:
        """Stops serving and takes card and sockets away; may be called twice."""
        if self._stopping:
            return
        self._stopping = True
        if self._card is not None:
            with contextlib.suppress(OSError, WeightwireError):
                addresses.remove_card(self._card)
        if self._registration is not None:
            self._registration.close()
        if self._thread.is_alive():
            self._wake()
            self._thread.join()
        self.hold.close()
        self._wake_receiver.close(linger=0)
        self._listener.close()
        if self._card is not None:
            with contextlib.suppress(OSError, WeightwireError):
                addresses.remove_replica(self._card.replica, self._card.job)

    # --- the control thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._stopping:
            watched: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN), (self._wake_receiver, zmq.POLLIN)]
            watched += [(fd, zmq.POLLIN) for fd in self.hold.watched()]
            ready = [source for source, _ in zmq.zmq_poll(watched, self._timeout_ms())]
            if self._wake_receiver in ready:
                self._wake_receiver.recv()
            while self._replies:
                route, reply = self._replies.popleft()
                self._socket.send_multipart([*route, reply])
            if self._socket in ready:
                self._receive()
            else:  # whoever was silent may have written meanwhile: first what it wrote
                self.hold.look()
            self._cancel_late()

    def _receive(self) -> None:
        frames: list[bytes] = self._socket.recv_multipart()
        if b"" not in frames:
            return  # not a REQ peer: there is nobody to answer
        cut = frames.index(b"") + 1
        route, content = frames[:cut], frames[cut:]
        seq = 0
        try:
            if len(content) != 1:
                raise ProtocolError(f"a message of {len(content)} frames; one is expected")
            envelope = codec.decode(content[0])
            seq = envelope.seq
            self._dispatch(envelope.body, lambda body: self._reply(route, seq, body))
        except WeightwireError as error:
            self._reply(route, seq, Failed(error.at(**self.where).info()))
        except Exception as error:  # a bug of ours must not end the thread or leave the peer without a reply
            logger.exception("weightwire: a request to the front failed")
            self._reply(route, seq, Failed(WeightwireError.wrap(error).at(**self.where).info()))

    def _dispatch(self, body: Body, reply: Callable[[Body], None]) -> None:
        if isinstance(body, Describe):
            assert self._card is not None
            reply(self._card)
        elif isinstance(body, Commit):
            self._take(_PendingCommit(self, body, reply), body, body.timeout_s)
        elif isinstance(body, Pause):
            self._take(PendingPause(self, body, reply), body, body.timeout_s)
        elif isinstance(body, Resume):
            self._take(PendingResume(self, body, reply), body, body.timeout_s)
        elif isinstance(body, RenewPause):
            reply(self.hold.renew(body.session))
        elif isinstance(body, Verify):
            self.control.submit(lambda: self._verify(body, reply))
        else:
            raise ProtocolError(f"a front takes no {type(body).__name__}")

    def _take(self, new: Pending, body: Body, timeout_s: float) -> None:
        """Has it done on the engine's thread; what is asked again while it waits or runs answers the last one to ask."""
        for pending in filter(None, [self.at_work, *(pending for _, pending in self._deadlines)]):
            if not pending.over and pending.is_asked_again(body):
                pending.reply = new.reply
                return
        self._deadlines.append((time.monotonic() + timeout_s, new))
        self.control.submit(new.start)

    def _reply(self, route: Sequence[bytes], seq: int, body: Body) -> None:
        self._replies.append((list(route), codec.encode(body, seq)))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            sender = self._context.socket(zmq.PUSH)
            sender.connect("inproc://wake")
            sender.send(b"")
            sender.close()

    def _timeout_ms(self) -> int:
        until_s = min([self.hold.due_s(), *(at_s for at_s, _ in self._deadlines)])
        return -1 if until_s == math.inf else max(0, int((until_s - time.monotonic()) * 1000) + 1)

    def _cancel_late(self) -> None:
        now_s = time.monotonic()
        late = [pending for at_s, pending in self._deadlines if at_s <= now_s and not pending.over]
        self._deadlines = [(at_s, p) for at_s, p in self._deadlines if at_s > now_s and not p.over]
        for pending in late:
            self.control.submit(pending.cancel)

    # --- the engine's own thread -------------------------------------------------------------------------------------

    def resume_unless_held(self) -> None:
        """After a commit: the engine steps again, where nobody holds it."""
        if self.hold.held is None:
            self.control.resume()

    def set_torn(self, group: str, reason: str | None) -> None:
        """`group` is torn for that reason, or (None) healed."""
        if reason is None:
            self._torn.pop(group, None)
        else:
            self._torn[group] = reason
        self._refuse_or_not()

    def tear_model(self, reason: str) -> None:
        """All of the model's weights are unknown from here on: every group is torn."""
        groups: set[str] = set()
        with contextlib.suppress(PeerLost):
            replies = self.ask_ranks("tear_all", reason=reason)
            groups = {group.group for reply in replies if reply.card is not None for group in reply.card.groups}
        for group in sorted(groups) or [MODEL]:
            self._torn[group] = reason
        self._refuse_or_not()

    def show(self) -> None:
        """Publishes how the replica stands, where that changed."""
        state, detail = self.stands()
        if self._card is None or (self._card.state, self._card.detail) == (state, detail):
            return
        self._card = msgspec.structs.replace(self._card, state=state, detail=detail)
        addresses.write_card(self._card)
        if self._registration is not None:
            self._registration.update(self._card)

    def stands(self) -> tuple[ReplicaState, str]:
        """How the replica stands, and why in words."""
        held, torn = self.hold.held, self.torn
        detail = "; ".join(filter(None, [torn, self.hold.detail]))
        if held is not None and held.asleep:
            return "asleep", detail
        if torn is not None:
            return "torn", detail
        return ("paused" if held is not None else "serving"), detail

    def _refuse_or_not(self) -> None:
        # Where no step runs, requests may wait: an update may heal it before the end of the pause, which looks again.
        self.show()
        if self.hold.held is None or self.torn is None:
            self.control.refuse(self.torn)

    def _verify(self, request: Verify, reply: Callable[[Body], None]) -> None:
        try:
            self.hold.check_awake()
            replies = self.ask_ranks("verify", group=request.group)
            for answer in replies:
                if answer.error is not None:
                    raise WeightwireError.of(answer.error)
            reply(Verified(tuple(answer.verify for answer in replies if answer.verify is not None)))
        except WeightwireError as error:
            reply(Failed(error.at(phase="verify", group=request.group, **self.where).info()))


class _PendingCommit(Pending):
    """One commit."""

    phase = "commit"

    def __init__(self, front: Front, request: Commit, reply: Callable[[Body], None]) -> None:
        super().__init__(front, reply)
        self.request = request
        self._installing = False
        self._checked = False
        self._submitted_s = time.perf_counter()
        named = {"role": "front", "replica": front.where["replica"], "group": request.group}
        self._trace = Trace.begun(front._profile_dir, version=request.version, txn=request.txn, **named)
        self._boundary_s: float | None = None
        self._paused_s = 0.0

    def is_asked_again(self, body: Body) -> bool:
        return isinstance(body, Commit) and body.txn == self.request.txn

    def _meet(self, other: Pending) -> None:
        if isinstance(other, _PendingCommit) and other.request.group == self.request.group:
            self._fail(VersionConflict(f"transaction {other.request.txn} is being committed"))

    def _run(self) -> None:
        """At the first step boundary: check, then pause."""
        front = self.front
        self._boundary_s = time.perf_counter()
        try:
            replies = self._ask("check")
            if all(reply.commit is not None for reply in replies):
                done = tuple(reply.commit for reply in replies if reply.commit is not None)
                self._end(Committed(self.request.version, done, 0.0, 0.0, already=True))
                return
            self._checked = True
            if failed := _first_error(replies):
                raise failed
            in_flight = front.hold.policy(self.request.in_flight)
        except WeightwireError as error:
            self._fail(error)
            return
        try:
            front.control.pause(in_flight, self._at_boundary)
        except Exception as error:
            if not isinstance(error, WeightwireError):
                logger.exception("weightwire: the engine could not be paused")
            front.resume_unless_held()
            self._fail(WeightwireError.wrap(error))
        self._boundary_s = None

    def cancel(self) -> None:
        """If nothing was written yet, nothing will be."""
        if self.over or self._installing:
            return
        if self.front.at_work is self:
            self.front.resume_unless_held()
        self._fail(
            SyncTimeout(
                f"no step boundary by policy {self.request.in_flight!r} within {self.request.timeout_s:g} s",
                hint="the old version is served; give the commit more time, or use another policy for requests in flight",
            )
        )

    def _at_boundary(self, error: BaseException | None) -> None:
        if self.over:
            return  # cancelled, and resumed, while the engine was on its way here
        try:
            if error is not None:
                raise WeightwireError.wrap(error)
            self._installing = True
            # Where the pause had to wait (drain, batches in flight) the engine went on stepping until now; else it has
            # stood still since `start`.
            self._paused_s = self._boundary_s or time.perf_counter()
            with under(self._trace):
                span_since(self._submitted_s, "wait", "wait for the boundary", in_flight=self.request.in_flight)
            committed = self._install()
        except WeightwireError as failure:
            self._fail(failure)
        except Exception as bug:
            logger.exception("weightwire: a commit failed")
            self._tear(f"{type(bug).__name__}: {bug}")
            self._fail(TornReplica(str(bug)))
        else:
            self._end(committed)
            self._tell_listeners(committed)
        finally:
            self.front.resume_unless_held()

    def _tell_listeners(self, committed: Committed) -> None:
        try:
            plugin_manager().hook.weightwire_committed(
                replica=self.front.where["replica"],
                group=self.request.group,
                version=self.request.version,
                stopped_s=committed.stopped_s,
            )
        except Exception:  # a third party's listener must not stop the engine
            logger.exception("weightwire: a listener failed")

    def _install(self) -> Committed:
        request, control = self.request, self.front.control
        try:
            replies = self._ask("install")
            failed = _first_error(replies)
        except PeerLost as error:
            self._tear(error.message)
            raise
        if failed is not None:
            self._undo(failed)
        slowest_s = max(reply.seconds for reply in replies)
        try:
            finished = self._ask("finish", install_s=slowest_s)
            with under(self._trace), span("caches"):
                control.installed(request.group, request.version, request.in_flight)
        except Exception as error:
            self._tear(f"{type(error).__name__}: {error}")
            raise
        if (failed := _first_error(finished)) is not None:
            self._tear(failed.message)
            raise failed
        if not any(reply.commit.partial for reply in finished if reply.commit is not None):
            self.front._torn.pop(MODEL, None)
        self.front.set_torn(request.group, None)
        seconds = {reply.rank: reply.seconds for reply in replies}
        ranks = tuple(
            msgspec.structs.replace(reply.commit, install_s=seconds[reply.rank])
            for reply in finished
            if reply.commit is not None
        )
        now_s = time.perf_counter()
        return Committed(
            request.version,
            ranks,
            stopped_s=now_s - self._paused_s,
            waited_s=self._paused_s - self._submitted_s,
        )

    def _undo(self, failed: WeightwireError) -> None:
        """Back to the old version on all ranks, then raises `CommitFailed`; or `TornReplica` where that failed too."""
        try:
            undone = self._ask("undo", reason=failed.message)
            torn = _first_error(undone)
        except PeerLost as error:
            torn = error
        if torn is None:
            raise CommitFailed(f"rank {failed.rank}: {failed.message}; undone on all ranks") from failed
        self._tear(torn.message)
        raise TornReplica(f"rank {failed.rank}: {failed.message}; and the way back failed: {torn.message}")

    def _tear(self, reason: str) -> None:
        with contextlib.suppress(PeerLost):
            self._ask("tear", reason=reason)
        self.front.set_torn(self.request.group, reason)

    def _ask(self, name: str, **arguments: Any) -> list[RankReply]:
        request = self.request
        told = {"group": request.group, "txn": request.txn, "version": request.version}
        with under(self._trace), span(name):
            return self.front.ask_ranks(name, **told, **arguments)

    def _fail(self, error: WeightwireError) -> None:
        if self._checked and not self._installing:
            with contextlib.suppress(PeerLost):
                self._ask("release")
        super()._fail(error)

    def _where(self) -> dict[str, object]:
        return {"group": self.request.group, "version": self.request.version, **super()._where()}

    def _end(self, body: Body) -> None:
        super()._end(body)
        if self._paused_s:
            with under(self._trace):
                span_since(self._paused_s, "stopped", "generation stopped")
        save(self._trace)


def replica_card(**fields: Any) -> ReplicaCard:
    """A card of this process, with what is the same for every engine filled in."""
    from inference_plugin import __version__

    return ReplicaCard(
        job=addresses.job_name(),
        pid=os.getpid(),
        boot_id=addresses.boot_id(),
        package_version=__version__,
        started_at_unix_s=time.time(),
        **fields,
    )


def _first_error(replies: Sequence[RankReply]) -> WeightwireError | None:
    return next((WeightwireError.of(reply.error) for reply in replies if reply.error is not None), None)
