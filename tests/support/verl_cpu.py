"""A CPU as a platform of verl's own platform registry: verl's trainers run on it over gloo. verl has none for CPUs.

`VERL_USE_EXTERNAL_MODULES=tests.support.verl_cpu` registers it in each process that imports verl, `VERL_PLATFORM=cpu` chooses it.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

__all__ = ["PlatformCPU"]

RESOURCE = "WEIGHTWIRE_TEST_RAY_RESOURCE"
"""What Ray gives verl's workers, by Ray's name: "CPU", or "GPU", of which Ray is told that there are some. verl's server for vLLM
asks its workers which ones they have."""
IPC = "WEIGHTWIRE_TEST_IPC"
"""Set where verl is to believe that processes can share a device's memory: its worker beside vLLM asks, also before it receives
nothing."""
NOTHING = {
    name: lambda *_args, **_kwargs: 0
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
}
NOTHING |= {name: lambda *_args, **_kwargs: None for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats")}


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
    """What verl asks of a device, where there is none."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module: Any = SimpleNamespace(
        **NOTHING,
        current_device=lambda: "cpu",
        device_count=lambda: 1,
        get_device_name=lambda *_: "cpu",
        is_available=lambda: True,
        mem_get_info=lambda *_: (1 << 30, 1 << 30),
        set_device=lambda *_: None,
        synchronize=lambda *_: None,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "WEIGHTWIRE_TEST_NO_DEVICES"

    def ray_resource_name(self) -> str:
        return os.environ.get(RESOURCE, "CPU")

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus} if self.ray_resource_name() == "GPU" else {}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return IPC in os.environ
