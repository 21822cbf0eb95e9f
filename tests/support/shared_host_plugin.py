"""Makes `SharedHost` the device of the process that imports this."""

from __future__ import annotations

from inference_plugin.devices import DEVICES
from tests.support.shared_host import SharedHost

__all__ = ["plugin"]

plugin = object()
DEVICES["cpu"] = DEVICES["cuda"] = SharedHost()
"""Under both names: torch for CUDA calls CUDA the accelerator that is present, also where there is none."""
