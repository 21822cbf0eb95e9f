"""NaN and infinity are found in every dtype that travels, and nothing else is taken for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inference_plugin.wire.manifest import DTYPE_BYTES
from inference_plugin.wire.tensors import bytes_view, torch_dtype
from trainer_adapters.update import finite

WAYS = [finite.has_all_bits, finite.has_all_bits_by_numpy]
FLOATS = [name for name in DTYPE_BYTES if name.startswith(("float", "bfloat", "complex"))]


@pytest.fixture(params=WAYS, ids=["as built", "numpy"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    monkeypatch.setattr(finite, "has_all_bits", request.param)
    found: Callable[..., bool] = request.param
    return found


def all_finite(tensor: torch.Tensor) -> bool:
    name = str(tensor.dtype).removeprefix("torch.")
    return finite.all_finite(bytes_view(tensor.contiguous()).numpy(), name)


@pytest.mark.parametrize("name", FLOATS)
def test_every_bit_pattern_is_judged_as_torch_judges_it(name: str) -> None:
    dtype = torch_dtype(name)
    if dtype.itemsize > 2:
        extremes = torch.finfo(dtype)
        ordinary = torch.tensor([0.0, -0.0, 1.0, extremes.max, extremes.min, extremes.tiny], dtype=dtype)
        assert all_finite(ordinary)
        for bad in (float("nan"), float("inf"), float("-inf"), -float("nan")):
            assert not all_finite(torch.cat([ordinary, torch.tensor([bad], dtype=dtype)]))
        return
    count = 1 << (8 * dtype.itemsize)
    bits = torch.arange(count, dtype=torch.int32).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    values = bits.view(dtype)
    judged = values.float().isfinite()
    assert not all_finite(values) and all_finite(values[judged])
    for i in (~judged).nonzero().flatten().tolist()[:: max(1, count // 4096)]:
        assert not all_finite(values[i : i + 1])


@pytest.mark.parametrize("at", [0, 1, 2047, 2048, 99_998, 99_999])
def test_one_nan_is_found_wherever_it_is(at: int) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert all_finite(values) and all_finite(values[:0])
    values[at] = float("nan")
    assert not all_finite(values)
    assert all_finite(torch.cat([values[:at], values[at + 1 :]]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_whole_numbers_are_finite(dtype: torch.dtype) -> None:
    assert all_finite(torch.full((1000,), -1).to(dtype))


def test_bytes_that_are_no_whole_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="elements of 4 bytes"):
        finite.all_finite(bytes(7), "float32")
