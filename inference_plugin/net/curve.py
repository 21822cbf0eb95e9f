"""Keys for sockets that other hosts can reach: CURVE (https://rfc.zeromq.org/spec/26), as libzmq does it.

All members of a job hold one key pair, in a file that `weightwire keygen` makes and that `WEIGHTWIRE_KEY` names. With a key,
every TCP socket is encrypted, servers accept only clients that hold the key, and clients only such servers. Without a key,
TCP stays on this host.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from inference_plugin.wire.errors import AuthError

__all__ = ["VARIABLE", "JobKey", "Guard", "job_key", "make_key", "secure_client"]

VARIABLE = "WEIGHTWIRE_KEY"

HEADER = "weightwire key 1"


@dataclass(frozen=True)
class JobKey:
    """A CURVE key pair, in Z85."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"JobKey({self.public.decode()})"


def make_key(path: Path) -> JobKey:
    """Makes a key pair and writes it to a new file of mode 0600. Raises FileExistsError."""
    key = JobKey(*zmq.curve_keypair())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{HEADER}\n{key.public.decode()}\n{key.secret.decode()}\n")
    return key


def job_key() -> JobKey | None:
    """The key in the file that `WEIGHTWIRE_KEY` names; None if the variable is unset. Raises `AuthError` for a file that is
    missing, damaged, or readable by others."""
    if not (name := os.environ.get(VARIABLE)):
        return None
    path = Path(name)
    try:
        status = path.stat()
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(f"{path} can't be read: {error}") from None
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise _bad(
            f"{path} can be read by others", f"chmod 600 {path}; if it was copied about like this, make a new one"
        )
    if len(lines) != 4 or lines[0] != HEADER or [len(line) for line in lines[1:]] != [40, 40, 0]:
        raise _bad(f"{path} holds no key")
    key = JobKey(lines[1].encode(), lines[2].encode())
    try:
        matching = zmq.curve_public(key.secret) == key.public
    except (zmq.ZMQError, ValueError):
        matching = False
    if not matching:
        raise _bad(f"{path} is damaged: its two keys don't belong together")
    return key


def secure_client(socket: zmq.Socket[Any]) -> None:
    """To be called before a client's TCP socket connects."""
    if (key := job_key()) is not None:
        socket.curve_publickey, socket.curve_secretkey = key.public, key.secret
        socket.curve_serverkey = key.public


class Guard:
    """Lets only clients with the job's key connect to the servers of one context. It has a thread of its own."""

    def __init__(self, context: zmq.Context[Any], key: JobKey) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # imports asyncio, which commands need not wait for

        self._key = key
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """For libzmq's authentication protocol (https://rfc.zeromq.org/spec/27): whether a client's key, in Z85, is accepted."""
        return key == self._key.public

    def protect(self, socket: zmq.Socket[Any]) -> None:
        """To be called before the socket is bound."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._key.public, self._key.secret

    def close(self) -> None:
        """To be called before the context ends."""
        self._authenticator.stop()


def _bad(text: str, hint: str = "") -> AuthError:
    return AuthError(
        f"{VARIABLE}: {text}",
        hint=hint or "make a key with `weightwire keygen FILE` and copy it to every host of the job",
        phase="start",
    )
