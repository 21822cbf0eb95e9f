"""Tensors and the bytes of a segment: what goes in through a box comes out of it, whatever the dtype, shape
or strides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.geometry import Box, box_volume
from inference_plugin.wire.manifest import ALIGNMENT_BYTES, DTYPE_BYTES, Manifest, TensorSpec
from inference_plugin.wire.tensors import box_view, bytes_view, dtype_name, torch_dtype

DTYPES = sorted(DTYPE_BYTES)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
specs = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=5)


def random_bytes(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern at all, NaNs with payloads included; booleans are 0 or 1."""
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (raw % 2 if dtype == "bool" else raw).view(torch_dtype(dtype)).view(shape)


def as_strided_copy(tensor: torch.Tensor, way: int) -> torch.Tensor:
    """The same values lying differently: as they are, with dimensions reversed, or in every second place."""
    if way == 1:
        reverse = tuple(range(tensor.dim()))[::-1]
        return tensor.permute(reverse).contiguous().permute(reverse)
    if way == 2 and tensor.dim():
        wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)[..., ::2]
        wide.copy_(tensor)
        return wide
    return tensor


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(bytes_view(a.contiguous()), bytes_view(b.contiguous()))
    )


@given(specs, st.data())
@settings(max_examples=200, deadline=None)
def test_boxes_written_with_any_strides_read_back_bit_for_bit(
    specs: list[tuple[str, tuple[int, ...]]], data: st.DataObject
) -> None:
    manifest = Manifest(tuple(TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(specs))).check()
    segment = torch.full((manifest.layout.nbytes,), 0xAB, dtype=torch.uint8)
    tensors = [random_bytes(dtype, shape, seed) for seed, (dtype, shape) in enumerate(specs)]
    for i, tensor in enumerate(tensors):
        cut = data.draw(st.integers(0, tensor.shape[0])) if tensor.dim() else 0
        whole = manifest.whole(i)
        boxes = [whole]
        if tensor.dim():
            boxes = [
                Box(i, whole.offsets, (cut, *whole.sizes[1:])),
                Box(i, (cut, *whole.offsets[1:]), (tensor.shape[0] - cut, *whole.sizes[1:])),
            ]
        for box in boxes:
            part = tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
            view = box_view(segment, manifest, box)
            assert view.shape == box.sizes
            view.copy_(as_strided_copy(part, data.draw(st.integers(0, 2))))
    covered = torch.zeros(manifest.layout.nbytes, dtype=torch.bool)
    for i, tensor in enumerate(tensors):
        assert same_bytes(box_view(segment, manifest, manifest.whole(i)), tensor)
        start = manifest.layout.offsets[i]
        assert start % ALIGNMENT_BYTES == 0
        assert not covered[start : start + tensor.nbytes].any()
        covered[start : start + tensor.nbytes] = True
    assert bool((segment[~covered] == 0xAB).all()), "padding was written"


@given(shapes, st.sampled_from(DTYPES), st.data())
@settings(max_examples=100, deadline=None)
def test_a_box_is_a_view_of_exactly_its_elements(shape: tuple[int, ...], dtype: str, data: st.DataObject) -> None:
    manifest = Manifest((TensorSpec("before", "uint8", (3,)), TensorSpec("it", dtype, shape)))
    tensor = random_bytes(dtype, shape, 1)
    segment = torch.zeros(manifest.layout.nbytes, dtype=torch.uint8)
    box_view(segment, manifest, manifest.whole(1)).copy_(tensor)
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    view = box_view(segment, manifest, Box(1, offsets, sizes))
    expected = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    assert same_bytes(view, expected)
    if box_volume(Box(1, offsets, sizes)):
        assert view.untyped_storage().data_ptr() == segment.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_a_manifest_is_torchs_own_with_its_size(name: str) -> None:
    assert dtype_name(torch_dtype(name)) == name
    assert torch_dtype(name).itemsize == DTYPE_BYTES[name]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3)])
@pytest.mark.parametrize("name", DTYPES)
def test_bytes_are_a_flat_view_of_the_same_memory(name: str, shape: tuple[int, ...]) -> None:
    tensor = random_bytes(name, shape, 7)
    view = bytes_view(tensor)
    assert (view.dtype, view.dim(), view.numel()) == (torch.uint8, 1, tensor.nbytes)
    if tensor.numel():
        assert view.data_ptr() == tensor.data_ptr()


def test_bytes_of_a_parameter_need_no_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    view = bytes_view(parameter)
    assert not view.requires_grad
    view.zero_()
    assert not parameter.any()


def test_tensors_without_plain_bytes_are_refused() -> None:
    for tensor in (torch.ones(2, 3).T, torch.ones(2, dtype=torch.complex64).conj(), torch.ones(4)[::2]):
        with pytest.raises(ValueError, match="no plain bytes"):
            bytes_view(tensor)


def test_unknown_dtypes_are_refused_by_name_and_by_value() -> None:
    with pytest.raises(ManifestMismatch, match=r"unknown dtype 'float7' -- use one of float64, float32"):
        torch_dtype("float7")
    with pytest.raises(ManifestMismatch, match=r"torch.quint8 can't travel"):
        dtype_name(torch.quint8)


def test_segments_and_boxes_that_do_not_fit_are_refused() -> None:
    manifest = Manifest((TensorSpec("w", "float32", (4, 4)),))
    segment = torch.zeros(manifest.layout.nbytes + 4, dtype=torch.uint8)
    with pytest.raises(ManifestMismatch, match="w: box at"):
        box_view(segment, manifest, Box(0, (2, 0), (3, 4)))
    with pytest.raises(ManifestMismatch, match="box of tensor 1"):
        box_view(segment, manifest, Box(1, (), ()))
    with pytest.raises(ValueError, match="has 100 bytes"):
        box_view(segment[:100], manifest, manifest.whole(0))
    with pytest.raises(ValueError, match="unaligned"):
        box_view(segment[1:], manifest, manifest.whole(0))
    for other in (torch.zeros(600), segment.view(2, -1), segment[::2]):
        with pytest.raises(ValueError, match="1-D, contiguous and uint8"):
            box_view(other, manifest, manifest.whole(0))
