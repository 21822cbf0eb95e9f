"""A directory as a store that is slow, full, read-only or lossy, as a test wants it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

PROTOCOL = "strange"


class StrangeStore(LocalFileSystem):
    """A directory, as `strange:///path`. `before_write` is called with the path and the bytes, `before_read` with the path and
    the range; both may raise or wait. `after_read` gives the bytes that were read in place of those that lie there. `reads`: all
    ranges that were read, as (path, start, end)."""

    protocol = PROTOCOL
    before_write: ClassVar[Callable[[str, bytes], object]]
    before_read: ClassVar[Callable[[str, int, int], object]]
    after_read: ClassVar[Callable[[str, bytes], bytes]]
    reads: ClassVar[list[tuple[str, int, int]]]

    @classmethod
    def reset(cls) -> None:
        cls.before_write = staticmethod(lambda path, data: None)
        cls.before_read = staticmethod(lambda path, start, end: None)
        cls.after_read = staticmethod(lambda path, data: data)
        cls.reads = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix(f"{PROTOCOL}://") if isinstance(path, str) else path)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.before_write(path, value)
        super().pipe_file(path, value, mode, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        assert start is not None and end is not None
        self.reads.append((path, start, end))
        self.before_read(path, start, end)
        return self.after_read(path, super().cat_file(path, start, end, **kwargs))


StrangeStore.reset()
fsspec.register_implementation(PROTOCOL, StrangeStore, clobber=True)


class Gate:
    """Holds whoever calls it, once it is shut, until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.waiting = threading.Event()
        self._open.set()

    def __call__(self, *_: object) -> None:
        if not self._open.is_set():
            self.waiting.set()
            assert self._open.wait(600)

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()
