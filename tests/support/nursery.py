"""A process that has imported everything and forks others on request: a fresh process in milliseconds, not seconds.

It has one thread and no socket, so forking it is safe. One JSON line in: a function by name, its arguments, its
environment; one JSON line out: its pid. Its children die with it, and it dies with the tests (its input ends).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import json
import os
import signal
import sys
import traceback

import torch

import trainer_adapters.manager  # noqa: F401
from tests.support.plain_engine import PlainEngineModel, die_with_parent


def main() -> None:
    torch.set_num_threads(1)
    PlainEngineModel(1, 0, 1)  # torch loads much of itself at the first use of a meta device
    gc.collect()
    gc.freeze()  # what is imported need not be gone through again in every child
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: a killed child is gone, not a zombie
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(request)
        print(json.dumps({"pid": pid}), flush=True)


def _child(request: dict) -> None:  # type: ignore[type-arg]
    die_with_parent()
    os.close(0)
    os.dup2(2, 1)
    os.environ |= request["environment"]
    sys.path[:0] = filter(None, request["environment"].get("PYTHONPATH", "").split(":"))
    if code := os.environ.get("WEIGHTWIRE_TEST_NO_PIDFD"):
        os.pidfd_open = functools.partial(_refuse, getattr(errno, code))
    status = 1
    try:
        module, _, name = request["call"].partition(":")
        getattr(importlib.import_module(module), name)(**request["arguments"])
        status = 0
    except BaseException:  # noqa: BLE001 -- the process ends here, whatever it is
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _refuse(code: int, pid: int) -> int:
    """In place of `os.pidfd_open`, in a process that can't have one (`WEIGHTWIRE_TEST_NO_PIDFD` says why: EPERM, ...)."""
    raise OSError(code, "the test refuses")


if __name__ == "__main__":
    main()
