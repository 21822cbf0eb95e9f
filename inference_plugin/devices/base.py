"""What is asked of a device.

A device works through queues (CUDA: streams). A call queues work and returns; what is queued in one queue runs in order, what
is queued in two runs in any order, until one waits for a mark in the other. Each thread has a current queue. So three rules
hold wherever this package reads or writes device memory:

- A thread that reads what another thread computed waits for a mark that the other one recorded.
- No memory is written anew before what reads it has ended: either both are in one queue, or somebody has waited.
- Whoever is told that something is done is told after `synchronise` or `drain`.
"""

from __future__ import annotations

import abc
from typing import Any, TypeAlias

import torch

__all__ = ["Device", "Mark", "Queue"]

Queue: TypeAlias = Any
"""A queue of one device."""

Mark: TypeAlias = Any
"""A place in a queue: all that was queued there before it."""


class Device(abc.ABC):
    """All devices of one type (`torch.device.type`); "this device" is the calling thread's current one."""

    type: str

    @abc.abstractmethod
    def is_in_use(self) -> bool:
        """Whether this process has initialised it. Asking does not."""

    @abc.abstractmethod
    def current(self) -> int | None:
        """This thread's device, for another thread's `use`; None for the host."""

    @abc.abstractmethod
    def use(self, index: int | None) -> None:
        """Makes `index` this thread's device: a new thread starts with the first one. None changes nothing."""

    @abc.abstractmethod
    def uuid(self) -> str:
        """An id of this device that no other one in the world has; "" where there is none."""

    @abc.abstractmethod
    def free_bytes(self, device: torch.device) -> int:
        """How much of its memory nobody holds."""

    # --- order -------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def record(self) -> Mark:
        """Marks the end of what is in this thread's queue by now."""

    @abc.abstractmethod
    def wait(self, mark: Mark) -> None:
        """What this thread queues from now on runs after `mark`. Returns at once."""

    @abc.abstractmethod
    def finish(self, mark: Mark) -> None:
        """Returns once all before `mark` has ended."""

    @abc.abstractmethod
    def synchronise(self) -> None:
        """Returns once all in this thread's queue has ended."""

    @abc.abstractmethod
    def drain(self, device: torch.device) -> None:
        """Returns once all in every queue of a device has ended, whoever queued it."""

    # --- queues ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def new_queue(self) -> Queue:
        """A queue of this device, for a thread that stays: the memory that work in a queue took and gave back is used again by
        that queue only."""

    @abc.abstractmethod
    def current_queue(self) -> Queue:
        """This thread's queue."""

    @abc.abstractmethod
    def enter(self, queue: Queue) -> None:
        """From now on this thread's work goes to `queue`, and its device is the queue's."""

    # --- memory ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Bytes of the host's memory (1-D, uint8) that the device reads and writes at full speed: page-locked."""

    @abc.abstractmethod
    def memory(self, nbytes: int) -> torch.Tensor:
        """Bytes of this device's memory (1-D, uint8)."""

    @abc.abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy between tensors of one shape, with a cast where their dtypes differ. Either may be the host's: that side
        must not be touched before the copy has ended."""
