"""The pieces of a slice, wherever its elements lie in memory."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.devices import DEVICES
from inference_plugin.transports.pieces import in_segment, pieces_of, rows_of_pieces
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest, TensorSpec
from tests.support.devices import LateDevice
from tests.support.plain_engine import manifest_of
from tests.transports.cases import any_bits
from trainer_adapters.sources.base import LocalSlice

DTYPES = [torch.bfloat16, torch.int64, torch.float32, torch.int8, torch.bool]


@st.composite
def lying_anyhow(draw: st.DrawFn) -> torch.Tensor:
    """Columns, every other row, a transposed or expanded tensor: of up to three dimensions."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 17, 150]), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    whole = torch.arange(int(np.prod(sizes))).remainder(251).to(dtype).reshape(sizes)
    for dim in range(whole.dim()):
        first = draw(st.integers(0, whole.shape[dim] - 1))
        last = draw(st.integers(first + 1, whole.shape[dim]))
        whole = whole[(slice(None),) * dim + (slice(first, last, draw(st.sampled_from([1, 1, 2]))),)]
    if draw(st.booleans()):
        whole = whole.transpose(0, -1)
    if draw(st.integers(0, 4)) == 0:
        whole = whole.unsqueeze(0).expand(3, *whole.shape)
    return whole


@settings(deadline=None)
@given(tensor=lying_anyhow(), piece_bytes=st.sampled_from([512, 4096, 1 << 20]))
def test_pieces_that_are_not_packed_are_those_that_are(tensor: torch.Tensor, piece_bytes: int) -> None:
    manifest = manifest_of({"weight": tensor.contiguous()})
    item: Any = LocalSlice(Box(0, (0,) * tensor.dim(), tuple(tensor.shape)), tensor)
    packed = [(place, data.tobytes()) for place, data in pieces_of(manifest, item, piece_bytes)]
    lying = [(place, rows.packed().tobytes()) for place, rows in rows_of_pieces(manifest, item, piece_bytes)]
    assert lying == packed


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_a_tensor_that_is_conjugated_or_negated_as_it_is_read_travels_as_its_values(view: Any, is_packed: bool) -> None:
    values = torch.arange(1, 25).view(4, 6) * (1 + 2j)
    tensor = view(values) if is_packed else view(values).T
    manifest = manifest_of({"t": tensor})
    pieces = pieces_of(manifest, LocalSlice(manifest.whole(0), tensor), 64)
    assert b"".join(data.tobytes() for _, data in pieces) == tensor.resolve_conj().resolve_neg().numpy().tobytes()


def test_long_rows_of_a_column_are_read_where_they_lie() -> None:
    whole = torch.arange(64 * 1024, dtype=torch.float32).reshape(64, 1024)
    columns = whole[:, 256:768]
    manifest = manifest_of({"weight": columns.contiguous()})
    ((_, rows),) = rows_of_pieces(manifest, LocalSlice(Box(0, (0, 0), (64, 512)), columns))
    assert (rows.rows, rows.row_bytes, rows.stride) == (64, 2048, 4096)
    ((_, same),) = rows_of_pieces(manifest, LocalSlice(Box(0, (0, 0), (64, 512)), columns.requires_grad_()))
    assert same.data.ctypes.data == rows.data.ctypes.data == columns.data_ptr()
    with torch.no_grad():
        whole += 1
    assert rows.packed().tobytes() == columns.detach().contiguous().numpy().tobytes(), "it is the tensor's own memory"


@pytest.mark.parametrize("shape", [(), (0, 4), (7, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_of_a_slice_in_a_devices_memory_are_those_of_the_hosts(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """An empty slice has none."""
    monkeypatch.setitem(DEVICES, "cuda", device := LateDevice())
    tensor = any_bits(dtype, *shape)
    manifest = manifest_of({"weight": tensor})
    whole = manifest.whole(0)
    here, there = LocalSlice(whole, tensor), LocalSlice(whole, device.tensor(tensor))
    found = [(place, data.tobytes()) for place, data in pieces_of(manifest, there)]
    assert found == [(place, data.tobytes()) for place, data in pieces_of(manifest, here)]


def test_where_a_piece_lies_is_nothing_that_the_garbage_collector_looks_through() -> None:
    """A worker keeps it for every piece of an update."""
    manifest = Manifest((TensorSpec("w", "bfloat16", (4, 6)),))
    lying = in_segment(manifest, Box(0, (1, 2), (2, 3)))
    gc.collect()  # which finds out that a tuple holds numbers only
    assert not any(map(gc.is_tracked, (lying, lying.landing, lying.landing.strides, lying.rows)))


def test_a_box_outside_of_its_tensor_lies_nowhere() -> None:
    manifest = Manifest((TensorSpec("w", "bfloat16", (4, 6)),))
    with pytest.raises(ManifestMismatch):
        in_segment(manifest, Box(0, (3, 0), (2, 6)))
