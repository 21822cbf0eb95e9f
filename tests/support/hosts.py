"""Hosts of a cluster, as far as one machine can be several: each has a network, pids and /proc of its own.

A host is a network namespace with one end of a veth pair, the other end on a bridge; its processes run in a pid namespace,
so nothing but the network tells one host of another. Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inference_plugin.wire.messages import ReplicaCard
from tests.support.rig import ROOT, eventually

__all__ = ["Container", "Host", "HostedReplica", "HostedTrainer", "can_make_hosts", "network"]

SUBNET = "10.213.77"


def can_make_hosts() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("unshare") is not None


def run(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (command, ran.stderr)


class Host:
    """One of a network's hosts."""

    def __init__(self, switch: str, number: int) -> None:
        self.namespace, self.address = f"{switch}h{number}", f"{SUBNET}.{number}"
        self._switch, self._port = switch, f"port{number}"
        self._processes: list[subprocess.Popen[str]] = []
        run("ip", "netns", "add", self.namespace)
        run("ip", "-n", switch, "link", "add", self._port, "type", "veth", "peer", "eth0", "netns", self.namespace)
        run("ip", "-n", switch, "link", "set", self._port, "master", "br0", "up")
        run("ip", "-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run("ip", "-n", self.namespace, "link", "set", device, "up")

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        run("ip", "-n", self._switch, "link", "set", self._port, "down")

    def restore(self) -> None:
        run("ip", "-n", self._switch, "link", "set", self._port, "up")

    def start(self, code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        """Runs Python code there. Killing the process that is returned kills all that it started."""
        process = start_apart(code, environment, "ip", "netns", "exec", self.namespace)
        self._processes.append(process)
        return process

    def remove(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        run("ip", "netns", "del", self.namespace)


class Container:
    """One of several on this host: pids and /proc of its own, the network and the files are shared. Needs root."""

    def start(self, code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        """As `Host.start`."""
        return start_apart(code, environment)


def start_apart(code: str, environment: dict[str, str], *within: str) -> subprocess.Popen[str]:
    """Runs Python code in a pid namespace of its own. Killing the process that is returned kills all that it started."""
    # A shell is the first process of the pid namespace: of an orphan's parent, tests must not take it for one.
    inside = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", code]
    return subprocess.Popen(
        [*within, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *inside],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """That many hosts, numbered from 1, which reach each other."""
    switch = f"ww{os.getpid()}{secrets.token_hex(2)}"
    run("ip", "netns", "add", switch)
    hosts: list[Host] = []
    try:
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for number in range(1, count + 1):
            hosts.append(Host(switch, number))
        yield hosts
    finally:
        for host in hosts:
            host.remove()
        run("ip", "netns", "del", switch)


class HostedReplica:
    """A replica of `plain_engine` on a host. What a test asks of it goes through the file system, past the network."""

    def __init__(self, host: Host | Container, directory: Path, environment: dict[str, str], *, tp: int = 1) -> None:
        self.host, self.tp = host, tp
        directory.mkdir()
        control = str(directory / "control")
        known = {"WEIGHTWIRE_RUNTIME_DIR": str(directory), "WEIGHTWIRE_LISTEN": "tcp://eth0:*"} | environment
        start = f"run_coordinator({known['WEIGHTWIRE_RUNTIME_DIR']!r}, {tp}, 2, {control!r})"
        self.process = host.start(f"from tests.support.plain_engine import run_coordinator; {start}", known)
        connection = socket.socket(socket.AF_UNIX)
        eventually(lambda: connection.connect_ex(control) == 0, "the control socket")
        self._stream = connection.makefile("rw")

    def ask(self, do: str) -> Any:
        self._stream.write(json.dumps({"do": do}) + "\n")
        self._stream.flush()
        return json.loads(self._stream.readline())


class HostedTrainer:
    """A manager on a host, alone; it does what it is asked, one after the other."""

    def __init__(self, host: Host, directory: Path, environment: dict[str, str], *, transport: str = "auto") -> None:
        directory.mkdir(exist_ok=True)
        code = f"from tests.support.hosts import serve_trainer; serve_trainer({transport!r})"
        self.process = host.start(code, {"WEIGHTWIRE_RUNTIME_DIR": str(directory)} | environment)

    def begin(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the trainer ended"
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        self.begin(do, **arguments)
        return self.end()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def serve_trainer(transport: str) -> None:
    """The trainer's process: one JSON line each way."""
    from inference_plugin.wire.errors import WeightwireError
    from tests.support.managers import SyncManager
    from tests.support.plain_engine import ShardSource, checkpoint

    def names(cards: list[ReplicaCard]) -> list[str]:
        return [card.replica for card in cards]

    with SyncManager(timeout_s=120, transport=transport, catch_up="always") as manager:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                if request["do"] == "update":
                    seed = request.get("seed", request["version"])
                    report = manager.update(ShardSource(checkpoint(seed)), request["version"])
                    answer: Any = {
                        r.replica: [
                            r.status,
                            r.transport,
                            type(WeightwireError.of(r.error)).__name__ if r.error else "",
                        ]
                        for r in report.replicas
                    }
                elif request["do"] == "wait":
                    answer = names(manager.wait_for_replicas(request["count"], timeout_s=120))
                elif request["do"] == "discover":
                    answer = names(manager.discover())
                elif request["do"] == "replicas":
                    answer = {status.replica: [status.state, status.version] for status in manager.replicas()}
                else:
                    answer = manager.versions()
            except WeightwireError as error:
                answer = {"error": type(error).__name__, "text": str(error)}
            print(json.dumps(answer), flush=True)
