"""Rows that C finds in a list of tensors: the same bytes as torch gives, and nothing said of tensors that it can't vouch for."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import pytest
import torch

from inference_plugin.wire import tensors
from inference_plugin.wire.compiled import WHY_NOT
from inference_plugin.wire.copying import places_in
from inference_plugin.wire.manifest import DTYPE_BYTES
from inference_plugin.wire.tensors import bytes_view, packed_rows, tensors_over, torch_dtype

pytestmark = pytest.mark.skipif(
    tensors.EXCHANGE is None or bool(WHY_NOT), reason=f"torch before 2.10, or not compiled: {WHY_NOT}"
)

COMPLEX = {"complex32", "complex64", "complex128"}
"""They may be conjugated when they are read, so they are always looked at one by one."""


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BYTES) - COMPLEX))
def test_the_bytes_at_the_addresses_are_those_of_the_tensors(dtype: str) -> None:
    made = torch.randint(0, 2, (9, 3)).to(torch_dtype(dtype))
    rows = (made[:4], made[4:5], made[5:5], made[5:])
    packed = packed_rows(rows)
    assert packed is not None
    assert (packed.shape, packed.lengths, packed.dtype) == ((4, 3), (4, 1, 0, 4), dtype)
    assert packed.nbytes == 9 * 3 * made.itemsize
    for row, (address, nbytes) in zip(rows, places_in(packed.places), strict=True):
        assert ctypes.string_at(address, nbytes) == bytes_view(row).numpy().tobytes()


def test_rows_without_dimensions_have_an_empty_shape() -> None:
    numbers = (torch.tensor(5), torch.tensor(7))
    packed = packed_rows(numbers)
    assert packed is not None and (packed.shape, packed.lengths, packed.nbytes) == ((), (1, 1), 16)
    assert places_in(packed.places) == [(number.data_ptr(), 8) for number in numbers]


def freed(start: int) -> torch.Tensor:
    whole = torch.ones(6)
    part = whole[start : start + 3]
    whole.untyped_storage().resize_(0)
    return part


def nested() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(torch.ones(6)[::2], id="strided"),
        pytest.param(torch.ones(1).expand(3), id="expanded"),
        pytest.param(torch._neg_view(torch.ones(3)), id="lazily negated"),
        pytest.param(torch.ones(3).to_sparse(), id="sparse"),
        pytest.param(torch.ones(3, device="meta"), id="on the meta device"),
        pytest.param(torch.nn.Parameter(torch.ones(3)), id="a subclass"),
        pytest.param(torch.ones(3, dtype=torch.complex64).conj(), id="conjugated"),
        pytest.param(freed(0), id="freed"),
        pytest.param(freed(2), id="freed, at an offset"),
        pytest.param(nested(), id="nested"),
        pytest.param([1.0, 1.0, 1.0], id="a list"),
        pytest.param(None, id="None"),
    ],
)
def test_nothing_is_said_of_rows_whose_memory_does_not_hold_their_values_in_order(odd: Any) -> None:
    plain = torch.ones(3)
    assert packed_rows((plain, plain)) is not None
    for rows in ((odd, plain), (plain, odd), (odd, odd)):
        assert packed_rows(rows) is None


def test_nothing_is_said_of_rows_that_do_not_fit_together_and_of_no_rows() -> None:
    assert packed_rows((torch.ones(2, 3, 4), torch.ones(5, 3, 4))) is not None
    for other in (torch.ones(2, 3, 5), torch.ones(2, 4, 4), torch.ones(2, 12), torch.ones(2, 3, 4).double()):
        assert packed_rows((torch.ones(2, 3, 4), other)) is None
    assert packed_rows(()) is None


class Keeper:
    """Memory of its own: 48 bytes."""

    def __init__(self, value: int) -> None:
        self.memory = torch.full((48,), value, dtype=torch.uint8)

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


@pytest.mark.parametrize("dtype", sorted(tensors.DLPACK_TYPES))
def test_tensors_over_memory_have_its_values_and_keep_it_until_the_last_view_ends(dtype: str) -> None:
    kind = torch_dtype(dtype)
    first, second = Keeper(1), Keeper(0)
    first.memory[:] = torch.arange(48) % 2
    expected = [row.clone() for keeper in (first, second) for row in keeper.memory.view(kind).view(-1, 2)[:3]]
    lengths = [(1, 0, 2), (3,)]
    made = tensors_over([first, second], [first.address, second.address], lengths, (2,), dtype)
    assert made is not None and [each.dtype for each in made] == [kind] * 4
    assert [each.shape for each in made] == [(1, 2), (0, 2), (2, 2), (3, 2)]
    assert torch.equal(torch.cat(made), torch.stack(expected))
    assert made[2].is_contiguous() and made[2].untyped_storage().nbytes() == 4 * kind.itemsize
    view, keepers = made[2].flatten()[1:], (weakref.ref(first), weakref.ref(second))
    del first, second
    made.clear()
    assert keepers[0]() is not None and keepers[1]() is None
    del view
    assert keepers[0]() is None


def test_tensors_without_elements_and_of_dtypes_that_dlpack_does_not_name() -> None:
    keeper = Keeper(3)
    made = tensors_over([keeper, keeper], [keeper.address] * 2, [(0,), (1, 2)], (), "int32")
    assert made is not None and [each.tolist() for each in made] == [[], [0x03030303], [0x03030303] * 2]
    made = tensors_over([keeper], [keeper.address], [(2, 1)], (0, 5), "int32")
    assert made is not None and [each.shape for each in made] == [(2, 0, 5), (1, 0, 5)]
    assert tensors_over([], [], [], (), "int32") == []
    assert tensors_over([keeper], [keeper.address], [()], (), "int32") == []
    assert tensors_over([keeper], [keeper.address], [(2,)], (), "float8_e4m3fn") is None


def test_tensors_over_refuses_lists_that_do_not_fit_and_shapes_of_no_numbers() -> None:
    keeper = Keeper(3)
    with pytest.raises(ValueError, match="1 keepers, 0 addresses"):
        tensors_over([keeper], [], [()], (), "int32")
    for lengths in ((1, "x"), [2], (1 << 63,)):
        with pytest.raises((TypeError, SystemError, OverflowError)):
            tensors_over([keeper], [keeper.address], [lengths], (), "int32")  # type: ignore[list-item]
    for inner in (("x",), [2]):
        with pytest.raises(TypeError):
            tensors_over([keeper], [keeper.address], [(1,)], inner, "int32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a tensor of -1 rows"):
        tensors_over([keeper], [keeper.address], [(1, -1)], (), "int32")
    with pytest.raises(ValueError, match="65 dimensions"):
        tensors_over([keeper], [keeper.address], [(1,)], (1,) * 64, "int32")
    gone = weakref.ref(keeper)
    del keeper
    assert gone() is None
