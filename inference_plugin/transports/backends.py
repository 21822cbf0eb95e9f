"""Backends of `torch.distributed`: which backend moves a device's memory, and private process groups of it.

A group stands beside the trainer's and the engine's own groups: neither knows it, and ending it ends none of theirs.
Callers give and get CPU memory, in which updates are packed, checked and staged; a backend that moves device memory gets
a copy on this process's device.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.devices import device_of, in_use
from inference_plugin.net.processes import has_ended, start_ticks
from inference_plugin.transports.topology import SENDER
from inference_plugin.wire.config import variable_of
from inference_plugin.wire.errors import PeerLost, SyncTimeout, TransportUnavailable

__all__ = [
    "BACKENDS",
    "Backend",
    "Group",
    "backend_for",
    "backend_named",
    "chosen_backend",
]

VARIABLE = variable_of("collective_backend")
CHECK_S = 0.1
"""Longest time until a waiting thread notices a deadline, a dead peer or `abort`."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0001, 0.005
"""Between two looks at work on a device. What has come at once is seen at once; who waits long does not keep a core busy."""


@dataclass(frozen=True)
class Backend:
    """How to make a group of one backend.

    `queues`: its calls queue work on a device, and connect in the first call; neither ends by a deadline of its own.
    `without_watchdog`: a variable, and the value with which groups that are made meanwhile have no watchdog. A watchdog ends the
    whole process when a peer is lost; here the caller's deadline ends the group.
    """

    name: str
    device: str
    module: str
    group_class: str
    needs: str
    queues: bool = False
    without_watchdog: tuple[str, str] | None = None

    def why_not(self) -> str | None:
        """The reason why this process can't use it; None if it can."""
        try:
            found = hasattr(importlib.import_module(self.module), self.group_class)
        except ImportError:
            found = False
        if not found:
            return f"{self.name} needs {self.needs}"
        if self.device != "cpu" and not _module(self.device).is_available():
            return f"{self.name} moves {self.device} memory, and this process sees no {self.device} device"
        return None


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("gloo", "cpu", "torch.distributed", "ProcessGroupGloo", "a torch that is built with it"),
        Backend(
            "nccl",
            "cuda",
            "torch.distributed",
            "ProcessGroupNCCL",
            "a torch that is built with it",
            True,
            # Not TORCH_NCCL_ASYNC_ERROR_HANDLING=0: such a watchdog still has the monitor of the process's first group, often the
            # trainer's or the engine's, end the process, eight minutes after a broadcast that failed or took too long.
            ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ),
        Backend(
            "hccl",
            "npu",
            "torch_npu._C._distributed_c10d",
            "ProcessGroupHCCL",
            "torch_npu",
            True,
            ("HCCL_ASYNC_ERROR_HANDLING", "0"),
        ),
    )
}
"""The device table: each backend with the device whose memory it moves."""


def backend_named(name: str) -> Backend:
    """The backend of that name. Raises `TransportUnavailable`, listing the known ones, if it is unknown or can't work here."""
    backend = BACKENDS.get(name)
    why = "unknown" if backend is None else backend.why_not()
    if backend is None or why is not None:
        usable = ", ".join(known for known, one in BACKENDS.items() if one.why_not() is None) or "none"
        raise TransportUnavailable(
            f"collective: backend {name!r} can't be used here: {why}",
            hint=f"{VARIABLE} in the trainer names another one; usable here: {usable}, known: {', '.join(BACKENDS)}",
        )
    return backend


def backend_for(device: str) -> str:
    """The name of the backend for a type of device. Raises `TransportUnavailable`, listing known backends and the fallback."""
    for backend in BACKENDS.values():
        if backend.device == device:
            return backend.name
    known = ", ".join(f"{backend.device} ({backend.name})" for backend in BACKENDS.values())
    raise TransportUnavailable(
        f"collective: no backend is known for device {device!r}; known: {known}",
        hint=f"{VARIABLE}=gloo goes through CPU memory, whatever the device",
    )


def chosen_backend(named: str | None) -> str:
    """The backend that the user named; else the one for the device that this process computes on."""
    return named or backend_for(in_use().type)


def _module(device: str) -> Any:
    return torch.get_device_module(device)


class Group:
    """One process's end of a group. Making it waits for all ranks, which meet in the store that `meet` gives.

    `peers`: processes of this host, named by pid. `interface`: where gloo listens; loopback if None. Every wait ends at
    `deadline_s` of `time.monotonic()`, when one of `peers` ends, and after `abort`. Raises `SyncTimeout`, `PeerLost`, and what
    torch raises. For one thread; `abort` is for any.
    """

    def __init__(
        self,
        backend: Backend,
        meet: Callable[[timedelta], Any],
        rank: int,
        size: int,
        *,
        peers: Mapping[int, str],
        deadline_s: float,
        interface: str | None = None,
    ) -> None:
        self._backend, self._rank, self._deadline_s = backend, rank, deadline_s
        self._peers = {(pid, start_ticks(pid)): name for pid, name in peers.items()}
        self._interface = interface or "lo"
        self._aborted = False
        self.pending: list[Any] = []
        device = device_of(torch.device(backend.device))
        self._device, queue = torch.device(backend.device, device.current() or 0), device.current_queue()
        limit = timedelta(seconds=max(0.001, deadline_s - time.monotonic()))

        def make() -> None:
            store = meet(limit)
            store.set_timeout(limit)
            if self._backend.queues:
                device.enter(queue)
                store.set(f"here/{rank}", "")
                store.wait([f"here/{other}" for other in range(size)], limit)
            self._group = self._make(store, size, limit)
            if self._backend.queues:  # they connect at the first broadcast, in a call without a time limit
                self.broadcast(torch.zeros(1, dtype=torch.uint8))()

        try:
            self._within(make)
        except BaseException:
            self.abort()  # a first broadcast would run on the device for good, and whoever drains it would wait
            raise

    def _make(self, store: Any, size: int, limit: timedelta) -> Any:
        kind = getattr(importlib.import_module(self._backend.module), self._backend.group_class)
        if self._backend.name == "gloo":
            options = kind._Options()
            options._devices = [kind.create_device(interface=self._interface)]
        else:
            options = kind.Options()
        options._timeout = limit
        with _without_watchdog(self._backend.without_watchdog):
            return kind(store, self._rank, size, options)

    def broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Starts to broadcast the sender's bytes, in CPU memory; returns a function that waits for the end."""
        carried = tensor
        if self._backend.queues:
            carried = tensor.to(self._device) if self._rank == SENDER else torch.empty_like(tensor, device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        work = self._group.broadcast([carried], options)
        self.pending = [*(one for one in self.pending if not one.is_completed()), work]
        if self._aborted:  # by a thread that saw nothing under way yet
            self.abort()

        def wait() -> None:
            self._wait(work)
            if carried is not tensor and self._rank != SENDER:
                tensor.copy_(carried)

        return wait

    def _wait(self, work: Any) -> None:
        if self._backend.queues:
            self._within(lambda: _until_done(work))
            if self._aborted:  # which ends work as if it were done
                self._check()
            return
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        while not done.wait(CHECK_S):
            self._check()
        work.wait()

    def _check(self) -> None:
        """Raises if there is nothing left to wait for."""
        if self._aborted:
            raise PeerLost("the transaction was dropped", phase="stage")
        if gone := [name for process, name in self._peers.items() if has_ended(*process)]:
            raise PeerLost(
                f"collective: {gone[0]} ended", hint="the next update makes groups without it", phase="stage"
            )
        if time.monotonic() > self._deadline_s:
            raise SyncTimeout("collective: the ranks of a group did not come together in time", phase="stage")

    def _within(self, call: Callable[[], None]) -> None:
        """Makes a call that can't be interrupted, in a thread that is abandoned once waiting is pointless."""
        failed: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 -- raised by the caller
                failed.append(error)

        thread = threading.Thread(target=run, name="weightwire-collective-call", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(CHECK_S)
            if thread.is_alive():
                self._check()
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Ends the group on this side, after the last broadcast."""
        if self._backend.queues:
            with contextlib.suppress(Exception):
                self._within(self._group.shutdown)

    def abort(self) -> None:
        """Makes every wait of this group end soon. Any thread may call it, also twice."""
        self._aborted = True
        if self._backend.queues or self.pending:
            threading.Thread(target=self._bury, name="weightwire-collective-rest", daemon=True).start()

    def _bury(self) -> None:
        """Ends work on the device's queue, which may block, and keeps the group until its pending work has ended by its time
        limit: gloo's destructor waits for that work with the interpreter's lock held, which would stop engine and trainer."""
        if self._backend.queues:
            with contextlib.suppress(Exception):
                self._group.abort()
        for work in self.pending:
            with contextlib.suppress(Exception):  # the waiting call has raised this error
                if self._backend.queues:
                    _until_done(work)
                else:
                    work.get_future().wait()


_never = threading.Event()
"""Never set. Of the end of work on a device torch tells only who asks."""


def _until_done(work: Any) -> None:
    """Waits for work that a backend queued on the device, and raises its error.

    The work's own `wait` and future only make a stream wait, and torch gives its 32 streams out in turn: sooner or later that
    stream would be one in which an engine or a trainer computes, and it would stand until the next broadcast. NCCL's work answers
    no `is_success`.
    """
    pause_s = SHORTEST_PAUSE_S
    while not work.is_completed():
        _never.wait(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    work.wait()


class _WithoutWatchdog:
    """Turns watchdogs off while a group is made, by the variable that a library reads meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._making: dict[str, int] = {}
        self._before: dict[str, str | None] = {}

    @contextlib.contextmanager
    def __call__(self, setting: tuple[str, str] | None) -> Iterator[None]:
        if setting is None:
            yield
            return
        variable, value = setting
        with self._lock:
            if not self._making.setdefault(variable, 0):
                self._before[variable] = os.environ.get(variable)
                os.environ[variable] = value
            self._making[variable] += 1
        try:
            yield
        finally:
            with self._lock:
                self._making[variable] -= 1
                if not self._making[variable]:
                    os.environ.pop(variable)
                    if (before := self._before.pop(variable)) is not None:
                        os.environ[variable] = before


_without_watchdog = _WithoutWatchdog()
