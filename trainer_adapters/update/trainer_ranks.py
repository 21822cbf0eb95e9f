"""Messages among the trainer's ranks, over ZMQ to rank 0, so that no deadline passes inside a collective.

The store of `torch.distributed` is used once, at construction, to tell every rank where rank 0 listens. From then on each rank
sends requests to rank 0 (`Ready` -> `Go`, `Wrote` -> `Outcome`), which answers when it has heard all ranks; `RanksMachine`
decides which ranks are answered, and when. Between operations a thread of rank 0 answers ranks that come too late. On one host,
rank 0 notices the death of a rank at once; it notices a silent rank at the deadline.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import torch.distributed as dist
import zmq

from inference_plugin.net.addresses import boot_id, new_replica_id, runtime_dir
from inference_plugin.net.channel import Channel
from inference_plugin.net.listening import Listener, listens_on, remove_socket
from inference_plugin.net.processes import ProcessWatch, start_ticks
from inference_plugin.wire import codec
from inference_plugin.wire.errors import ConfigError, ProtocolError, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import Body, Failed, Go, Outcome, Ready, Wrote
from trainer_adapters.settings import Settings
from trainer_adapters.sources.exchange import meet
from trainer_adapters.update.ranks_machine import (
    HINT,
    EnterOperation,
    Event,
    FailAll,
    Gather,
    Gone,
    RanksMachine,
    Said,
    SendGo,
    SendOutcome,
    Tick,
)
from trainer_adapters.update.reception import Reception

__all__ = ["TrainerRanks", "Member"]

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Rank 0 ends an operation at its deadline and then tells engines and ranks: a rank waits this much longer for the answer."""

MESSAGES_AT_ONCE = 1000
"""Rank 0 looks at the clock at least once in this many messages."""

Answer = TypeVar("Answer", Go, Outcome)


class Member(msgspec.Struct, frozen=True):
    """One trainer rank and its process; of rank 0 also its address, and the secret that the other ranks show there. `alike`: the
    settings of the rank's manager that must be those of the other ranks' managers."""

    rank: int
    pid: int
    boot_id: str
    address: str
    secret: str = ""
    start_ticks: int = 0
    alike: dict[str, str] = {}


class TrainerRanks:
    """This rank's end, for one thread. Made on every rank of `process_group` (None: torch.distributed's default group; without
    torch.distributed this process is the only rank). Raises `SyncTimeout` unless all ranks make theirs within
    `settings.timeout_s`, `ConfigError` on all ranks where their settings differ, `TransportUnavailable` where descriptors or
    threads are lacking.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, settings: Settings) -> None:
        together = dist.is_available() and dist.is_initialized()
        _check_group(process_group, together)
        self.rank = dist.get_rank(process_group) if together else 0
        self.size = dist.get_world_size(process_group) if together else 1
        if self.rank < 0:
            raise ValueError("this rank is not in process_group; only the ranks of a group make its SyncManager")
        self.is_awaited = False
        self._machine = RanksMachine(self.size)
        self._reception: Reception | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._socket_path: Path | None = None
        self._to_manager: Channel | None = None
        self._processes: dict[int, ProcessWatch] = {}
        address = ""
        self._listener: Listener | None = None
        if self.rank == 0 and self.size > 1:
            listen = listens_on()
            if listen == "ipc":
                self._socket_path = runtime_dir() / new_replica_id("trainer")
                listen = f"ipc://{self._socket_path}"
            self._listener = Listener(zmq.ROUTER, listen, max_bytes=codec.MAX_CONTROL_BYTES)
            self._router, address = self._listener.socket, self._listener.address
        secret = secrets.token_hex(16) if self.rank == 0 else ""
        me = Member(self.rank, os.getpid(), boot_id(), address, secret, start_ticks(), settings.alike())
        self.members = [me]
        try:
            if self.size > 1:  # through the group's store: a collective would wait without a time limit of ours
                records = meet(msgspec.msgpack.encode(me), process_group, timeout_s=settings.timeout_s)
                self.members = [codec.decode_as(record, Member) for record in records]
                _check_alike(self.members)
            if self.rank == 0:
                self._await_ranks()
            else:
                self._to_manager = self._connect(settings.config.silence_s)
        except BaseException:
            self.close()
            raise

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks share this host's memory."""
        return all(member.boot_id == boot_id() for member in self.members)

    @property
    def secret(self) -> str:
        """What a rank shows to rank 0, which takes messages of this trainer's ranks only."""
        return self.members[0].secret

    # --- ranks above 0 -----------------------------------------------------------------------------------------------

    def _connect(self, silence_s: float) -> Channel:
        manager = self.members[0]
        return Channel(
            manager.address,
            pid=manager.pid,
            start_ticks=manager.start_ticks,
            peer_boot_id=manager.boot_id,
            resends=False,  # the answer to a request that was sent again since would be lost
            silence_s=silence_s,
            side="manager",
            rank=0,
        )

    def ask_go(self, ready: Ready, *, deadline_s: float) -> Go:
        """Reports for an operation and waits for the manager's word. Raises its error, or `PeerLost`, `SyncTimeout`."""
        return self._ask(ready, Go, deadline_s)

    def ask_outcome(self, wrote: Wrote, *, deadline_s: float) -> bytes:
        """Reports what was written and waits for the end of the operation. Raises as `ask_go` does."""
        return self._ask(wrote, Outcome, deadline_s).report

    def give_up(self, ready: Ready) -> None:
        """Tells rank 0 that this rank is no longer in the operation for which it reported with `ready`."""
        assert self._to_manager is not None
        self.is_awaited = False
        try:
            self._to_manager.send(msgspec.structs.replace(ready, error=None, claims=None, model=b"", given_up=True))
        except WeightwireError as error:
            logger.info("weightwire: rank 0 can't be told that this rank gave %s up: %s", ready.operation, error)

    def _ask(self, body: Ready | Wrote, kind: type[Answer], deadline_s: float) -> Answer:
        """`is_awaited` says afterwards whether rank 0 still counts on this rank."""
        assert self._to_manager is not None
        self.is_awaited = True
        if (late_s := time.monotonic() - deadline_s) > 0:
            raise SyncTimeout(
                f"this rank was {late_s:.1f} s late when it came to report: the operation's deadline has passed",
                hint="go on with the next operation; rank 0 has given this one up as well",
                side="trainer",
                rank=self.rank,
            )
        self._to_manager.send(body)
        try:
            answer = self._to_manager.receive(kind, timeout_s=deadline_s + ANSWER_S - time.monotonic())
        except WeightwireError as error:
            self.is_awaited = self._to_manager.is_open  # if not, the error is rank 0's answer
            if self.is_awaited and isinstance(body, Ready) and isinstance(error, SyncTimeout):
                raise SyncTimeout(
                    f"trainer rank 0 did not answer in time: it has not called {body.operation.partition(':')[0]!r}, or it hangs",
                    hint=HINT,
                    side="trainer",
                    rank=0,
                ) from error
            raise
        self.is_awaited = isinstance(answer, Go)
        return answer

    # --- rank 0 ------------------------------------------------------------------------------------------------------

    def _await_ranks(self) -> None:
        for member in self.members[1:]:
            if member.boot_id == boot_id():
                self._processes[member.rank] = ProcessWatch(member.pid, member.start_ticks)
        if self._router is not None:
            self._reception = Reception(self._router, self._take_in)

    def enter(self, operation: str, *, deadline_s: float) -> None:
        """Rank 0 begins an operation, which ends with `fail_all` or with an `Outcome` for all."""
        if self._reception is not None:
            self._reception.pause()
        self._do(EnterOperation(operation, deadline_s))

    def gather_ready(self) -> list[Ready]:
        """Every other rank's `Ready` for rank 0's operation, in order of rank. A rank that comes with an operation that rank 0
        has left is told at once, and waited for.

        Raises the first error that a rank reported, `VersionConflict` where a rank is in another operation, `PeerLost` for a
        rank whose process ended, `SyncTimeout` at the operation's deadline, naming the silent ranks.
        """
        self._do(Gather())
        return [said for said in self._gather() if isinstance(said, Ready)]

    def gather_wrote(self) -> list[Wrote]:
        """Every other rank's `Wrote` for the `Go` that all were told, in order of rank. Raises as `gather_ready` does, and
        `SyncTimeout` for a rank that has given the operation up."""
        return [said for said in self._gather() if isinstance(said, Wrote)]

    def look(self) -> None:
        """While rank 0 writes: raises what another rank reported meanwhile, as `gather_wrote` does. On other ranks, nothing."""
        self._take_in()
        if self._machine.error is not None:
            raise self._machine.error

    def tell_all(self, body: Go | Outcome) -> None:
        """Answers every rank that waits in rank 0's operation. An `Outcome` ends it."""
        self._do(SendGo(body) if isinstance(body, Go) else SendOutcome(body))
        self._end()

    def fail_all(self, error: WeightwireError) -> None:
        """Answers every other rank with `error`: ranks that wait now, ranks that come to rank 0's operation until its deadline,
        and later ones as soon as they come. Ranks whose process ended, or that are in another operation, are not waited for."""
        self._take_in()
        self._do(FailAll(error))
        try:
            while self._machine.state == "failing":
                self._wait()
        finally:
            self._end()

    def close(self) -> None:
        """Closes sockets; may be called twice."""
        if self._reception is not None:
            self._reception.close()
            self._reception = None
        if self._to_manager is not None:
            self._to_manager.close()
        if self._listener is not None:
            self._listener.close(linger_ms=1000)
            self._listener = None
            if self._socket_path is not None:
                remove_socket(self._socket_path)
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def _gather(self) -> Sequence[Ready | Wrote]:
        self._take_in()
        while self._machine.error is None and not self._machine.all_heard:
            self._wait()
        if self._machine.error is not None:
            raise self._machine.error
        return self._machine.heard

    def _end(self) -> None:
        if self._machine.state == "idle" and self._reception is not None:
            self._reception.resume()

    def _do(self, event: Event) -> None:
        for reply in self._machine.on(event, time.monotonic()):
            route, seq = cast(tuple[list[bytes], int], reply.asker)
            self._send(route, reply.body, seq)

    def _send(self, route: list[bytes], body: Body, seq: int) -> None:
        assert self._router is not None
        self._router.send_multipart([*route, codec.encode(body, seq)])

    def _wait(self) -> None:
        """Waits for a message, for the death of a rank that is awaited, or for the operation's deadline; takes in what came."""
        ranks = self._machine.missing
        missing = {rank: process for rank, process in self._processes.items() if rank in ranks}
        watched: list[tuple[Any, int]] = [(self._router, zmq.POLLIN)]
        watched += [(process.fd, zmq.POLLIN) for process in missing.values() if process.fd is not None]
        wakes_at_s = self._machine.wakes_at_s
        assert wakes_at_s is not None, "rank 0 is in an operation"
        until_s = min([wakes_at_s, *(process.look_at_s for process in missing.values())])
        left_s = max(0.0, until_s - time.monotonic())
        ready = [source for source, _ in zmq.zmq_poll(watched, int(left_s * 1000) + 1)]
        if self._router in ready:  # what a rank said before it died counts
            self._take_in()
        else:
            for gone in [rank for rank, process in missing.items() if process.ended()]:
                self._do(Gone(gone))
        self._do(Tick())

    def _take_in(self) -> None:
        """Takes the messages that are there."""
        if self._router is None:
            return
        for _ in range(MESSAGES_AT_ONCE):
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            route = frames[: frames.index(b"") + 1] if b"" in frames else []
            seq = 0
            try:
                if len(frames) != len(route) + 1:
                    raise ProtocolError(f"a message of {len(frames) - len(route)} frames; one is expected")
                envelope = codec.decode(frames[-1])
                seq = envelope.seq
                self._do(Said(self._checked(envelope.body), (route, seq)))
            except Exception as raised:  # whatever is sent to it, rank 0 goes on
                if not isinstance(raised, WeightwireError):
                    logger.exception("weightwire: a message to rank 0 could not be taken")
                if route:  # else it comes from no REQ socket: there is nobody to answer
                    self._send(route, Failed(WeightwireError.wrap(raised).at(side="manager").info()), seq)

    def _checked(self, said: Body) -> Ready | Wrote:
        """Raises `ProtocolError` for a message that comes from another trainer's rank."""
        if not isinstance(said, Ready | Wrote):
            raise ProtocolError(f"rank 0 of a trainer takes no {type(said).__name__}")
        if not secrets.compare_digest(said.secret.encode(), self.secret.encode()):
            raise ProtocolError(
                "this message comes from none of this trainer's ranks", hint="ranks make a SyncManager together"
            )
        return said


def _check_group(process_group: object, together: bool) -> None:
    """Raises `ConfigError` for a group that torch.distributed doesn't know: this process would be taken for the only rank."""
    if process_group is None:
        return
    if not together:
        raise ConfigError(
            "process_group= was given, and torch.distributed is not initialised, or not any more",
            hint="make the SyncManager after dist.init_process_group, or leave process_group out where there is one process",
        )
    if not isinstance(process_group, dist.ProcessGroup) and process_group != dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"process_group={process_group!r} is a {type(process_group).__name__}",
            hint="give what dist.new_group or DeviceMesh.get_group returns",
        )


def _check_alike(members: Sequence[Member]) -> None:
    """Raises `ConfigError`, the same on every rank, where ranks met whose managers are not one. Managers meet in the order in
    which each rank makes them: those of two groups may have met crosswise, and each update would send parts of two models."""
    first = members[0]
    for member in members[1:]:
        if names := [name for name in first.alike if member.alike.get(name) != first.alike[name]]:
            differ = ", ".join(f"{name}={first.alike[name]} and {member.alike.get(name)}" for name in names)
            raise ConfigError(
                f"trainer ranks 0 and {member.rank} made this SyncManager with different settings: {differ}",
                hint="make the same managers on every rank, in the same order; that of a set differs between processes",
                side="trainer",
                rank=member.rank,
            )
