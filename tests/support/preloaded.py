"""Starts Python programs quickly: one process per environment imports an engine once and forks for each program.

Importing torch and an engine takes 8 to 10 seconds of CPU per process, and one engine is three or four processes. A
`Nursery` starts a program as a fork of a process that has imported the listed modules already. The program gets its own
environment variables, log, session and command line, and runs as `__main__`. Processes that it starts by the "spawn" method
of `multiprocessing` are forked as well: they inherit the imports, and are its children as before. Servers in tests are
started the ordinary way, so both ways are covered.

Those of Weightwire's modules are preloaded that read no variable and touch no engine while they are imported; a program
registers the plug-in itself, with its own variables set.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import logging.config
import multiprocessing.context
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["SHOW_STACKS", "ForkedProgram", "nursery"]

ROOT = Path(__file__).parents[2]
START_S = 300.0

SHOW_STACKS = signal.SIGUSR2
"""A program that gets this signal writes where its threads stand to its log."""


class ForkedProgram:
    """A program that a nursery forked; the part of `subprocess.Popen` that tests use. Its exit code is not known here."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def poll(self) -> int | None:
        """None while it runs, 0 when it has ended, however it did."""
        return 0 if self._ended(0) else None

    def wait(self, timeout: float) -> None:
        """Raises `subprocess.TimeoutExpired` when it still runs after `timeout` seconds."""
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(f"the program of pid {self.pid}", timeout)

    def _ended(self, timeout_s: float) -> bool:
        watch = select.poll()  # `select` takes no descriptor above 1023
        watch.register(self._pidfd, select.POLLIN)
        return bool(watch.poll(timeout_s * 1000))

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._pidfd)


class Nursery:
    """The client side of one preloaded process, which all processes of a test run share. It ends with the run."""

    def __init__(self, python: str, modules: Sequence[str], variables: Sequence[tuple[str, str]]) -> None:
        command = [python, "-m", __name__]
        run, whose = _run()
        name = hashlib.sha256(json.dumps([command, modules, variables]).encode()).hexdigest()[:16]
        self._address = str(run / name)
        self._what = f"the preloaded process of {python}"
        lock = os.open(run, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not Path(self._address).exists():
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                    listener.bind(self._address)
                    listener.listen()
                    subprocess.Popen(
                        [*command, str(listener.fileno()), str(whose), *modules],
                        cwd=ROOT,
                        env={**os.environ, **dict(variables), "PYTHONPATH": str(ROOT)},
                        pass_fds=(listener.fileno(),),
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
        finally:
            os.close(lock)

    def start(
        self, module: str, arguments: Sequence[str], environment: dict[str, str], log: Path, fd: int | None = None
    ) -> ForkedProgram:
        """Runs `python -m module ARGUMENTS`; with `fd`, a copy of it is the last argument. Raises AssertionError if the
        nursery has died."""
        request = {"module": module, "arguments": list(arguments), "environment": environment, "log": str(log)}
        fds: list[int] = []
        answer = b""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.settimeout(START_S)
            with contextlib.suppress(ConnectionError):
                asking.connect(self._address)
                socket.send_fds(asking, [json.dumps(request).encode()], [] if fd is None else [fd])
                answer, fds, _, _ = socket.recv_fds(asking, 64, 1)
        assert fds, f"{self._what} has died"
        return ForkedProgram(int(answer), fds[0])


@functools.cache
def nursery(python: str, modules: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> Nursery:
    """The nursery of these modules."""
    return Nursery(python, modules, variables)


@functools.cache
def _run() -> tuple[Path, int]:
    """This test run's directory of sockets, and the process that it ends with: of several pytest processes the one that
    started them."""
    run, whose = f"{os.getpid()}", os.getpid()
    if "PYTEST_XDIST_TESTRUNUID" in os.environ:
        run, whose = os.environ["PYTEST_XDIST_TESTRUNUID"], os.getppid()
    directory = Path(tempfile.gettempdir()) / f"nurseries-{run}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory, whose


# --- inside the preloaded process --------------------------------------------------------------------------------------------


def serve(listener: socket.socket, whose: int, modules: Sequence[str]) -> None:
    """Imports `modules`, then forks a program for each connection, until process `whose` has ended."""
    with contextlib.suppress(ProcessLookupError):
        ends = os.pidfd_open(whose)
        for module in modules:
            importlib.import_module(module)
        _inspect_models_here()
        _override_kernels_here()
        _forget_levels_once()
        _let_controllers_wait()
        _freeze()
        signal.signal(signal.SIGCHLD, lambda *_: _reap())
        watch = select.poll()
        for source in (ends, listener.fileno()):
            watch.register(source, select.POLLIN)
        while not any(source == ends for source, _ in watch.poll()):
            _fork(listener, ends)
    address = Path(listener.getsockname())
    address.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others are still there
        address.parent.rmdir()


def _fork(listener: socket.socket, ends: int) -> None:
    connection, _ = listener.accept()
    with connection:
        message, fds, _, _ = socket.recv_fds(connection, 1 << 20, 1)
        with _masked():  # a program that ends at once must not be reaped before its pidfd is open
            pid = os.fork()
            if pid == 0:
                for inherited in (connection, listener):
                    inherited.close()
                os.close(ends)
                _become(json.loads(message), list(fds))
            pidfd = os.pidfd_open(pid)
        socket.send_fds(connection, [str(pid).encode()], [pidfd])
    for fd in (pidfd, *fds):
        os.close(fd)


def _freeze() -> None:
    """An engine collects garbage as it starts and as it ends: half a second each time if it goes through all that is imported.
    vLLM thaws everything when it ends, which it does in a process that one more engine follows in."""
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def _inspect_models_here() -> None:
    """vLLM imports itself in one more interpreter for each architecture that it meets the first time, to look at its class: 25
    seconds of CPU. What it fears of doing so in its own process is that a GPU would be initialised."""
    if (registry := sys.modules.get("vllm.model_executor.models.registry")) is not None:
        registry._run_in_subprocess = lambda look: look()  # type: ignore[attr-defined]


def _override_kernels_here() -> None:
    """Each worker of vLLM looks through all modules for Triton's kernels, to put those of a CPU in their place: 0.3 seconds of
    CPU. Its modules are those of this process, so once is enough."""
    if (platforms := sys.modules.get("vllm.platforms")) is not None:
        platform = type(platforms.current_platform)
        if (register := getattr(platform, "register_triton_kernel_overrides", None)) is not None:  # since 0.33
            register()
            platform.register_triton_kernel_overrides = classmethod(lambda _: None)


def _forget_levels_once() -> None:
    """A configuration of logging, which each process of vLLM makes, sets the level of hundreds of loggers, and each time all
    loggers forget which levels they looked up: a third of a start's CPU time. Once they all have theirs is enough."""
    reset: Callable[..., None] = logging.config._handle_existing_loggers  # type: ignore[attr-defined]
    manager: Any = logging.root.manager

    @functools.wraps(reset)
    def reset_at_once(*arguments: Any) -> None:
        manager._clear_cache = lambda: None
        try:
            reset(*arguments)
        finally:
            del manager._clear_cache
            manager._clear_cache()

    logging.config._handle_existing_loggers = reset_at_once  # type: ignore[attr-defined]


def _let_controllers_wait() -> None:
    """SGLang's controller of data-parallel ranks asks for messages without a pause, and so keeps a core busy."""
    if (controller := sys.modules.get("sglang.srt.managers.data_parallel_controller")) is not None:
        receive = controller.sock_recv

        def wait_and_receive(source: Any, flags: int) -> Any:
            source.poll(100)  # milliseconds
            return receive(source, flags=flags)

        controller.sock_recv = wait_and_receive  # type: ignore[attr-defined]


@contextlib.contextmanager
def _masked() -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """In the forked process: runs the program, and never returns."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(log, number)
        faulthandler.register(SHOW_STACKS, file=2)  # to the log, and so do the processes that it starts
        os.environ.clear()
        os.environ.update(request["environment"])
        multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.context._concrete_contexts["fork"]  # type: ignore[assignment]
        sys.argv = [request["module"], *request["arguments"], *map(str, fds)]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - shown in the program's log, as an interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as the_listener:
        serve(the_listener, int(sys.argv[2]), sys.argv[3:])
    os._exit(0)
