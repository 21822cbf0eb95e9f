"""Memory that is not the host's, and the order of work on it: see `base`."""

from __future__ import annotations

from inference_plugin.devices.base import Device, Mark, Queue
from inference_plugin.devices.registry import DEVICES, device_of, in_use

__all__ = ["DEVICES", "Device", "Mark", "Queue", "device_of", "in_use"]
