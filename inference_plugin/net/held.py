"""Files of the runtime directory that a process holds locked while it lives: to processes of other pid namespaces, such as
containers that share the directory, the pid in a file's name says nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

__all__ = ["hold", "is_held"]

_held: dict[str, int] = {}
"""The descriptor of the file that is held last, by its kind."""


def hold(path: Path, kind: str) -> None:
    """Locks a file until this process ends or holds another file of this kind. Does nothing where files can't be locked."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if (before := _held.pop(kind, None)) is not None:
            os.close(before)
        _held[kind] = descriptor


def is_held(path: Path) -> bool:
    """Whether a living process holds the file."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def _let_go() -> None:
    """A child would hold its parent's files for longer than the parent lives."""
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_let_go)
