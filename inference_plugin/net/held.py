"""Files of the runtime directory. Only plain ones are opened: a FIFO would keep its reader waiting, a device has no end.

A process holds some of them locked while it lives: to processes of other pid namespaces, such as containers that share the
directory, the pid in a file's name says nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from inference_plugin.wire.codec import MAX_CONTROL_BYTES

__all__ = ["hold", "is_held", "read_plain"]

_held: dict[str, int] = {}
"""The descriptor of the file that is held last, by its kind."""


def hold(path: Path, kind: str) -> None:
    """Locks a file until this process ends or holds another file of this kind. Does nothing where files can't be locked."""
    with contextlib.suppress(OSError):
        descriptor = _open_plain(path)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if (before := _held.pop(kind, None)) is not None:
            os.close(before)
        _held[kind] = descriptor


def is_held(path: Path) -> bool:
    """Whether a living process holds the file."""
    with contextlib.suppress(OSError):
        descriptor = _open_plain(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def read_plain(path: Path) -> bytes:
    """The content of a plain file. Raises OSError, also for what is no plain file or is larger than any message."""
    descriptor = _open_plain(path)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(MAX_CONTROL_BYTES + 1)
    if len(content) > MAX_CONTROL_BYTES:
        raise OSError(f"{path} has more than {MAX_CONTROL_BYTES} bytes")
    return content


def _open_plain(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO's opening would wait for a writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no plain file")
    return descriptor


def _let_go() -> None:
    """A child would hold its parent's files for longer than the parent lives."""
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_let_go)
