"""Limits the peers of a listening socket, so that the process keeps descriptors for itself.

libzmq accepts every connection, and aborts its process when no descriptor is left for the next one (`ipc_listener.cpp` of
libzmq 4.3.5 takes EMFILE for a bug). It has no option against that, so its listener must be kept from accepting. libzmq waits
for connections with epoll(7), and accepts one connection per event. The gate therefore makes that event a single one
(EPOLLONESHOT) and arms it again for each connection that may come in; other connections it accepts and closes itself. It
finds the descriptors in /proc/self/fdinfo, where the kernel lists them (proc_pid_fdinfo(5)).
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import logging
import os
import platform
import re
import resource
import select
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from inference_plugin.wire.errors import TransportUnavailable

__all__ = ["Gate", "check_room", "check_threads", "has_room", "no_thread"]

logger = logging.getLogger(__name__)

MAX_PEERS = 8192
"""Most peers of one listening socket, where descriptors allow that many."""
LEAST_RESERVE, MOST_RESERVE = 16, 512
"""Descriptors that are kept from peers: a quarter of the process's limit, but within these bounds."""
SOCKET_DESCRIPTORS = 16
"""Enough for a socket, its connection or its gate, and the threads of libzmq."""
FIND_TIMEOUT_MS = 5000
ACCEPT_TIMEOUT_MS = 1000
COUNT_AGAIN_S = 10.0
CONTEXT_THREADS = 2
"""Threads that libzmq starts with the first socket of a context: one for input and output, one that ends sockets."""
PROBE_S = 5.0
REFUSALS_APART_MS = 10
"""Shortest time between two refusals, since a refused peer connects again at once."""

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_EPOLL_CTL_MOD = 3
_WATCHED = re.compile(r"tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)\s+data:\s*([0-9a-f]+)")


_monitors = itertools.count()


class _EpollEvent(ctypes.Structure):
    """`struct epoll_event`, which is packed on x86-64 (epoll_ctl(2))."""

    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


class _Watched(NamedTuple):
    """A listening descriptor, the epoll descriptor that watches it, and the data of its events."""

    fd: int
    epoll: int
    data: int


class Gate:
    """Limits the peers of a bound ROUTER `socket`. It has a thread of its own from construction to `close`.

    Where the listening descriptor can't be found (without /proc), every peer is let in, and a warning says so. Raises
    `TransportUnavailable` where no thread can be started.
    """

    def __init__(self, socket_: zmq.Socket[Any], endpoint: str) -> None:
        # Here, because it imports asyncio: a command must not wait for that, and later no descriptor may be free.
        from zmq.utils.monitor import recv_monitor_message

        self._receive = recv_monitor_message
        self._socket = socket_
        self._endpoint = endpoint
        self.peers: set[int] = set()
        self._full = False
        self._count_again_s = 0.0
        self._spare: int | None = None
        self._thread: threading.Thread | None = None
        # An address of its own: that of an earlier gate's monitor is free only once libzmq has reaped that monitor.
        self._monitor = socket_.get_monitor_socket(_EVENTS, f"inproc://weightwire-gate-{next(_monitors)}")
        try:
            self._begin(endpoint)
        except BaseException as error:
            # A monitor that stays open has the end of its context wait for ever, and the garbage collector may end the context.
            socket_.disable_monitor()
            self._monitor.close(linger=0)
            self._release_spare()
            if isinstance(error, RuntimeError):
                raise no_thread(error) from error
            raise

    def _begin(self, endpoint: str) -> None:
        if (watched := self._find()) is None:
            logger.warning("weightwire: %s can't be kept from taking more peers than there are descriptors", endpoint)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            return
        self._watched = watched
        self._listening = socket.socket(fileno=os.dup(watched.fd))
        self._listening.setblocking(
            False
        )  # for libzmq too: a connection that is refused here must not block its accept
        self._open(False)
        self._spare = self._next_descriptor()
        thread = threading.Thread(target=self._run, name="weightwire-gate", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._listening.close()
            raise
        self._thread = thread

    def close(self) -> None:
        """To be called before the socket closes; may be called twice."""
        if self._thread is None:
            return
        self._socket.disable_monitor()
        self._thread.join()
        self._thread = None
        self._monitor.close(linger=0)
        self._listening.close()
        self._release_spare()

    def _find(self) -> _Watched | None:
        """Where libzmq listens; None if that can't be found out. libzmq listens on a thread of its own, which has begun once a
        first peer was accepted."""
        try:
            with _knock(self._endpoint):
                if not self._monitor.poll(FIND_TIMEOUT_MS):
                    return None
                self._take_news(0)
                return next(
                    (watched for watched in _watched() if _is_of(watched.fd, self._endpoint, listening=True)), None
                )
        except OSError as error:
            logger.info("weightwire: %s: %s", self._endpoint, error)
            return None

    # --- the gate's thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if not self._run_once():
                    return
            except Exception:  # no descriptor is free, say: no peer is let in meanwhile
                logger.exception("weightwire: an error at the gate of %s, which goes on", self._endpoint)
                if not self._take_news(100):
                    return

    def _run_once(self) -> bool:
        """Waits for a connection or for news; false: the gate is closed."""
        zmq.zmq_poll([(self._listening.fileno(), zmq.POLLIN), (self._monitor, zmq.POLLIN)], -1)
        if not self._take_news(0):
            return False
        if not zmq.zmq_poll([(self._listening.fileno(), zmq.POLLIN)], 0):
            return True
        why = self._why_full()
        if bool(why) != self._full:
            self._full = bool(why)
            logger.warning("weightwire: %s takes %s", self._endpoint, f"no more peers: {why}" if why else "peers again")
        if why:
            self._refuse()
            return self._take_news(REFUSALS_APART_MS)
        self._open(True)
        try:
            return self._take_news(ACCEPT_TIMEOUT_MS)
        finally:
            self._open(False)

    def _take_news(self, timeout_ms: int) -> bool:
        """Notes which peers came and left, and waits `timeout_ms` for the first news; false: the gate is closed."""
        while self._monitor.poll(timeout_ms):
            timeout_ms = 0
            event = self._receive(self._monitor)
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                return False
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.peers.add(event["value"])
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self.peers.discard(event["value"])
        return True

    def _open(self, opened: bool) -> None:
        """Lets libzmq accept one connection, or with `opened` false none."""
        event = _EpollEvent(select.EPOLLONESHOT | (select.EPOLLIN if opened else 0), self._watched.data)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.epoll_ctl(self._watched.epoll, _EPOLL_CTL_MOD, self._watched.fd, ctypes.byref(event)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _why_full(self) -> str:
        if len(self.peers) >= MAX_PEERS:
            if time.monotonic() >= self._count_again_s:  # in case libzmq did not report that a peer left
                self.peers = {fd for fd in self.peers if _is_of(fd, self._endpoint, listening=False)}
                self._count_again_s = time.monotonic() + COUNT_AGAIN_S
            if len(self.peers) >= MAX_PEERS:
                return f"there are {MAX_PEERS} peers"
        reserve = min(max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, LEAST_RESERVE), MOST_RESERVE)
        return _why_no_room(reserve + 1)

    def _refuse(self) -> None:
        """Accepts a connection and closes it, with the spare descriptor where no other is free."""
        try:
            self._listening.accept()[0].close()
        except BlockingIOError:
            pass  # the peer left by itself
        except OSError:
            if self._spare is None:
                raise
            self._release_spare()
            try:
                self._listening.accept()[0].close()
            finally:
                self._spare = self._next_descriptor()
        if self._spare is None:
            self._spare = self._next_descriptor()

    def _next_descriptor(self) -> int | None:
        try:
            return fcntl.fcntl(self._listening.fileno(), fcntl.F_DUPFD_CLOEXEC, 0)
        except OSError:
            return None

    def _release_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)


def check_room() -> None:
    """Raises `TransportUnavailable` where too few descriptors are free for a socket: libzmq would abort the process."""
    if why := _why_no_room(SOCKET_DESCRIPTORS):
        raise TransportUnavailable(
            f"there are too few file descriptors for a socket: {why}",
            hint="raise the limit of open files (ulimit -n)",
            phase="start",
        )


def has_room(count: int) -> bool:
    """Whether `count` descriptors are free."""
    return not _why_no_room(count)


def check_threads() -> None:
    """Raises `TransportUnavailable` where this process can't start the threads of a libzmq context: libzmq would abort it. To be
    called before the first socket of a context is made."""
    stop = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(CONTEXT_THREADS):
            thread = threading.Thread(target=stop.wait, args=(PROBE_S,), name="weightwire-probe", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise no_thread(error) from error
    finally:
        stop.set()
        for thread in started:
            thread.join(PROBE_S)


def no_thread(error: RuntimeError, what: str = "a socket") -> TransportUnavailable:
    """The error for something that needs a thread, which can't be started."""
    hint = "raise the limit of processes or of memory (ulimit -u, ulimit -v, or the control group's pids.max)"
    if "interpreter shutdown" in str(error):  # CPython's word for it; sys.is_finalizing() says so only later
        hint = "the program ends: do this at the end of the program's own code, not in a function that `atexit` calls"
    return TransportUnavailable(f"no thread can be started for {what}: {error}", hint=hint, phase="start")


def _why_no_room(count: int) -> str:
    """Why there are not `count` free descriptors; "" if there are. A new one gets the lowest free number, which tells how many
    are in use."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        lowest = os.eventfd(0, os.EFD_CLOEXEC)
    except OSError as error:
        return str(error)
    os.close(lowest)
    if soft != resource.RLIM_INFINITY and lowest + count > soft:
        return f"{soft - lowest} of {soft} descriptors are free"
    return ""


def _knock(endpoint: str) -> socket.socket:
    """A connection to `endpoint`. Raises OSError."""
    if endpoint.startswith("ipc://"):
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(FIND_TIMEOUT_MS / 1000)
        try:
            one.connect(endpoint.removeprefix("ipc://"))
        except OSError:
            one.close()
            raise
        return one
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=FIND_TIMEOUT_MS / 1000)


def _watched() -> list[_Watched]:
    """Every descriptor of this process whose input an epoll descriptor waits for."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            if str(path.readlink()) != "anon_inode:[eventpoll]":
                continue
            for fd, events, data in _WATCHED.findall(Path(f"/proc/self/fdinfo/{path.name}").read_text()):
                if int(events, 16) & select.EPOLLIN:
                    found.append(_Watched(int(fd), int(path.name), int(data, 16)))
        except FileNotFoundError:
            continue  # it was closed meanwhile
    return found


def _is_of(fd: int, endpoint: str, *, listening: bool) -> bool:
    """Whether `fd` listens at `endpoint`, or with `listening` false is a peer's connection there."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        with socket.socket(fileno=os.dup(fd)) as one:
            if bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) != listening:
                return False
            name = one.getsockname()
    except OSError:
        return False  # closed meanwhile
    if isinstance(name, tuple):
        return f"tcp://[{name[0]}]:{name[1]}" == endpoint or f"tcp://{name[0]}:{name[1]}" == endpoint
    return f"ipc://{os.fsdecode(name)}" == endpoint
