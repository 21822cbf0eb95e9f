"""Runs in a process of its own: a trainer that kills or stops itself in the middle of its update."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from inference_plugin.net.channel import Channel
from inference_plugin.wire.errors import WeightwireError
from tests.support import poison
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint
from trainer_adapters import ModuleAdapter, WeightSource


def lone_trainer(
    weights: int | str, version: int, at: int, signal_number: int, out: str, options: dict[str, Any]
) -> None:
    """One update, in which it kills or stops itself right before its n-th message. `weights`: a seed of `plain_engine`'s, or
    the directory of a checkpoint."""
    torch.set_num_threads(1)
    poison.spread()
    send, sent = Channel.send, 0

    def sending(channel: Channel, body: Any, payload: Any = None) -> None:
        nonlocal sent
        sent += 1
        if sent == at:
            os.kill(os.getpid(), signal_number)
        send(channel, body, payload)

    Channel.send = sending  # type: ignore[method-assign]
    source: WeightSource
    if isinstance(weights, int):
        source = ShardSource(checkpoint(weights))
    else:
        source = ModuleAdapter(load_file(f"{weights}/model.safetensors"))
    noted: dict[str, Any]
    with SyncManager(**options) as manager:
        try:
            noted = {"ok": msgspec.to_builtins(manager.update(source, version))}
        except WeightwireError as error:
            noted = {"error": type(error).__name__, "text": str(error)}
    Path(f"{out}.new").write_text(json.dumps(noted))
    Path(f"{out}.new").rename(out)
