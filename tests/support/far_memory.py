"""A device `far` whose memory the host can't touch: a pointer to it that anything but torch follows ends the process.

`register` makes it torch's accelerator in this process, for as long as the process lives: no other one may be there. It has no
queues; for the order of work there is `tests/support/devices.py`.
"""

from __future__ import annotations

import subprocess
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch

__all__ = ["VARIABLE", "build", "register", "taken_bytes"]

VARIABLE = "WEIGHTWIRE_TEST_FAR"
"""In the environment of a process that has this device: where `build` has put it."""

SOURCE = Path(__file__).with_suffix(".cpp")
TOTAL_BYTES = 8 << 30


def taken_bytes() -> int:
    """Bytes of all tensors that lie there, in whole pages."""
    taken: int = torch.ops.far.allocated_bytes()
    return taken


class _Event:
    def __init__(self, **_: Any) -> None: ...

    def record(self, _: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class _Stream:
    def __init__(self) -> None:
        self.device = torch.device("far:0")

    def wait_event(self, _: _Event) -> None: ...


def build(target: Path) -> None:
    """Compiles the device, which takes ten seconds, into a shared library."""
    torch_at = Path(torch.__file__).parent
    headers = [torch_at / "include", torch_at / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = ("-lc10", "-ltorch_cpu", "-ltorch")
    command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", *(f"-I{path}" for path in headers), str(SOURCE)]
    subprocess.run([*command, "-o", str(target), f"-L{torch_at}/lib", *libraries], check=True)


def register(library: str) -> None:
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("far")
    module: Any = types.ModuleType("torch.far")
    module.Event, module.Stream = _Event, _Stream
    module.is_available = lambda: True
    module.is_initialized = torch.ops.far.is_in_use
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module.synchronize = module.set_stream = lambda *_: None
    module.empty_cache = lambda: None
    module.current_stream = _Stream
    module.mem_get_info = lambda *_: (TOTAL_BYTES - taken_bytes(), TOTAL_BYTES)
    module.get_device_properties = lambda *_: types.SimpleNamespace(uuid="far")
    torch._register_device_module("far", module)
