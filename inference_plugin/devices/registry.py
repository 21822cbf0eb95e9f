"""The devices of this process."""

from __future__ import annotations

import torch

from inference_plugin.devices.accelerator import Accelerator
from inference_plugin.devices.base import Device
from inference_plugin.devices.host import Host

__all__ = ["DEVICES", "device_of", "in_use", "present"]

DEVICES: dict[str, Device] = {"cpu": Host()}
"""By `torch.device.type`. An accelerator is added when it is first asked for."""


def device_of(device: torch.device) -> Device:
    """The devices of the type of torch's `device`."""
    return _of(device.type)


def present() -> Device:
    """The accelerator that this process could use, initialised or not; the host, if there is none."""
    found = torch.accelerator.current_accelerator()
    return _of(found.type) if found is not None else DEVICES["cpu"]


def in_use() -> Device:
    """The accelerator that this process has initialised; the host, if there is none."""
    present()
    accelerators = (device for kind, device in DEVICES.items() if kind != "cpu")
    return next((device for device in accelerators if device.is_in_use()), DEVICES["cpu"])


def _of(kind: str) -> Device:
    if kind not in DEVICES:
        DEVICES[kind] = Accelerator(kind)
    return DEVICES[kind]
