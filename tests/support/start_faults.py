"""Failures of our start in an engine, on order: `WEIGHTWIRE_TEST_START_FAULT`, read when something starts.

"rank 1": that rank's card can't be made, its server runs already. "card": the replica's card can't be written, all else
is there. "constructor": the model's class can't be called a second time. "gone": a touched place of vLLM is missing (when
this module is imported).
"""

from __future__ import annotations

import errno
import os
import traceback
from typing import Any

import torch.distributed as dist
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.net import addresses

__all__ = ["give"]

VARIABLE = "WEIGHTWIRE_TEST_START_FAULT"


def give() -> None:
    free_bytes, write_card = LiveModel.free_bytes, addresses.write_card

    def free_bytes_unless(model: Any) -> int:
        if dist.is_initialized() and os.environ.get(VARIABLE) == f"rank {dist.get_rank()}":
            raise RuntimeError("planned fault: no card of this rank")
        return free_bytes(model)

    def write_card_unless(card: Any) -> None:
        if os.environ.get(VARIABLE) == "card":
            raise OSError(errno.EACCES, "planned fault: permission denied")
        write_card(card)

    register_parameter = nn.Module.register_parameter

    def register_parameter_unless(module: nn.Module, name: str, parameter: Any) -> None:
        if os.environ.get(VARIABLE) == "constructor" and any(
            "skeleton" in frame.name for frame in traceback.extract_stack()
        ):
            raise RuntimeError("planned fault: a constructor that runs once only")
        register_parameter(module, name, parameter)

    nn.Module.register_parameter = register_parameter_unless  # type: ignore[method-assign]
    LiveModel.free_bytes = free_bytes_unless  # type: ignore[method-assign]
    addresses.write_card = write_card_unless
    if os.environ.get(VARIABLE) == "gone":
        import vllm.entrypoints.launchers.app as launcher

        del launcher.init_entrypoints_middleware
