"""A process's end of NIXL, with UCX: registered memory that peers read, and reads of theirs.

Source of the interface: `nixl_agent` of NIXL's Python package. UCX chooses the way (RDMA verbs, TCP, shared memory) among the
devices that its variable `UCX_NET_DEVICES` names. UCX authenticates nobody, so here it must be set: who names a device trusts its
network.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from inference_plugin.net.addresses import new_replica_id
from inference_plugin.wire.errors import PeerLost, TransportUnavailable

__all__ = [
    "DEVICES", "Agent", "GivenUp", "Reading", "Registered", "Span", "close_when_over", "has_nixl", "named_devices",
    "why_no_nixl",
]  # fmt: skip

DEVICES = "UCX_NET_DEVICES"

PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
"""The first takes the one of the others that is for torch's CUDA. On a host without a GPU each works."""

CLOSE_S = 1.0
"""How long whoever closes waits for reads that were given up. Those of a living trainer end in milliseconds."""

LOOK_AGAIN_S = 1e-3

Span = tuple[int, int]
"""Address and number of bytes, of memory of one process."""


class Registered(NamedTuple):
    """Memory, uint8, that an agent has registered."""

    memory: torch.Tensor
    handle: Any


def named_devices() -> str:
    """The devices that UCX uses, as the user named them."""
    return os.environ.get(DEVICES, "")


def has_nixl() -> bool:
    """Whether NIXL is installed, for some version of CUDA."""
    return any(importlib.util.find_spec(name) is not None for name in PACKAGES)


def why_no_nixl() -> str | None:
    """Why NIXL can't be used in this process; None if its package is there and devices are named."""
    if not has_nixl():
        return "NIXL is not installed (`pip install nixl-cu12`, or `nixl-cu13` for CUDA 13)"
    if not named_devices():
        return f"{DEVICES} names no devices: set it to those of a network that you trust, such as mlx5_0:1 or eth0"
    return None


@functools.cache
def _api() -> Any:
    """NIXL's module. Raises `TransportUnavailable` if it does not load."""
    name = next(name for name in PACKAGES if importlib.util.find_spec(name) is not None)
    try:
        api = importlib.import_module(f"{name}._api")
    except Exception as error:
        raise TransportUnavailable(f"nixl: the package {name} does not load: {error}") from error
    if not os.environ.get("NIXL_LOG_LEVEL"):
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells standard output of each agent
    return api


class Reading:
    """A read that was begun. Its agent lives until it `is_over`."""

    def __init__(self, agent: Agent, handle: Any, state: str) -> None:
        self._agent, self._handle, self._state = agent, handle, state

    def is_over(self) -> bool:
        """Whether all bytes are here. Raises `PeerLost` if they will not come."""
        if self._state == "PROC":
            try:
                self._state = self._agent.api.check_xfer_state(self._handle)
            except Exception as error:
                self._free()
                self._state = "ERR"
                raise _lost(error) from error
            if self._state == "PROC":
                return False
        self._free()
        if self._state != "DONE":
            raise _lost(self._state)
        return True

    def _free(self) -> None:
        handle, self._handle = self._handle, None  # NIXL's agent lives as long as a handle of its
        with contextlib.suppress(Exception):  # it frees what it could not with the agent
            if handle is not None:
                handle.release()


class Agent:
    """Raises `TransportUnavailable` if NIXL, UCX or the devices can't be used. Used by one thread at a time."""

    def __init__(self) -> None:
        if (why := why_no_nixl()) is not None:
            raise TransportUnavailable(f"nixl: {why}")
        nixl = _api()
        try:
            self.api = nixl.nixl_agent(new_replica_id("nixl"), nixl.nixl_agent_config(backends=["UCX"]))
        except Exception as error:
            raise TransportUnavailable(
                f"nixl: UCX can't use devices {named_devices()}: {error}",
                hint=f"name devices of this host in {DEVICES}, such as eth0 or mlx5_0:1; UCX said why on standard error",
            ) from error

    def register(self, nbytes: int) -> Registered:
        """Memory that peers may read, and that this agent may read into, until the agent is closed. Raises
        `TransportUnavailable`."""
        try:
            memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
            return Registered(memory, self.api.register_memory(memory))
        except Exception as error:
            raise TransportUnavailable(
                f"nixl: {nbytes} bytes can't be registered: {error}",
                hint="free memory, or raise this process's limit of locked memory (`ulimit -l unlimited`)",
            ) from error

    def unregister(self, registered: Registered) -> None:
        """Nobody may be reading it."""
        self.api.deregister_memory(registered.handle)

    def metadata(self) -> bytes:
        """What a peer must know to read what is registered now."""
        return bytes(self.api.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """The name of the peer whose `metadata` this is. Raises `PeerLost`."""
        try:
            name = self.api.add_remote_agent(metadata)
        except Exception as error:
            raise _lost(error) from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def read(self, peer: str, spans: Sequence[Span], into: int) -> Reading:
        """Begins to read `spans` of a peer's memory to the address `into`, one after the other. Raises `PeerLost`."""
        here, at = [], into
        for _, nbytes in spans:
            here.append((at, nbytes, 0))
            at += nbytes
        there = [(address, nbytes, 0) for address, nbytes in spans]
        try:
            handle = self.api.initialize_xfer(
                "READ", self.api.get_xfer_descs(here, "DRAM"), self.api.get_xfer_descs(there, "DRAM"), peer
            )
            return Reading(self, handle, self.api.transfer(handle))
        except Exception as error:
            raise _lost(error) from error

    def close(self) -> None:
        """Ends it: no read goes on after that, in either direction. May be called twice."""
        if self.api is not None:
            self.api.agent = None  # NIXL frees everything with its last reference
            self.api = None


class GivenUp(NamedTuple):
    """A read that nobody waits for, and the buffer that it may still write into."""

    reading: Reading
    buffer: Registered

    def is_over(self) -> bool:
        try:
            return self.reading.is_over()
        except PeerLost:
            return True


_unclosed: list[tuple[Agent, list[GivenUp]]] = []
"""Agents that nobody uses any more, whose reads were not over yet."""
_unclosed_lock = threading.Lock()


def close_when_over(agent: Agent, given_up: list[GivenUp]) -> None:
    """Closes the agent, and earlier ones, if their reads are over; else a later call does."""
    until_s = time.monotonic() + CLOSE_S
    while not all(each.is_over() for each in given_up) and time.monotonic() < until_s:
        threading.Event().wait(LOOK_AGAIN_S)  # NIXL tells nobody of the end
    with _unclosed_lock:
        _unclosed.append((agent, given_up))
        for entry in list(_unclosed):
            if all(each.is_over() for each in entry[1]):
                entry[0].close()  # before the memory that it writes into goes
                _unclosed.remove(entry)


def _lost(error: object) -> PeerLost:
    return PeerLost(
        f"nixl: the trainer's memory can't be read: {error}",
        hint=f"if its process is alive, look at the network between the devices that {DEVICES} names on both sides",
        phase="stage",
    )
