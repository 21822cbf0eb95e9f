"""Engines whose ranks are on two hosts (`--nnodes 2`): the head has vLLM's engine core, or SGLang's first scheduler, the other
node the other ranks.

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

from safetensors.torch import load_file

from tests.support import sglang_engines
from tests.support.engines import ENGINE_ARGUMENTS, EXTENSION, Driver, Engine, eventually, flags_of
from tests.support.hosts import Host, HostedTrainer
from tests.support.sglang_engines import SglangDriver
from trainer_adapters import ModuleAdapter

__all__ = ["ModelTrainer", "SglangHead", "SglangNode", "VllmHead", "VllmNode"]

MASTER_PORT = 29577
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x20000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_PDEATHSIG = 1


class _OnHost(Engine):
    """An engine's processes on a host of its own."""

    host: Host
    hides_files = False
    """Whether nobody else sees what lies in its runtime directory. A test looks for the head's card there."""

    def _run(self, module: str, arguments: Sequence[str], fd: int | None = None) -> Any:
        hidden = str(self.runtime) if self.hides_files else ""
        return super()._run(__name__, [self.host.namespace, hidden, module, *arguments], fd)


class VllmHead(_OnHost, Driver):
    """The node with the engine core."""

    def __init__(self, host: Host, directory: Path, *, job: str, tp: int, pp: int, **environment: str) -> None:
        directory.mkdir(exist_ok=True)
        super().__init__(directory, job=job, **_network_of(host), **environment)
        self.host = host
        self.sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}

    def arguments(self, node: int) -> dict[str, Any]:
        """Of `open`, for the node of this number."""
        master = {"master_addr": self.host.address, "master_port": MASTER_PORT}
        return {"nnodes": 2, "node_rank": node, "distributed_executor_backend": "mp", **master, **self.sizes}

    def open_here(self, model: Path) -> None:
        self.open(model, **self.arguments(0))


class SglangHead(_OnHost, SglangDriver):
    """The node with the first scheduler."""

    def __init__(self, host: Host, directory: Path, *, job: str, tp: int, pp: int, **environment: str) -> None:
        directory.mkdir(exist_ok=True)
        super().__init__(directory, tp=tp, pp=pp, job=job, ends_itself=True, **_network_of(host), **environment)
        self.host = host

    def arguments(self, node: int) -> dict[str, Any]:
        place = {"nnodes": 2, "node_rank": node, "dist_init_addr": f"{self.host.address}:{MASTER_PORT}"}
        return {**place, "tp_size": self.tp, "pp_size": self.pp}

    def open_here(self, model: Path) -> None:
        self.open(model, **self.arguments(0))


class _OtherNode(_OnHost):
    """The node that has ranks only."""

    hides_files = True

    def __init__(self, host: Host, directory: Path, model: Path, head: Any, *, job: str, **environment: str) -> None:
        directory.mkdir(exist_ok=True)
        super().__init__(directory, job=job, **_network_of(host), **environment)
        self.host, self.model, self.head = host, model, head

    def use(self) -> None:
        """Managers of this process find the head, not this node."""

    def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends all processes of this host at once."""
        self.family()
        assert self.process is not None
        self.process.kill()
        eventually(lambda: not self.family(), what="the end of the host")


class VllmNode(_OtherNode):
    """`vllm serve --headless`."""

    def start(self) -> None:
        own = {"model": str(self.model), "worker_extension_cls": EXTENSION}
        arguments = json.dumps({**own, **ENGINE_ARGUMENTS, **self.head.arguments(1)})
        self.process = self._run(f"{__name__}_headless", [arguments])


class SglangNode(_OtherNode):
    """SGLang's server, which has no API on this node."""

    python, preloads, constants = SglangDriver.python, SglangDriver.preloads, SglangDriver.constants

    def start(self) -> None:
        self.environment |= sglang_engines.environment(self.head.tp * self.head.pp)
        own = {"model_path": str(self.model), **sglang_engines.ENGINE_ARGUMENTS, **self.head.arguments(1)}
        self.process = self._run("sglang.launch_server", flags_of(own))


class ModelTrainer(HostedTrainer):
    """A manager on a host, which sends checkpoints."""

    def __init__(self, host: Host, directory: Path, environment: dict[str, str]) -> None:
        directory.mkdir(exist_ok=True)
        code = f"from {__name__} import serve_models; serve_models()"
        self.process = host.start(code, {"WEIGHTWIRE_RUNTIME_DIR": str(directory)} | environment)

    def update(self, model: Path, version: int, **settings: Any) -> list[Any]:
        """Status, transport and error of the one replica, or the error that was raised."""
        answer: list[Any] = self.ask("update", model=str(model), version=version, settings=settings)
        return answer


def serve_models() -> None:
    """The trainer's process: one JSON line each way."""
    from inference_plugin.wire.errors import WeightwireError
    from tests.support.managers import SyncManager

    manager: SyncManager | None = None
    made_with: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        settings = request.get("settings", made_with)
        try:
            if manager is None or settings != made_with:
                if manager is not None:
                    manager.close()
                manager, made_with = SyncManager(**({"timeout_s": 60} | settings)), settings
                manager.wait_for_replicas(1, timeout_s=60)
            weights = ModuleAdapter(load_file(Path(request["model"], "model.safetensors")))
            if request["do"] == "verify":
                answer: list[Any] = [manager.verify(weights).ok]
            else:
                (replica,) = manager.update(weights, request["version"]).replicas
                answer = [replica.status, replica.transport, str(replica.error or "")]
        except WeightwireError as error:
            answer = [type(error).__name__, "", str(error)]
        print(json.dumps(answer), flush=True)


def _network_of(host: Host) -> dict[str, str]:
    return {"VLLM_HOST_IP": host.address, "SGLANG_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": "eth0"}


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
