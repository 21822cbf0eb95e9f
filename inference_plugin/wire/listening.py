"""A server's socket: bound before its address is told to anybody, limited in what it takes, and safe to reach."""

from __future__ import annotations

import ipaddress
import os

import zmq

from inference_plugin.wire.curve import VARIABLE, Guard, job_key
from inference_plugin.wire.errors import AuthError

__all__ = ["Listener", "check_listen_address", "listens_on"]


def listens_on() -> str:
    """`WEIGHTWIRE_LISTEN`: "ipc", or the `tcp://` address that this process is to listen on."""
    return os.environ.get("WEIGHTWIRE_LISTEN") or "ipc"


class Listener:
    """A bound socket of `kind` in a context of its own. `address` is where others connect.

    `listen` is `ipc://PATH`, or `tcp://HOST:PORT` with an address of this host or an interface's name; port `*` takes a free
    one. Raises `AuthError` for a TCP address that other hosts could reach without a key, or that says nothing to them, and
    for one that can't be bound.
    """

    def __init__(self, kind: int, listen: str, *, max_bytes: int) -> None:
        check_listen_address(listen)
        self.context = zmq.Context()
        self._guard: Guard | None = None
        self.socket = self.context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        try:
            if listen.startswith("tcp://"):
                self.socket.setsockopt(zmq.IPV6, 1 if listen.startswith("tcp://[") else 0)
                if (key := job_key()) is not None:
                    self._guard = Guard(self.context, key)
                    self._guard.protect(self.socket)
            self.socket.bind(listen)
        except zmq.ZMQError as error:
            self.close()
            raise AuthError(
                f"{listen}: {error.strerror or error}",
                hint="an address of this host and a free port, in WEIGHTWIRE_LISTEN or WEIGHTWIRE_REGISTRY",
                phase="start",
            ) from error
        except AuthError:
            self.close()
            raise
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket, and the context once sockets that others made in it are closed. Messages under way have
        `linger_ms` to leave."""
        self.socket.close(linger=linger_ms)
        if self._guard is not None:
            self._guard.close()
        self.context.term()


def check_listen_address(address: str) -> None:
    """Raises `AuthError` for an address that others could reach without authentication, or couldn't find."""
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if scheme == "ipc" or (scheme == "tcp" and _is("loopback", host)):
        return
    if job_key() is None:
        raise AuthError(
            f"{address} can be reached from outside this host without authentication",
            hint="listen on ipc://, tcp://127.0.0.1:* or tcp://[::1]:*; for other hosts set "
            f"{VARIABLE} to a file of `weightwire keygen`",
            phase="start",
        )
    if scheme != "tcp" or not host or host == "*" or _is("unspecified", host):
        raise AuthError(
            f"{address} doesn't say where others find it",
            hint="name the address, or the interface, that other hosts reach: tcp://10.0.0.5:*, tcp://eth0:*",
            phase="start",
        )


def _is(kind: str, host: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(host), f"is_{kind}"))
    except ValueError:  # a name, or "*"
        return False
