"""Accelerators, through torch's module of their type (`torch.cuda`, `torch_npu.npu`, ...): their queues are its streams, their
marks its events (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from inference_plugin.devices.base import ByteCopy, Device, Mark, Queue, SharedMemory, Unused
from inference_plugin.devices.cuda_driver import CudaDriver, DeviceArray
from inference_plugin.devices.digests import LONGEST_MEDIUM_BYTES, Digests, TorchDigests
from inference_plugin.wire.errors import TransportUnavailable, lacks_resources
from inference_plugin.wire.pages import populate

__all__ = ["Accelerator"]

logger = logging.getLogger(__name__)


class Accelerator(Device):
    """All accelerators of one type."""

    def __init__(self, kind: str) -> None:
        self.type = kind
        self._digests: type[Digests] | None = None

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.type)

    def is_in_use(self) -> bool:
        return bool(self._module.is_initialized())

    def current(self) -> int:
        index: int = self._module.current_device()
        return index

    def use(self, index: int | None) -> None:
        if index is not None:
            self._module.set_device(index)

    def uuid(self) -> str:
        return self._uuid_of(self.current())

    def _uuid_of(self, index: int) -> str:
        return str(getattr(self._module.get_device_properties(index), "uuid", ""))

    def free_bytes(self, device: torch.device) -> int:
        return int(self._module.mem_get_info(device)[0])

    def record(self) -> Mark:
        # A thread that waits for a mark sleeps; torch.xpu's events know no other way, and not the word.
        mark = self._module.Event(**({} if self.type == "xpu" else {"blocking": True}))
        mark.record()
        return mark

    def wait(self, mark: Mark) -> None:
        self._module.current_stream().wait_event(mark)

    def finish(self, mark: Mark) -> None:
        mark.synchronize()

    def synchronise(self) -> None:
        self.finish(self.record())

    def drain(self, device: torch.device) -> None:
        self._module.synchronize(device)

    def new_queue(self) -> Queue:
        return self._module.Stream()

    def current_queue(self) -> Queue:
        return self._module.current_stream()

    def enter(self, queue: Queue) -> None:
        self._module.set_device(queue.device)
        self._module.set_stream(queue)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def page_lock(self, memory: torch.Tensor) -> Callable[[], None] | None:
        if self.why_not_shared() is not None:
            return None
        with contextlib.suppress(OSError):  # the driver finds the same, and says so
            # The driver would have missing pages made one after the other.
            populate(memory.numpy(), 0, memory.nbytes, for_writing=False)
        try:
            return _driver().page_lock(self.current(), memory.data_ptr(), memory.nbytes)
        except TransportUnavailable as error:
            logger.info("weightwire: a segment of %d MiB can't be page-locked: %s", memory.nbytes >> 20, error.message)
            return None

    def is_page_locked(self, memory: torch.Tensor) -> bool:
        return memory.is_pinned()

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device(self.type, self.current()))

    def return_cached(self) -> None:
        self._module.empty_cache()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def copy_bytes(self, copies: Sequence[ByteCopy]) -> None:
        where = torch.device(self.type, self.current())
        if self.why_not_shared() is not None or not all(c.target.device == c.source.device == where for c in copies):
            super().copy_bytes(copies)
            return
        # torch's calls for one copy take longer than the copy of a small tensor, and models have hundreds.
        _driver().copy(self.current(), self.current_queue().cuda_stream, copies)

    def new_digests(self) -> Digests:
        return (self._digests or self._chosen_digests())()

    def _chosen_digests(self) -> type[Digests]:
        """Triton's, if its kernels run here: to build them it needs a C compiler and Python's headers, which images without a
        development kit lack. Where only memory was short, they are tried again for the next digests."""
        self._digests = TorchDigests
        if self.type == "cuda":
            try:
                from inference_plugin.devices.digest_kernels import TritonDigests

                tried = TritonDigests()
                tried.add([self.memory(LONGEST_MEDIUM_BYTES + 1)])
                tried.end()
            except Exception as error:  # noqa: BLE001 -- whatever Triton raises
                logger.warning(
                    "weightwire: digests on the device are slow, as Triton's kernels don't run here: %s", error
                )
                if lacks_resources(error):
                    self._digests = None
            else:
                self._digests = TritonDigests
        return self._digests or TorchDigests

    # --- memory that processes share -----------------------------------------------------------------------------------

    def why_not_shared(self) -> str | None:
        if self.type != "cuda" or torch.version.cuda is None:
            return f"memory of {self.type} devices can't be shared between processes here"
        try:
            _driver()
        except OSError as error:
            return f"the CUDA driver's library can't be loaded: {error}"
        return None

    def reachable(self) -> tuple[str, ...]:
        mine = self.current()
        others = (index for index in range(self._module.device_count()) if index != mine)
        near = [index for index in others if self._module.can_device_access_peer(mine, index)]
        return tuple(self._uuid_of(index) for index in (mine, *near))

    def share(self, nbytes: int, unused: Unused) -> SharedMemory:
        return _driver().share(self.current(), nbytes, unused)

    def attach(self, handle: bytes, nbytes: int, uuid: str) -> SharedMemory:
        indices = range(self._module.device_count())
        if (index := next((i for i in indices if self._uuid_of(i) == uuid), None)) is None:
            raise TransportUnavailable(f"this process does not see the device {uuid}")
        return _driver().attach(index, handle, nbytes)


@cache
def _driver() -> CudaDriver:
    def as_tensor(array: DeviceArray, device: int) -> torch.Tensor:
        return torch.as_tensor(array, device=torch.device("cuda", device))

    return CudaDriver(as_tensor)
