"""The trainer's ranks among themselves: ZMQ to the manager rank, so that no deadline passes inside a collective.

`torch.distributed` is used once, at construction, to tell every rank where the manager rank listens. From then on each
rank asks rank 0 (`Ready` -> `Go`, `Wrote` -> `Outcome`), and rank 0 answers when it has heard all. A rank's death is
noticed at once by its pidfd, on one host; a silent one by the deadline.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
import zmq

from inference_plugin.wire import codec
from inference_plugin.wire.addresses import boot_id, runtime_dir
from inference_plugin.wire.channel import Channel, open_pidfd
from inference_plugin.wire.errors import PeerLost, ProtocolError, SyncTimeout, WeightwireError
from inference_plugin.wire.listening import Listener, listens_on
from inference_plugin.wire.messages import Body, Failed, Go, Outcome, Ready, Wrote

__all__ = ["Crew", "Member"]

MEMBER_BYTES = 512
"""A member's record is padded to this, so that one collective carries all of them."""

Message = TypeVar("Message", Ready, Wrote)


class Member(msgspec.Struct, frozen=True):
    """One trainer rank: its process, and on rank 0 the address that the others ask."""

    rank: int
    pid: int
    boot_id: str
    address: str


class Crew:
    """This rank's end. Collective over `process_group` (the default group if None; without torch.distributed, or where
    `alone` says so, this rank is all there is).

    After construction it belongs to one thread.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        silence_s: float | None = None,
        *,
        alone: bool = False,
    ) -> None:
        together = not alone and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(process_group) if together else 0
        self.size = dist.get_world_size(process_group) if together else 1
        self._router: zmq.Socket[bytes] | None = None
        self._socket_path: Path | None = None
        self._to_manager: Channel | None = None
        self._routes: dict[int, list[bytes]] = {}
        self._seqs: dict[int, int] = {}
        self._pidfds: dict[int, int | None] = {}
        address = ""
        self._listener: Listener | None = None
        if self.rank == 0 and self.size > 1:
            listen = listens_on()
            if listen == "ipc":
                self._socket_path = runtime_dir() / f"crew-{os.getpid()}-{secrets.token_hex(4)}"
                listen = f"ipc://{self._socket_path}"
            self._listener = Listener(zmq.ROUTER, listen, max_bytes=codec.MAX_CONTROL_BYTES)
            self._router, address = self._listener.socket, self._listener.address
        me = Member(self.rank, os.getpid(), boot_id(), address)
        self.members = _exchange(me, process_group) if self.size > 1 else [me]
        if self.rank == 0:
            for member in self.members[1:]:
                if member.boot_id == boot_id():
                    self._pidfds[member.rank] = open_pidfd(member.pid)
        else:
            manager = self.members[0]
            self._to_manager = Channel(
                manager.address,
                pid=manager.pid,
                peer_boot_id=manager.boot_id,
                resends=False,  # the answer to a request that was sent again since would be lost
                silence_s=silence_s,
                side="manager",
                rank=0,
            )

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks share this host's memory."""
        return all(member.boot_id == boot_id() for member in self.members)

    # --- ranks above 0 -----------------------------------------------------------------------------------------------

    def ask_go(self, ready: Ready, *, timeout_s: float) -> Go:
        """Reports for an operation and waits for the manager's word. Raises its error, or `PeerLost`, `SyncTimeout`."""
        assert self._to_manager is not None
        return self._to_manager.request(ready, Go, timeout_s=timeout_s)

    def ask_outcome(self, wrote: Wrote, *, timeout_s: float) -> bytes:
        """Reports what was written and waits for the end of the operation. Raises as `ask_go` does."""
        assert self._to_manager is not None
        return self._to_manager.request(wrote, Outcome, timeout_s=timeout_s).report

    # --- rank 0 ------------------------------------------------------------------------------------------------------

    def gather(
        self,
        kind: type[Message],
        accepts: Callable[[Message], bool],
        *,
        deadline_s: float,
        tick: Callable[[], None],
        tick_every_s: float,
    ) -> list[Message]:
        """One message of `kind` from every other rank, in order of rank. Leftovers of an earlier operation, which
        `accepts` refuses, are answered with an error at once, so that their ranks come on to this one.

        Calls `tick` at least every `tick_every_s`. Raises the first error that a rank reported, `PeerLost` for a rank
        whose process ended, `SyncTimeout` at `deadline_s` naming the ranks that are silent.
        """
        heard: dict[int, Message] = {}
        while len(heard) < self.size - 1:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                silent = [rank for rank in range(1, self.size) if rank not in heard]
                raise SyncTimeout(f"trainer ranks {silent} were not heard of in time", side="trainer", rank=silent[0])
            if gone := self._wait(min(left_s, tick_every_s), set(heard)):
                raise PeerLost(f"trainer rank {gone[0]}'s process ended", side="trainer", rank=gone[0])
            tick()
            while (received := self._receive()) is not None:
                if isinstance(received, kind) and accepts(received):
                    heard[received.rank] = received
                    if received.error is not None:
                        raise WeightwireError.of(received.error).at(side="trainer", rank=received.rank)
                else:
                    self._tell(received.rank, Failed(SyncTimeout("rank 0 has given this operation up").info()))
        return [heard[rank] for rank in sorted(heard)]

    def tell_all(self, body: Body) -> None:
        """Answers every rank that waits."""
        for rank in list(self._routes):
            self._tell(rank, body)

    def fail_all(self, error: WeightwireError, *, deadline_s: float) -> None:
        """Answers every other rank with `error`: those that wait now, those that write as soon as they come back.

        Ranks whose process ended are not waited for; at `deadline_s` nobody is.
        """
        told: set[int] = set()
        while True:
            while self.size > 1 and self._receive() is not None:
                pass
            told |= set(self._routes)
            self.tell_all(Failed(error.info()))
            left_s = deadline_s - time.monotonic()
            if len(told) >= self.size - 1 or left_s <= 0:
                return
            told |= set(self._wait(left_s, told))

    def close(self) -> None:
        """Closes sockets; may be called twice."""
        if self._to_manager is not None:
            self._to_manager.close()
        if self._listener is not None:
            self._listener.close(linger_ms=1000)
            self._listener = None
            if self._socket_path is not None:
                self._socket_path.unlink(missing_ok=True)
        for pidfd in self._pidfds.values():
            if pidfd is not None:
                os.close(pidfd)
        self._pidfds.clear()

    def _tell(self, rank: int, body: Body) -> None:
        assert self._router is not None
        self._router.send_multipart([*self._routes.pop(rank), codec.encode(body, self._seqs[rank])])

    def _wait(self, timeout_s: float, heard: set[int]) -> list[int]:
        """Waits for a message, or for the death of a rank that isn't in `heard`; returns such ranks."""
        missing = {rank: fd for rank, fd in self._pidfds.items() if rank not in heard}
        watched: list[tuple[Any, int]] = [(self._router, zmq.POLLIN)]
        watched += [(fd, zmq.POLLIN) for fd in missing.values() if fd is not None]
        gone = [rank for rank, fd in missing.items() if fd is None]
        ready = [source for source, _ in zmq.zmq_poll(watched, 0 if gone else int(timeout_s * 1000) + 1)]
        if self._router in ready:
            return []  # what it said before it died counts
        return gone + [rank for rank, fd in missing.items() if fd is not None and fd in ready]

    def _receive(self) -> Ready | Wrote | None:
        """The next message that waits; its sender is from now on waiting for an answer."""
        assert self._router is not None
        try:
            frames = self._router.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        cut = frames.index(b"") + 1 if b"" in frames else len(frames)
        try:
            envelope = codec.decode(frames[cut]) if cut < len(frames) else None
        except ProtocolError:
            envelope = None
        if envelope is None or not isinstance(envelope.body, (Ready, Wrote)):
            return self._receive()
        self._routes[envelope.body.rank] = frames[:cut]
        self._seqs[envelope.body.rank] = envelope.seq
        return envelope.body


def _exchange(me: Member, process_group: dist.ProcessGroup | None) -> list[Member]:
    """Every rank's record, by one all_gather of fixed-size bytes (no pickle)."""
    record = msgspec.msgpack.encode(me)
    if len(record) > MEMBER_BYTES - 4:
        raise ProtocolError(f"a member's record of {len(record)} bytes is over the limit of {MEMBER_BYTES - 4}")
    device = "cuda" if dist.get_backend(process_group) == "nccl" else "cpu"
    padded = len(record).to_bytes(4, "little") + record.ljust(MEMBER_BYTES - 4, b"\0")
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(all_of_them, mine, group=process_group)
    members = []
    for record_tensor in all_of_them:
        raw = record_tensor.cpu().numpy().tobytes()
        members.append(codec.decode_as(raw[4 : 4 + int.from_bytes(raw[:4], "little")], Member))
    return members
