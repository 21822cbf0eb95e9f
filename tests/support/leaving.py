"""The end of a trainer rank that a test runs in a process of its own."""

from __future__ import annotations

import gc

import torch.distributed as dist


def leave_process_groups() -> None:
    """Destroys this rank's process groups; models that hold one must be gone.

    gloo's threads that outlive this may abort the process while the interpreter ends (`examples/trainers/common.py`).
    """
    gc.collect()
    dist.destroy_process_group()
