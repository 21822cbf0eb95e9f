"""Serves a checkpoint on a device until standard input ends: `python -m tests.gpu.engine CHECKPOINT DEVICE`."""

from __future__ import annotations

import sys

from inference_plugin.engines.transformers import TransformersEngine


def main() -> None:
    checkpoint, device = sys.argv[1:]
    # Weights at fixed addresses on a GPU have a second set there to copy from; on a CPU they would have none for `cuda_ipc`.
    with TransformersEngine(checkpoint, device=device, captured_length=None if device == "cpu" else 256):
        sys.stdin.read()


if __name__ == "__main__":
    main()
