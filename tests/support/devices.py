"""A device without hardware, whose queues run as late as they may.

Tensors say that they are CUDA's and hold host memory; torch's calls on them are put into the calling thread's queue. Nothing
runs before somebody waits for it: then all that it has to wait for runs first, and nothing else. So where a wait was left out,
what should have been read is not there yet, and the bytes differ; on hardware that would depend on chance.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from inference_plugin.devices import Device

__all__ = ["DeviceTensor", "LateDevice", "foreach_copy_of_a_gpu"]

NEVER_WRITTEN = 0xEE
"""What memory holds until the work that fills it has run."""


@dataclass(eq=False)
class Queue:
    """Work in order; `done` of it has run."""

    work: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0

    def run(self, until: int) -> None:
        with torch.inference_mode():
            while self.done < until:
                self.done += 1
                self.work[self.done - 1]()


class LateDevice(Device):
    """One device. `calls`: the waits that it was asked for, in order. `ignores`: those that it does not do, to show that a test
    finds out."""

    type = "cuda"

    def __init__(self, *ignores: str) -> None:
        self.calls: list[str] = []
        self.ignores = frozenset(ignores)
        self._default = Queue()
        self._queues: list[Queue] = [self._default]
        self._of_thread = threading.local()
        self._lock = threading.RLock()

    def tensor(self, values: torch.Tensor) -> DeviceTensor:
        """Device memory that holds a copy of `values`, as if it had always been there."""
        return DeviceTensor(values.clone(), self)

    def put(self, work: Callable[[], None]) -> None:
        """Queues work of this thread."""
        with self._lock:
            self._mine.work.append(work)

    @property
    def unfinished(self) -> int:
        """Pieces of work that have not run yet."""
        return sum(len(queue.work) - queue.done for queue in self._queues)

    @property
    def _mine(self) -> Queue:
        queue: Queue = getattr(self._of_thread, "queue", self._default)
        return queue

    def _does(self, what: str) -> bool:
        self.calls.append(what)
        return what not in self.ignores

    # --- Device ------------------------------------------------------------------------------------------------------

    def is_in_use(self) -> bool:
        return True

    def current(self) -> int | None:
        return 0

    def use(self, index: int | None) -> None:
        assert index in (0, None)

    def uuid(self) -> str:
        return "late"

    def free_bytes(self, device: torch.device) -> int:
        return 1 << 40

    def record(self) -> Any:
        with self._lock:
            return self._mine, len(self._mine.work)

    def wait(self, mark: Any) -> None:
        if self._does("wait"):
            self.put(lambda: mark[0].run(mark[1]))

    def finish(self, mark: Any) -> None:
        with self._lock:
            if not self._does("finish"):
                return
            mark[0].run(mark[1])

    def synchronise(self) -> None:
        with self._lock:
            if not self._does("synchronise"):
                return
            self._mine.run(len(self._mine.work))

    def drain(self, device: torch.device) -> None:
        with self._lock:
            if not self._does("drain"):
                return
            for queue in self._queues:
                queue.run(len(queue.work))

    def new_queue(self) -> Queue:
        self._queues.append(Queue())
        return self._queues[-1]

    def current_queue(self) -> Queue:
        return self._mine

    def enter(self, queue: Queue) -> None:
        self._of_thread.queue = queue

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), NEVER_WRITTEN, dtype=torch.uint8)

    def memory(self, nbytes: int) -> torch.Tensor:
        return DeviceTensor(self.host_memory(nbytes), self)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def run() -> None:
            _held(target).copy_(_held(source))

        self.put(run)


class DeviceTensor(torch.Tensor):
    """Memory of a `LateDevice`: `held`."""

    held: torch.Tensor
    of: LateDevice

    @staticmethod
    def __new__(cls, held: torch.Tensor, of: LateDevice) -> DeviceTensor:
        with torch.inference_mode(False):  # an inference tensor can't be a view's base
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device="cuda:0",
            )
        return made

    def __init__(self, held: torch.Tensor, of: LateDevice) -> None:
        self.held = held
        self.of = of

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = next(leaf.of for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor))
        to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if to_host:  # torch waits for such a copy
            device.synchronise()
        elif "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        held_args, held_kwargs = tree_map(_held, args), tree_map(_held, kwargs)
        if to_host:
            return func(*held_args, **held_kwargs)
        if func.is_view:
            return tree_map(lambda out: DeviceTensor(out, device), func(*held_args, **held_kwargs))
        if func._schema.is_mutable:

            def change() -> None:
                func(*held_args, **held_kwargs)

            device.put(change)
            return args[0] if func._schema.returns else None
        found = func(*held_args, **held_kwargs)  # for its shape
        for leaf in tree_leaves(found):
            _poison(leaf)

        def compute() -> None:
            for made, computed in zip(tree_leaves(found), tree_leaves(func(*held_args, **held_kwargs)), strict=True):
                made.copy_(computed)

        device.put(compute)
        return tree_map(lambda out: DeviceTensor(out, device), found)


def foreach_copy_of_a_gpu(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """`torch._foreach_copy_`, with the error of its kernel for CUDA. `torch` knows fewer dtypes there than on the host."""
    if targets[0].dtype == torch.float8_e8m0fnu:
        raise RuntimeError("\"foreach_tensor_copy\" not implemented for 'Float8_e8m0fnu'")
    _foreach_copy(targets, sources)


_foreach_copy = torch._foreach_copy_


def _held(value: Any) -> Any:
    return value.held if isinstance(value, DeviceTensor) else value


def _poison(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.uint8).fill_(NEVER_WRITTEN)
