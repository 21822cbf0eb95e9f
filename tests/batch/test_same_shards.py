"""A put reads a list's tensors in one C call where it can, and a tuple's one by one: both give the same shard or the same error.

Without the compiled functions both go one by one, and the rows are still compared with what torch says of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.manifest import DTYPE_BYTES
from inference_plugin.wire.tensors import torch_dtype
from tests.support.rig import runtime
from trainer_adapters.batch.records import Entry, Kind
from trainer_adapters.batch.store import Store


class Subclass(torch.Tensor):
    """As libraries make them, to override some of torch's functions."""


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with others in between."""
    return torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]


def at_an_offset(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[min(1, tensor.numel()) :].view(tensor.shape)


def reversed_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same values; their last dimension comes first in memory."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1) if tensor.dim() else tensor


def needs_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(tensor.shape) if tensor.dim() else tensor


def lazily(tensor: torch.Tensor) -> torch.Tensor:
    """Negated, and conjugated where there is something to conjugate, when it is read."""
    if not tensor.is_complex() and not tensor.is_floating_point():
        return tensor
    return torch._neg_view(tensor.conj())


FORMS = (
    torch.clone,
    strided,
    at_an_offset,
    reversed_in_memory,
    needs_grad,
    expanded,
    lazily,
    lambda tensor: tensor.as_subclass(Subclass),
    lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
)


@st.composite
def lists_of_rows(draw: Any) -> list[torch.Tensor]:
    """Rows of one key: mostly such as belong together, in any form."""
    dtypes = [draw(st.sampled_from([name for name in DTYPE_BYTES if hasattr(torch, name)]))]
    inner = [draw(st.lists(st.integers(0, 3), max_size=2))]
    if draw(st.integers(0, 9)) == 0:
        dtypes.append("int16")
    if draw(st.integers(0, 9)) == 0:
        inner.append([2])
    without_dimension, equal = draw(st.integers(0, 4)) == 0, draw(st.booleans())
    length = draw(st.integers(0, 300))
    forms = draw(st.lists(st.sampled_from(FORMS), min_size=1, max_size=3))
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        first = length if equal else draw(st.integers(0, 300))
        shape = () if without_dimension else (first, *draw(st.sampled_from(inner)))
        rows.append(draw(st.sampled_from(forms))(values(shape, draw(st.sampled_from(dtypes)))))
    return rows


def values(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Any bits: also NaN, of which there are many."""
    count = int(torch.Size(shape).numel())
    bits = torch.randint(0, 2 if dtype == "bool" else 256, (count * DTYPE_BYTES[dtype],), dtype=torch.uint8)
    return bits.view(torch_dtype(dtype)).view(shape)


def bytes_of(row: torch.Tensor) -> bytes:
    """What torch reads, in the order of its elements."""
    read = row.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().reshape(-1)
    return bytes(torch.empty(len(read), dtype=read.dtype).copy_(read).view(torch.uint8).numpy())


def put(store: Store, task_id: str, rows: Any) -> Entry | str:
    """The entry; or the error, without the id."""
    try:
        return store.put(task_id, {"key": rows})[0]
    except WeightwireError as error:
        return f"{type(error).__name__}: {error.message}".replace(repr(task_id), "")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with runtime(monkeypatch), Store(budget_bytes=64 << 20) as made:
        yield made


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lists_of_rows())
def test_any_list_of_tensors_makes_the_shard_that_its_tensors_make_one_by_one(
    store: Store, rows: list[torch.Tensor]
) -> None:
    at_once, one_by_one = put(store, "at once", list(rows)), put(store, "one by one", tuple(rows))
    if isinstance(at_once, str) or isinstance(one_by_one, str):
        assert at_once == one_by_one
        return
    assert at_once == msgspec.structs.replace(one_by_one, shard=at_once.shard)
    expected = b"".join(map(bytes_of, rows))
    assert (at_once.nbytes, at_once.digest) == (len(expected), digest_bytes(expected))
    assert at_once.rows == len(rows) and torch_dtype(at_once.dtype) == rows[0].dtype
    for entry in (at_once, one_by_one):
        part = store.get(entry.shard)
        found = part.tensor.split(list(part.lengths) or [1] * part.rows) if part.kind is Kind.JAGGED else part.tensor
        for row, there in zip(found, rows, strict=True):
            assert row.shape == there.shape and bytes_of(row) == bytes_of(there)
