"""Memory that is not the host's, and the order of work on it: see `base`."""

from __future__ import annotations

from inference_plugin.devices.base import Device, Mark, Queue, SharedMemory, Unused
from inference_plugin.devices.digests import Digests
from inference_plugin.devices.registry import DEVICES, device_of, in_use, present

__all__ = ["DEVICES", "Device", "Digests", "Mark", "Queue", "SharedMemory", "Unused", "device_of", "in_use", "present"]
