"""Devices: their memory, and the order of work on them. `base` has the interface."""

from __future__ import annotations

from inference_plugin.devices.base import Device, Mark, Queue, SharedMemory, Unused
from inference_plugin.devices.digests import Digests
from inference_plugin.devices.registry import DEVICES, device_of, in_use, present
from inference_plugin.devices.threads import start_thread

__all__ = [
    "DEVICES",
    "Device",
    "Digests",
    "Mark",
    "Queue",
    "SharedMemory",
    "Unused",
    "device_of",
    "in_use",
    "present",
    "start_thread",
]
