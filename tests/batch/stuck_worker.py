"""A rollout worker in a process of its own, one of whose puts stops in the middle of copying: a page of its rows never comes.

The kernel keeps whoever reads such a page waiting (userfaultfd, `man 2 userfaultfd`); other threads go on.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.batch.owners import tell
from trainer_adapters.batch.rollouts.worker import Generated, RolloutWorker
from trainer_adapters.batch.store import Store

KEYS, ROWS, ROW_BYTES = ("tokens", "logprobs", "mask"), 8, 64 << 10

USERFAULTFD, USER_MODE_ONLY = 323, 1
API, REGISTER = 0xC018AA3F, 0xC020AA00
API_VERSION, MISSING = 0xAA, 1


def rows_of(task_id: str) -> dict[str, list[torch.Tensor]]:
    """A task's rows by key; the same for the same id."""
    random = torch.Generator().manual_seed(sum(map(ord, task_id)))
    return {key: [torch.randint(0, 256, (ROW_BYTES,), generator=random).byte() for _ in range(ROWS)] for key in KEYS}


def open_faults() -> int:
    """A userfaultfd. Raises OSError where the kernel has none for this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (fd := libc.syscall(USERFAULTFD, os.O_CLOEXEC | USER_MODE_ONLY)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    fcntl.ioctl(fd, API, struct.pack("QQQ", API_VERSION, 0, 0))
    return int(fd)


def stuck(row: torch.Tensor, readable: int, reached: Path) -> torch.Tensor:
    """A copy of `row`, from whose byte `readable` on, a multiple of the page size, nobody gets any further; `reached` appears as
    soon as somebody tries."""
    memory = mmap.mmap(-1, row.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:readable] = row[:readable].numpy().tobytes()
    copy = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))  # which keeps the mapping
    faults = open_faults()
    fcntl.ioctl(faults, REGISTER, struct.pack("QQQQ", copy.data_ptr(), row.nbytes, MISSING, 0))

    def wait() -> None:
        os.read(faults, 32)
        reached.touch()

    threading.Thread(target=wait, daemon=True).start()
    return copy


async def generate(reached: str, task_id: str, payload: dict[str, Any]) -> Generated:
    """`payload["stuck"]`: key, row and byte at which the put stops; only where `reached` is given."""
    rows = rows_of(task_id)
    if reached and (at := payload.get("stuck")):
        key, row, readable = at
        rows[key][row] = stuck(rows[key][row], readable, Path(reached))
    return Generated(rows)


def run(told: str, reached: str = "") -> None:
    with (
        Store(budget_bytes=64 << 20) as store,
        RolloutWorker(functools.partial(generate, reached), slots=8, store=store),
    ):
        tell(told, store.owner, [])
        threading.Event().wait()
