"""Devices: their memory, and the order of work on them. `base` has the interface.

A thread that may run torch is started by `start_thread`, so that it ends before the process does. Knows no message and no engine.
"""

from __future__ import annotations

from inference_plugin.devices.base import ByteCopy, Device, Mark, Queue, SharedMemory, Unused
from inference_plugin.devices.digests import Digests, Offsets, Runs
from inference_plugin.devices.registry import DEVICES, device_of, in_use, present
from inference_plugin.devices.threads import start_thread

__all__ = [
    "DEVICES", "ByteCopy", "Device", "Digests", "Mark", "Offsets", "Queue", "Runs", "SharedMemory", "Unused", "device_of",
    "in_use", "present", "start_thread",
]  # fmt: skip
