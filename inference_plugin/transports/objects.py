"""Objects in a directory or an object store, by fsspec. Each call runs in a thread of its own, which is left to itself once the
call's time is over. Every error is typed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from inference_plugin.net.gate import no_thread
from inference_plugin.wire.errors import (
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
    VersionConflict,
    WeightwireError,
    lacks_resources,
)

__all__ = ["KEY", "ByteRange", "ObjectStore", "merged_ranges", "why_no_fsspec"]

KEY = r"^[0-9a-z][0-9a-z-]{0,63}/[0-9a-z][0-9a-z-]{0,63}\Z"
"""Of an object, below the store's URL."""

CANCEL_S = 0.1
"""Longest time until a wait notices that it was cancelled."""

LOOK_AGAIN_S = 0.2
"""Between two attempts to read an object that is not there: a store's replica, or another host's view of a directory, may lag."""

SKIPPED_BYTES = 64 << 10
"""Ranges with as many bytes between them are read as one: a request to an object store costs more than these."""

DELETED_AT_ONCE = 500

MOST_CALLS = 256
"""Calls under way, also those that were left to themselves: where a store hangs, each keeps a thread and an object's bytes."""

Result = TypeVar("Result")


class ByteRange(NamedTuple):
    start: int
    end: int


def merged_ranges(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    """Ranges of one object that cover these, which are in order."""
    merged: list[ByteRange] = []
    for start, end in ranges:
        if merged and start - merged[-1].end <= SKIPPED_BYTES:
            start, end = merged[-1].start, max(end, merged.pop().end)
        merged.append(ByteRange(start, end))
    return merged


def why_no_fsspec() -> str | None:
    try:
        import fsspec  # type: ignore[import-untyped]  # noqa: F401
    except Exception as error:  # noqa: BLE001 -- a broken package must cost this transport only
        return f"fsspec can't be imported ({error}); the extra `store` brings it"
    return None


class ObjectStore:
    """What lies below a URL. Credentials and other options are fsspec's own configuration.

    `shown` is the URL without passwords. The methods that begin a call return its future, for `result`."""

    def __init__(self, url: str) -> None:
        self.shown = _shown(url)
        self._url = url
        self._making = threading.Lock()
        self._made: tuple[Any, str] | None = None
        self._calls: set[Future[Any]] = set()

    def write(self, key: str, data: bytes) -> Future[None]:
        """Begins to write an object, of which nobody sees a part."""
        return self._begun(lambda: self._write(key, data))

    def read(self, key: str, ranges: Sequence[ByteRange], wait_s: float) -> Future[list[bytes]]:
        """Begins to read ranges of an object, and waits up to `wait_s` for the object. A range may be cut short by the object's
        end."""
        return self._begun(lambda: self._read(key, ranges, time.monotonic() + wait_s))

    def delete(self, keys: Sequence[str], *, folder: bool = False) -> Future[None]:
        """Begins to delete objects, with `folder` also that of the first if it is empty then. What is not there is no error."""
        return self._begun(lambda: self._delete(keys, folder))

    def result(
        self, call: Future[Result], what: str, until_s: float, cancelled: threading.Event | None = None
    ) -> Result:
        """What a call returned. Raises `SyncTimeout` at `until_s`, `VersionConflict` once `cancelled` is set, `ProtocolError` for
        an object that is not there to be read, `TransportUnavailable` for other errors."""
        began_s = time.monotonic()
        while True:
            left_s = until_s - time.monotonic()
            step_s = max(0.0, left_s if cancelled is None else min(left_s, CANCEL_S))
            if concurrent.futures.wait([call], step_s).done:
                break
            if cancelled is not None and cancelled.is_set():
                raise VersionConflict("the transaction was dropped")
            if left_s <= step_s:
                raise SyncTimeout(
                    f"store {self.shown}: {what} took longer than {max(0.0, until_s - began_s):.3g} s",
                    hint="look at the store and at the way there; a larger timeout_s gives it more time",
                    phase="stage",
                )
        try:
            return call.result()
        except Exception as error:
            raise self._typed(error, what) from error

    def _typed(self, error: Exception, what: str) -> WeightwireError:
        if isinstance(error, WeightwireError):
            return error
        words = f"store {self.shown}: {what}: {type(error).__name__}: {error}"[:2000]
        if isinstance(error, FileNotFoundError):
            hint = "its directory or bucket must exist: Weightwire makes neither"
        elif isinstance(error, ImportError):
            hint = "install the package that fsspec names, on this side"
        elif lacks_resources(error):
            hint = "this process has reached a limit of memory or of processes (`ulimit -a`)"
        else:
            hint = "look at the store's free space, permissions and credentials, which are fsspec's configuration"
        return TransportUnavailable(words, hint=hint, phase="stage")

    def _begun(self, call: Callable[[], Result]) -> Future[Result]:
        if len(self._calls) >= MOST_CALLS:
            raise SyncTimeout(
                f"store {self.shown}: {len(self._calls)} calls have not come back",
                hint="look at the store and at the way there",
                phase="stage",
            )
        future: Future[Result] = Future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 -- `result` raises it
                future.set_exception(error)

        try:  # not of a pool: the end of the process would wait for a call that hangs
            threading.Thread(target=run, name="weightwire-store", daemon=True).start()
        except RuntimeError as error:
            self._calls.discard(future)
            raise no_thread(error, "a call to the store") from error
        return future

    # --- in a call's own thread --------------------------------------------------------------------------------------

    def _system(self) -> tuple[Any, str]:
        """The file system, and where the URL is in it. Making one may connect, and so may hang."""
        with self._making:
            if self._made is None:
                from fsspec.core import url_to_fs  # type: ignore[import-untyped]

                system, root = url_to_fs(self._url)
                self._made = system, root.rstrip("/")
            return self._made

    def _path(self, key: str) -> tuple[Any, str]:
        if re.match(KEY, key) is None:
            raise ProtocolError(f"{key[:200]!r} is no key of an object")
        system, root = self._system()
        return system, f"{root}/{key}"

    def _write(self, key: str, data: bytes) -> None:
        system, path = self._path(key)
        try:
            _put(system, path, data)
        except FileNotFoundError:
            if not system.isdir(
                self._system()[1]
            ):  # an object store has no directories; one that isn't mounted isn't made
                raise
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
            _put(system, path, data)

    def _read(self, key: str, ranges: Sequence[ByteRange], until_s: float) -> list[bytes]:
        system, path = self._path(key)
        while True:
            try:
                starts, ends = [each.start for each in ranges], [each.end for each in ranges]
                blocks = list(system.cat_ranges([path] * len(ranges), starts, ends, on_error="raise"))
                for failed in (
                    each for each in blocks if isinstance(each, Exception)
                ):  # older fsspec returns them all the same
                    raise failed
                return blocks
            except FileNotFoundError as error:
                if time.monotonic() + LOOK_AGAIN_S > until_s:
                    raise ProtocolError(
                        f"store {self.shown}: object {key} is not there",
                        hint="both sides must see the same store, and nobody else may delete from it; a replica that lags is "
                        "waited for as long as the trainer's control_timeout_s says",
                        phase="stage",
                    ) from error
            threading.Event().wait(LOOK_AGAIN_S)  # a store tells nobody of new objects

    def _delete(self, keys: Sequence[str], folder: bool) -> None:
        for start in range(0, len(keys), DELETED_AT_ONCE):
            paths = [self._path(key) for key in keys[start : start + DELETED_AT_ONCE]]
            system = paths[0][0]
            try:
                system.rm([path for _, path in paths])
            except FileNotFoundError:
                for _, path in paths:
                    with contextlib.suppress(FileNotFoundError):
                        system.rm_file(path)
        if folder and keys and _is_local(self._system()[0]):
            with contextlib.suppress(OSError):  # other ranks' objects are there
                self._system()[0].rmdir(self._path(keys[0])[1].rpartition("/")[0])


def _put(system: Any, path: str, data: bytes) -> None:
    """A store of objects shows none before it is whole; in a directory a file would be seen while it grows."""
    if not _is_local(system):
        system.pipe_file(path, data)
        return
    part = f"{path}.part"
    try:
        system.pipe_file(part, data)
        system.mv(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            system.rm_file(part)
        raise


def _is_local(system: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    return isinstance(system, LocalFileSystem)


def _shown(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        return f"{parts.scheme}://{host}{parts.path}"[:500]
    except ValueError:
        return url.partition("://")[0] + "://..."
