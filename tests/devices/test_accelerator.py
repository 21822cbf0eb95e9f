"""What of an accelerator can be shown without one."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from inference_plugin.devices.accelerator import Accelerator
from inference_plugin.devices.digests import TorchDigests
from inference_plugin.wire.digest import digest_bytes
from tests.transports.cases import any_bits


class WithoutCompiler(TorchDigests):
    """Triton builds its launcher when the first kernel is launched."""

    def _read(self, pieces: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")


class InHostMemory(Accelerator):
    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


def test_where_triton_finds_no_compiler_digests_are_made_by_torch_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = SimpleNamespace(TritonDigests=WithoutCompiler)
    monkeypatch.setitem(sys.modules, "inference_plugin.devices.digest_kernels", kernels)
    device, tensor = InHostMemory("cuda"), any_bits(torch.uint8, 5000)
    for _ in range(2):
        assert device.digests([tensor]) == [digest_bytes(tensor.numpy())]
    assert [record.getMessage() for record in caplog.records] == [
        "weightwire: digests on the device are slow, as Triton's kernels don't run here: Failed to find C compiler. "
        "Please specify via CC environment variable"
    ]


def test_kernels_for_which_memory_was_short_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class ShortOnce(TorchDigests):
        def _read(self, pieces: object) -> None:
            made.append("kernels")
            if len(made) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            super()._read(pieces)  # type: ignore[arg-type]

    monkeypatch.setitem(
        sys.modules, "inference_plugin.devices.digest_kernels", SimpleNamespace(TritonDigests=ShortOnce)
    )
    device, tensor = InHostMemory("cuda"), any_bits(torch.uint8, 5000)
    for tried in (1, 3, 4):  # again once there is room, then without a trial
        assert device.digests([tensor]) == [digest_bytes(tensor.numpy())]
        assert len(made) == tried


class XpuEvent:
    """Takes what `torch.xpu.Event` takes."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True


def test_marks_are_made_with_what_the_kind_of_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "Event", XpuEvent)
    mark = Accelerator("xpu").record()
    assert isinstance(mark, XpuEvent) and mark.recorded
