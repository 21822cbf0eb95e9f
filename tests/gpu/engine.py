"""Serves a checkpoint on a device until standard input ends: `python -m tests.gpu.engine CHECKPOINT DEVICE`."""

from __future__ import annotations

import sys

from inference_plugin.engines.transformers import TransformersEngine


def main() -> None:
    with TransformersEngine(sys.argv[1], device=sys.argv[2]):
        sys.stdin.read()


if __name__ == "__main__":
    main()
