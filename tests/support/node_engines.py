"""A vLLM engine whose ranks are on two hosts (`--nnodes 2`): one has the engine core, the other a headless executor.

Each host has a network, pids, /proc, /dev/shm and a runtime directory of its own: only the network leads from one to the other.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.engines import ENGINE_ARGUMENTS, EXTENSION, Driver, Engine
from tests.support.hosts import Host

__all__ = ["HeadNode", "HeadlessNode", "spread"]

MASTER_PORT = 29577
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x20000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_PDEATHSIG = 1


def spread(head: Host, node: int, **sizes: Any) -> dict[str, Any]:
    """Arguments of an engine on two hosts, for its node of this number. `sizes`: such as `tensor_parallel_size`."""
    return {
        "nnodes": 2,
        "node_rank": node,
        "master_addr": head.address,
        "master_port": MASTER_PORT,
        "distributed_executor_backend": "mp",
        **sizes,
    }


class _OnHost(Engine):
    """An engine's processes on a host of its own."""

    host: Host
    hides_files = False
    """Whether nobody else sees what lies in its runtime directory. A test looks for the head's card there."""

    def _run(self, module: str, arguments: Sequence[str], fd: int | None = None) -> Any:
        hidden = str(self.runtime) if self.hides_files else ""
        return super()._run(__name__, [self.host.namespace, hidden, module, *arguments], fd)


class HeadNode(_OnHost, Driver):
    """The node with the engine core."""

    def __init__(self, host: Host, directory: Path, *, job: str = "", **environment: str) -> None:
        directory.mkdir(exist_ok=True)
        super().__init__(directory, job=job, **_network_of(host), **environment)
        self.host = host


class HeadlessNode(_OnHost):
    """The node without one: `vllm serve --headless`, started with the arguments of the head's `open`."""

    hides_files = True

    def __init__(
        self, host: Host, directory: Path, model: Path, arguments: dict[str, Any], *, job: str, **environment: str
    ) -> None:
        directory.mkdir(exist_ok=True)
        super().__init__(directory, job=job, **_network_of(host), **environment)
        self.host = host
        self.arguments = {"model": str(model), "worker_extension_cls": EXTENSION, **ENGINE_ARGUMENTS, **arguments}

    def use(self) -> None:
        """Managers of this process find the head, not this node."""

    def start(self) -> None:
        self.process = self._run(f"{__name__}_headless", [json.dumps(self.arguments)])

    def stop(self) -> None:
        assert self.process is not None
        self.process.kill()


def _network_of(host: Host) -> dict[str, str]:
    return {"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": "eth0"}


# --- in the process of a node ------------------------------------------------------------------------------------------------


def enter(namespace: str, hidden: str) -> None:
    """Goes on as the second process of a host: the first one waits for it. The host ends with the calling process. `hidden`: a
    directory that is empty there, and whose files nobody else sees."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    def fork(*, ends_with_parent: bool) -> None:
        if child := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
        if ends_with_parent:
            call("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL))

    with Path("/run/netns", namespace).open() as network:
        call("setns", network.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID)
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    fork(ends_with_parent=True)
    call("mount", b"proc", b"/proc", b"proc", 0, None)
    for own in filter(None, ("/dev/shm", hidden)):
        call("mount", b"tmpfs", own.encode(), b"tmpfs", 0, None)
    fork(ends_with_parent=False)


if __name__ == "__main__":
    _, the_namespace, to_hide, the_module, *the_arguments = sys.argv
    enter(the_namespace, to_hide)
    sys.argv = [the_module, *the_arguments]
    runpy.run_module(the_module, run_name="__main__", alter_sys=True)
