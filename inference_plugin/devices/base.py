"""The interface to a device: its memory, and the order of work on it.

A device works through queues (CUDA: streams). A call queues work and returns; what is queued in one queue runs in order, what
is queued in two runs in any order, until one waits for a mark in the other. Each thread has a current queue. So three rules
hold wherever this package reads or writes device memory:

- A thread that reads what another thread computed waits for a mark that the other one recorded.
- No memory is written anew before what reads it has ended: either both are in one queue, or somebody has waited.
- Nothing is reported as done before `synchronise` or `drain` has returned.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from inference_plugin.devices.digests import Digests, TorchDigests
from inference_plugin.wire.errors import TransportUnavailable
from inference_plugin.wire.tensors import bytes_view

__all__ = ["ByteCopy", "Device", "Mark", "Queue", "SharedMemory", "Unused"]

Queue: TypeAlias = Any
"""A queue of one device (CUDA: a stream)."""

Mark: TypeAlias = Any
"""A point in a queue. It is reached once all work queued before it has ended."""

Unused: TypeAlias = Callable[[Callable[[], None]], None]
"""Called once this process has no tensor left in memory that it shared. It must call its argument, now or later: that frees the
memory."""


@dataclass(frozen=True)
class SharedMemory:
    """Device memory that other processes can map, or another process's memory that is mapped here. `handle` goes to `attach`."""

    tensor: torch.Tensor
    """Its bytes (1-D, uint8)."""
    handle: bytes
    close: Callable[[], None] = lambda: None
    """Ends this process's mapping of another one's memory: a later access fails. May be called twice."""


class ByteCopy(NamedTuple):
    """`nbytes` bytes of a contiguous tensor, from byte `start` on, to byte `at` of another one."""

    target: torch.Tensor
    at: int
    source: torch.Tensor
    start: int
    nbytes: int


class Device(abc.ABC):
    """All devices of one type (`torch.device.type`). "This device" is the calling thread's current one."""

    type: str

    @abc.abstractmethod
    def is_in_use(self) -> bool:
        """Whether this process has initialised it. Asking does not initialise it."""

    @abc.abstractmethod
    def current(self) -> int | None:
        """The index of this device, for `use` in another thread; None for the host."""

    @abc.abstractmethod
    def use(self, index: int | None) -> None:
        """Makes device `index` the current one of this thread. A new thread starts with the first. None changes nothing."""

    @abc.abstractmethod
    def uuid(self) -> str:
        """A globally unique id of this device; "" where there is none."""

    @abc.abstractmethod
    def free_bytes(self, device: torch.device) -> int:
        """Free memory of `device`, in bytes."""

    # --- order -------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def record(self) -> Mark:
        """Marks the current end of this thread's queue."""

    @abc.abstractmethod
    def wait(self, mark: Mark) -> None:
        """Orders everything that this thread queues from now on after `mark`. Returns at once."""

    @abc.abstractmethod
    def finish(self, mark: Mark) -> None:
        """Blocks until `mark` is reached."""

    @abc.abstractmethod
    def synchronise(self) -> None:
        """Blocks until all work in this thread's queue has ended."""

    @abc.abstractmethod
    def drain(self, device: torch.device) -> None:
        """Blocks until all work in every queue of `device` has ended, whichever thread queued it."""

    # --- queues ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def new_queue(self) -> Queue:
        """A new queue of this device. Make one per long-lived thread: memory that work in a queue allocates and frees is reused
        by that queue only."""

    @abc.abstractmethod
    def current_queue(self) -> Queue:
        """This thread's queue."""

    @abc.abstractmethod
    def enter(self, queue: Queue) -> None:
        """Sends this thread's work to `queue` from now on, and makes the queue's device the current one."""

    # --- memory ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Bytes of the host's memory (1-D, uint8) that the device reads and writes at full speed: page-locked."""

    def page_lock(self, memory: torch.Tensor) -> Callable[[], None] | None:
        """Page-locks `memory` of the host, which may be mapped read-only, so that this device reads it at full speed. Returns a
        function that ends this, to be called before the memory is unmapped; None where the device or the system can't."""
        return None

    def is_page_locked(self, memory: torch.Tensor) -> bool:
        """Whether a tensor of the host is page-locked."""
        return False

    @abc.abstractmethod
    def memory(self, nbytes: int) -> torch.Tensor:
        """Bytes of this device's memory (1-D, uint8)."""

    def return_cached(self) -> None:  # noqa: B027 -- most keep none
        """Gives memory that torch keeps for its next tensors back to this device, for whoever takes some without torch."""

    @abc.abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy between tensors of one shape, with a cast where their dtypes differ. Either may be the host's: that side
        must not be touched before the copy has ended."""

    def copy_bytes(self, copies: Sequence[ByteCopy]) -> None:
        """Queues copies of bytes between contiguous tensors."""
        for each in copies:
            source = bytes_view(each.source).narrow(0, each.start, each.nbytes)
            self.copy(bytes_view(each.target).narrow(0, each.at, each.nbytes), source)

    def new_digests(self) -> Digests:
        """For digests of this device's memory, computed there."""
        return TorchDigests()

    def digests(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The digest (`wire.digest.digest_bytes`) of each tensor's bytes in C order."""
        found = self.new_digests()
        found.add(tensors)
        return found.end()

    # --- memory that processes share -----------------------------------------------------------------------------------

    def why_not_shared(self) -> str | None:
        """Why this process can't share its device's memory with other processes; None if it can. Asking initialises nothing."""
        return f"memory of {self.type} devices can't be shared between processes"

    def reachable(self) -> tuple[str, ...]:
        """The uuids of the devices whose shared memory this process can map, this device's first."""
        return ()

    def share(self, nbytes: int, unused: Unused) -> SharedMemory:
        """New memory of this device, in an allocation of its own. Raises `TransportUnavailable`."""
        raise TransportUnavailable(self.why_not_shared() or "")

    def attach(self, handle: bytes, nbytes: int, uuid: str) -> SharedMemory:
        """Maps memory of device `uuid` that another process shares; in that process itself, returns the memory. Raises
        `TransportUnavailable`."""
        raise TransportUnavailable(self.why_not_shared() or "")
