"""A server's socket: bound before its address is published, limited in peers and sizes, and closed to other hosts without
a key."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import math
import os
import re
import socket
import stat
import time
from pathlib import Path

import zmq

from inference_plugin.net.curve import VARIABLE, Guard, job_key
from inference_plugin.net.gate import Gate, check_room, check_threads
from inference_plugin.wire.errors import ArgumentError, AuthError, ConfigError, TransportUnavailable

__all__ = [
    "MEND_EVERY_S", "Listener", "check_listen_address", "is_abandoned", "lacks_room", "listens_on", "make_private",
    "remove_socket",
]  # fmt: skip

logger = logging.getLogger(__name__)

MEND_EVERY_S = 2.0
"""How often a process checks that its files in the runtime directory still exist."""

PROBE_S = 1.0
"""Longest wait for a socket that another process may serve."""


ADDRESS_VARIABLES = ("WEIGHTWIRE_LISTEN", "WEIGHTWIRE_REGISTRY")
"""Where users give addresses to listen on."""


def listens_on() -> str:
    """`WEIGHTWIRE_LISTEN`: "ipc", or the `tcp://` address that this process is to listen on."""
    return os.environ.get("WEIGHTWIRE_LISTEN") or "ipc"


class Listener:
    """A bound socket of `kind` in a context of its own. `address` is where others connect.

    `listen` is `ipc://PATH`, or `tcp://HOST:PORT` with an address of this host or an interface's name; port `*` takes a free
    one. Raises `AuthError` for a TCP address that other hosts could reach without a key, or that does not tell them where to
    connect; for a TCP address that can't be bound; for the path of a living socket or of any other file. Raises
    `ConfigError` where no socket can be made in the directory, `TransportUnavailable` where too few descriptors are free, or no
    thread can be started.

    With `waits_for_room`, an `ipc://` socket for which the directory has no room is bound by `mend`, as soon as there is room.

    Peers are let in while the process has descriptors to spare; others are refused (`net.gate`).
    """

    def __init__(self, kind: int, listen: str, *, max_bytes: int, waits_for_room: bool = False) -> None:
        check_listen_address(listen)
        check_room()
        check_threads()
        self.context = zmq.Context()
        self._guard: Guard | None = None
        self.gate: Gate | None = None
        self._path = Path(listen.removeprefix("ipc://")) if listen.startswith("ipc://") else None
        self._missing = "was removed while in use"
        self._unmended = ""
        self.socket = self.context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        try:
            if listen.startswith("tcp://"):
                self.socket.setsockopt(zmq.IPV6, 1 if listen.startswith("tcp://[") else 0)
                if (key := job_key()) is not None:
                    self._guard = Guard(self.context, key)
                    self._guard.protect(self.socket)
            if self._path is not None:
                check_unused(self._path)
            self._bind_first(listen, waits_for_room)
        except zmq.ZMQError as error:
            self.close()
            raise _unbound(listen, error) from error
        except BaseException:
            self.close()
            raise
        self.mend_at_s = math.inf if self._path is None else time.monotonic() + MEND_EVERY_S
        """When to call `mend` again, on `time.monotonic()`'s clock."""

    def _bind_first(self, listen: str, waits_for_room: bool) -> None:
        self.address: str = listen
        try:
            if self._path is not None and not self._path.parent.exists():
                self._make_directory()
            self.socket.bind(listen)
        except (ConfigError, zmq.ZMQError) as error:
            if self._path is None or (isinstance(error, ConfigError) and not lacks_room(error)):
                raise
            room = "make room there, or " if lacks_room(error) else ""
            no_room = ConfigError(
                f"no socket can be made at {listen}: {getattr(error.__cause__ or error, 'strerror', error)}",
                hint=f"{room}set WEIGHTWIRE_RUNTIME_DIR to another directory",
                phase="start",
            )
            if not (waits_for_room and room):
                raise no_room from error
            logger.warning("weightwire: nobody reaches this process before there is room for its socket: %s", no_room)
            self._missing, self._unmended = "could not be made at first", str(error)
            return
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        try:
            self.gate = Gate(self.socket, self.address)
        except BaseException:
            if self._path is not None:
                remove_socket(self._path)
            raise

    def mend(self) -> bool:
        """Binds an `ipc://` socket again if its file was removed, and makes the runtime directory again if that was. Binds a
        socket that has waited for room.

        Call it on the socket's own thread, as often as you like: it checks every `MEND_EVERY_S`. Returns whether it bound the
        socket again. Connected peers stay connected. A failure is logged once and tried again.
        """
        if self._path is None or time.monotonic() < self.mend_at_s:
            return False
        self.mend_at_s = time.monotonic() + MEND_EVERY_S
        try:
            if not self._path.exists():
                self._make_directory()
                # The old binding stays: unbinding it would remove the new file, at some later time.
                self.socket.bind(self.address)
                if self.gate is not None:
                    self.gate.close()  # no peer can reach the old binding any more
                    self.gate = None
            elif self.gate is not None:
                return False
            self.gate = Gate(self.socket, self.address)
        except (OSError, AuthError, ConfigError, TransportUnavailable, zmq.ZMQError) as error:
            if self._unmended != str(error):
                logger.warning("weightwire: %s %s, and can't be made now: %s", self._path, self._missing, error)
            self._unmended = str(error)
            return False
        logger.warning("weightwire: %s %s; it is there now", self._path, self._missing)
        self._missing = "was removed while in use"
        self._unmended = ""
        return True

    def _make_directory(self) -> None:
        assert self._path is not None
        make_private(self._path.parent.parent, of_root_too=True)
        make_private(self._path.parent)

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket and its context. Messages that are still to be sent have `linger_ms` to leave."""
        if self.gate is not None:
            self.gate.close()
        self.socket.close(linger=linger_ms)
        if self._guard is not None:
            self._guard.close()
        self.context.term()


def lacks_room(error: BaseException) -> bool:
    """Whether something could not be made because a file system is full or read-only, or the user's quota is used up."""
    reason = error.__cause__ if isinstance(error, ConfigError) else error
    return isinstance(reason, OSError | zmq.ZMQError) and reason.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def check_unused(path: Path) -> None:
    """Raises `AuthError` for a path where a socket is served, or where something else than a socket lies: libzmq would take the
    path over. The socket of a process that has ended may be replaced."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return
    # Asked twice: a process that has just been killed lets the first connection in before its socket is closed.
    if is_socket and not (_is_served(path) and _is_served(path)):
        return
    raise AuthError(
        f"ipc://{path}: {'another process, or this one, listens there' if is_socket else 'a file that is no socket is there'}",
        hint="give each server an address of its own, or close the one that has this address first",
        phase="start",
    )


def remove_socket(path: Path) -> None:
    """Removes the file of a socket that was closed or could not be made. Never raises: the next reader of the directory removes
    what stays."""
    with contextlib.suppress(OSError):
        path.unlink()


def is_abandoned(path: Path) -> bool:
    """Whether a socket lies there at which no process listens, of whatever pid namespace. False for a path that leads nowhere,
    which another mount namespace may have elsewhere, and for a process that is stopped or busy."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            return probe.connect_ex(str(path)) == errno.ECONNREFUSED
        except OSError:  # no path of a socket
            return False


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
            probe.recv(1)  # libzmq greets whoever connects; the connection ends where the process does
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # too busy to answer, or not ours: it lives
            pass
        return True


def make_private(directory: Path, *, of_root_too: bool = False) -> None:
    """Makes a directory with mode 0700 if it does not exist. Raises `AuthError` if another user owns it (root may, with
    `of_root_too`) or a link to it (root may), and `ConfigError` if it can't be made."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner, link_owner = directory.stat().st_uid, directory.lstat().st_uid
    except OSError as error:
        room = "make room there, or " if lacks_room(error) else ""
        raise ConfigError(
            f"{directory} can't be made: {error.strerror or error}",
            hint=f"{room}set WEIGHTWIRE_RUNTIME_DIR to a directory that can be written to",
            phase="start",
        ) from error
    mine = os.getuid()
    others = {owner} - {mine, 0 if of_root_too else mine}
    others |= {link_owner} - {mine, 0}  # whoever owns a link may point it elsewhere later
    if others:
        raise AuthError(
            f"{directory} belongs to user {min(others)}, not to {mine}",
            hint="set WEIGHTWIRE_RUNTIME_DIR to a directory of your own",
            phase="start",
        )


def check_own_address() -> None:
    """Raises `AuthError` if this process may not listen where `WEIGHTWIRE_LISTEN` says, or if this host has no such address. A
    port that is in use is no error: an engine that runs may have it."""
    if (address := listens_on()) == "ipc":
        return
    check_listen_address(address)
    if address.startswith("tcp://"):
        host = address.rpartition(":")[0]
        with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
            probe.setsockopt(zmq.IPV6, int(host.startswith("tcp://[")))
            try:
                probe.bind(f"{host}:*")
            except zmq.ZMQError as error:
                raise _unbound(address, error) from error


def check_listen_address(address: str) -> None:
    """Raises `AuthError` for text that is no address, for an address that other hosts could reach without a key, or that does
    not tell them where to connect, `ArgumentError` for what is no text."""
    if not isinstance(address, str):
        raise ArgumentError(
            f"the address {address!r:.300} is a {type(address).__name__}", hint="such as 'tcp://127.0.0.1:*'"
        )
    if address.startswith("ipc://"):
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not (address.startswith("tcp://") and host and _is_port(port)):
        raise AuthError(
            f"{_given_as(address)}{address} is no address to listen on",
            hint="tcp://HOST:PORT with a port up to 65535, or * for a free one: tcp://127.0.0.1:*, tcp://eth0:*",
            phase="start",
        )
    host = host.removeprefix("[").removesuffix("]")
    if _is("loopback", host):
        return
    if job_key() is None:
        raise AuthError(
            f"{_given_as(address)}{address} can be reached from outside this host without authentication",
            hint="listen on ipc://, tcp://127.0.0.1:* or tcp://[::1]:*; for other hosts set "
            f"{VARIABLE} to a file of `weightwire keygen`",
            phase="start",
        )
    if host == "*" or _is("unspecified", host):
        raise AuthError(
            f"{_given_as(address)}{address} doesn't say where others find it",
            hint="name the address, or the interface, that other hosts reach: tcp://10.0.0.5:*, tcp://eth0:*",
            phase="start",
        )


def _is_port(text: str) -> bool:
    """libzmq takes a larger port modulo 65536."""
    return text == "*" or (re.fullmatch(r"[0-9]{1,5}", text) is not None and int(text) < 1 << 16)


def _unbound(listen: str, error: zmq.ZMQError) -> AuthError:
    return AuthError(
        f"{_given_as(listen)}{listen}: {zmq.strerror(error.errno or errno.EINVAL)}",
        hint="an address of this host and a free port, in WEIGHTWIRE_LISTEN or WEIGHTWIRE_REGISTRY",
        phase="start",
    )


def _given_as(address: str) -> str:
    """The variable that holds this address, for an error's text; "" if none does."""
    return next((f"{name}=" for name in ADDRESS_VARIABLES if os.environ.get(name) == address), "")


def _is(kind: str, host: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(host), f"is_{kind}"))
    except ValueError:  # a name, or "*"
        return False
