"""Spans of one update in one process, written to a file that Perfetto and chrome://tracing open (Trace Event Format), and
handed to OpenTelemetry.

Tracing is off unless `profile_dir` is set or the process has an OpenTelemetry tracer provider: a span then costs reading one
variable. When it is on, a `Trace` collects spans of all threads that work for its update, and a thread of its own writes the
file. A failure here is logged once and never reaches the update.

The clock is CLOCK_MONOTONIC: files of one host share one time line.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from inference_plugin.wire import telemetry

__all__ = ["Trace", "carried", "flush", "save", "span", "span_since", "under"]

logger = logging.getLogger(__name__)

MAX_EVENTS = 200_000
"""Limit per trace; later events are counted and left out."""

MAX_WAITING = 64
"""Traces that wait to be written; if a disk hangs, later traces are left out."""

FLUSH_S = 2.0
"""How long the end of a manager or of the process waits for files that are being written."""

FIRST_TRACK = 1 << 24
"""Ids of tracks that belong to no thread start here, above any thread's id."""

P = ParamSpec("P")
R = TypeVar("R")

_current: ContextVar[Trace | None] = ContextVar("weightwire_trace", default=None)
_nothing: AbstractContextManager[None] = contextlib.nullcontext()


def span(name: str, **facts: Any) -> AbstractContextManager[None]:
    """Records the enclosed work as `name`, if this thread works for a trace; a torch profiler of the user sees it too."""
    trace = _current.get()
    return _nothing if trace is None else trace.span(name, facts)


def span_since(started_s: float, name: str, track: str = "", **facts: Any) -> None:
    """Records a span from `started_s`, a time of `time.perf_counter`, until now. Work that overlaps with other work of its
    thread needs a track of its own."""
    if (trace := _current.get()) is not None:
        trace.add(int(started_s * 1e9), name, track, facts)


def under(trace: Trace | None) -> AbstractContextManager[None]:
    """Attributes this thread's work to `trace`."""
    return _nothing if trace is None else trace.current()


def carried(function: Callable[P, R]) -> Callable[P, R]:
    """`function` for another thread, with its spans attributed to this thread's trace."""
    trace = _current.get()
    if trace is None:
        return function

    @functools.wraps(function)
    def run(*arguments: P.args, **keywords: P.kwargs) -> R:
        with under(trace):
            return function(*arguments, **keywords)

    return run


def call_it(txn: str, version: int | None = None) -> None:
    """Attributes the current thread's trace to `txn`, and to the version that this brings."""
    if (trace := _current.get()) is not None:
        trace.txn = txn
        trace.version = trace.version if version is None else version


def save(trace: Trace | None) -> None:
    """Queues a trace for writing, if there is one; returns at once. It takes no more spans."""
    if trace is not None:
        with contextlib.suppress(RuntimeError):  # no thread can be started any more
            TraceWriter.of_process().take(trace)


class Trace:
    """One update in one process, which is trainer rank, worker or coordinator. Any thread may add spans."""

    @staticmethod
    def begun(directory: str | None, **named: Any) -> Trace | None:
        """A trace, if there is a directory to write it to, or OpenTelemetry to hand it to; see `__init__`."""
        return Trace(directory, **named) if directory is not None or telemetry.is_wanted() else None

    def __init__(
        self, directory: str | None, *, role: str, txn: str = "", version: int | None = None, **named: Any
    ) -> None:
        """`named`: the group, and the role's rank and replica where it has them. Where no `version` was given, the trace learns
        it with the transaction."""
        self.txn, self.version = txn, version
        self._directory = directory
        self._role = role
        self._named = named
        self._events: list[dict[str, Any]] = []
        self._tids: dict[str, int] = {}
        self._left_out = 0

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Attributes this thread's work to the trace."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextlib.contextmanager
    def span(self, name: str, facts: dict[str, Any]) -> Iterator[None]:
        import torch  # who makes spans has imported it; the command line has not

        started_ns = time.perf_counter_ns()
        try:
            with torch.profiler.record_function(f"weightwire.{name}"):
                yield
        except BaseException as error:
            facts["error"] = f"{type(error).__name__}: {error}"[:200]
            raise
        finally:
            self.add(started_ns, name, "", facts)

    def add(self, started_ns: int, name: str, track: str, facts: dict[str, Any]) -> None:
        """A span from `started_ns` until now."""
        if len(self._events) >= MAX_EVENTS:
            self._left_out += 1
            return
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "cat": self._role,
                "ts": started_ns / 1000,
                "dur": (time.perf_counter_ns() - started_ns) / 1000,
                "pid": os.getpid(),
                "tid": self._track(track) if track else self._thread(),
                "args": facts,
            }
        )

    def write(self) -> None:
        """Writes the file, whole or not at all, and hands the spans to OpenTelemetry, where each is wanted, and even if the other
        fails. Raises OSError, and what the tracer provider raises."""
        try:
            if self._directory is not None:
                self._write_file(Path(self._directory).expanduser())
        finally:
            if telemetry.is_wanted():
                telemetry.export(self._role, self.txn, self._named | self._versions(), self._events)

    def _write_file(self, directory: Path) -> None:
        named = self._named
        who = f"{self._role}{named.get('rank', '')}"
        version = "" if self.version is None else f"v{self.version}"
        parts = (named["group"], version, self.txn[:8], who, named.get("replica", ""))
        stem = ".".join(filter(None, parts)).replace("/", "_")
        directory.mkdir(parents=True, exist_ok=True)
        path, temporary = directory / f"{stem}.json", directory / f".{stem}.{os.getpid()}"
        about = {
            "role": self._role,
            **named,
            **self._versions(),
            "txn": self.txn,
            "host": socket.gethostname(),
            "left_out": self._left_out,
            "unix_minus_monotonic_us": (time.time_ns() - time.perf_counter_ns()) / 1000,
        }
        content = {"traceEvents": [*self._names(), *self._events], "displayTimeUnit": "ms", "otherData": about}
        try:
            temporary.write_bytes(msgspec.json.encode(content, enc_hook=str))
            if not path.exists():  # else this is of a commit that was asked for again
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _versions(self) -> dict[str, int]:
        return {} if self.version is None else {"version": self.version}

    def _names(self) -> Iterator[dict[str, Any]]:
        """Metadata: names of the process and of its tracks."""
        pid = os.getpid()
        name = " ".join(str(self._named[key]) for key in ("rank", "replica") if key in self._named)
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{self._role} {name}"}}
        for name, tid in self._tids.items():
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}

    def _thread(self) -> int:
        tid = threading.get_native_id()
        self._tids[threading.current_thread().name] = tid
        return tid

    def _track(self, name: str) -> int:
        tid = FIRST_TRACK + zlib.crc32(f"{self._role} {self._named} {name}".encode()) % (1 << 30)
        self._tids[name] = tid
        return tid


class TraceWriter:
    """Writes traces, one after the other, in a daemon thread."""

    one: TraceWriter | None = None

    @staticmethod
    def of_process() -> TraceWriter:
        """This process's writer; a fork gets its own."""
        if TraceWriter.one is None or not TraceWriter.one._thread.is_alive():
            TraceWriter.one = TraceWriter()
        return TraceWriter.one

    def __init__(self) -> None:
        self._waiting: queue.Queue[Trace | threading.Event] = queue.Queue(MAX_WAITING)
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="weightwire-trace", daemon=True)
        self._thread.start()

    def take(self, entry: Trace | threading.Event) -> None:
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self._complain("the disk is too slow")

    def _run(self) -> None:
        while True:
            entry = self._waiting.get()
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            try:
                entry.write()
            except Exception as error:  # noqa: BLE001 -- a trace must not fail an update; it is logged
                self._complain(str(error))

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("weightwire: no trace was written, and none of this process may be: %s", why)


@atexit.register
def flush() -> None:
    """Waits for the traces that were saved so far, `FLUSH_S` at most."""
    if TraceWriter.one is not None and TraceWriter.one._thread.is_alive():
        done = threading.Event()
        TraceWriter.one.take(done)
        done.wait(FLUSH_S)
