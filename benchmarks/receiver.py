"""A replica without an engine for the trainers' benchmark: the real coordinator, one worker process and the installer, around a
module that holds the model's tensors under their checkpoint names.

Usage: receiver.py DIRECTORY LAYERS
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from benchmarks.model import bench_model
from inference_plugin.engines.live_model import LiveModel
from tests.support import plain_engine


class Holder(nn.Module):
    """The model's parameters, and a loader that copies each to its place."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = bench_model(layers)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own = dict(self.model.named_parameters())
        loaded = set()
        for name, tensor in tensors:
            if name in own:  # not the second name of a tied one
                own[name].data.copy_(tensor)
                loaded.add(name)
        return loaded


class HolderModel(LiveModel):
    """The `EngineModel` that the installer sees."""

    def __init__(self, layers: int, rank: int, tp: int) -> None:
        with torch.device("meta"):
            skeleton = Holder(layers)
        super().__init__(Holder(layers), torch.device("cpu"), skeleton)
        self.faults = plain_engine.Faults()

    def free_bytes(self) -> int:
        return 4 << 30


def main() -> None:
    directory, layers = sys.argv[1], int(sys.argv[2])
    plain_engine.PlainEngineModel = HolderModel  # type: ignore[misc]
    plain_engine.run_coordinator(directory, 1, layers, str(Path(directory) / "receiver.control"))


if __name__ == "__main__":
    main()
