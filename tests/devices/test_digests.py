"""Digests of a device's memory have the values of the host's, whatever the size, the alignment and the layout.

Without Triton its kernels are left out. With it, `TRITON_INTERPRET=1` runs them on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from inference_plugin.devices.digests import BlockDigests, Runs, TorchDigests
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.tensors import bytes_view
from tests.support.devices import LateDevice
from tests.transports.cases import CASES, any_bits

KINDS: list[type[BlockDigests]] = [TorchDigests]
if importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
    from inference_plugin.devices.digest_kernels import TritonDigests

    KINDS.append(TritonDigests)

AROUND = [0, 1, 16, 17, 240, 241, 256, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 17 * 1024 + 1]
NOWHERE = torch.device("cuda", 0)


def expected(tensors: list[torch.Tensor]) -> list[int]:
    return [digest_bytes(bytes_view(tensor.contiguous()).numpy()) for tensor in tensors]


@st.composite
def parts(draw: st.DrawFn) -> torch.Tensor:
    """Rows, columns or any bytes of some memory."""
    nbytes = draw(st.one_of(st.sampled_from(AROUND), st.integers(0, 5000)))
    start = draw(st.integers(0, 20))
    memory = any_bits(torch.uint8, start + nbytes, seed=draw(st.integers(0, 9)))[start:]
    if not draw(st.booleans()):
        return memory
    columns = draw(st.integers(1, 40))
    first = draw(st.integers(0, columns - 1))
    return memory[: nbytes // columns * columns].view(-1, columns)[:, first:]


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return made


def test_digests_of_many_small_pieces_beside_a_large_one_hold_no_more_memory_than_is_counted_on() -> None:
    pieces = [any_bits(torch.uint8, 1 << 20, seed=1), *(any_bits(torch.uint8, 1100, seed=i) for i in range(200))]
    digests = TorchDigests()
    digests.add(pieces)
    with Largest() as seen:
        found = digests.end()
    assert found == expected(pieces)
    assert 0 < seen.nbytes <= TorchDigests.held_bytes(sum(piece.nbytes for piece in pieces))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(parts(), min_size=1, max_size=4), min_size=1, max_size=3))
def test_any_bytes_have_the_digest_that_the_host_computes(
    kind: type[BlockDigests], together: list[list[torch.Tensor]]
) -> None:
    digests = kind()
    for tensors in together:
        digests.add(tensors)
    assert digests.end() == expected([tensor for tensors in together for tensor in tensors])


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 3), st.lists(st.sampled_from([*AROUND, 48, 5000]), max_size=4)),
            max_size=4,
        ),
        max_size=3,
    )
)
def test_runs_have_the_digests_that_the_host_computes(
    kind: type[BlockDigests], given: list[list[tuple[int, list[int]]]]
) -> None:
    """Of several memories at once: runs that begin at a multiple of 16 and others, long and short ones in any order."""
    digests, meant = kind(), []
    for together in given:
        runs = []
        for seed, (shift, sizes) in enumerate(together):
            lengths = np.array(sizes, dtype=np.int64)
            starts = shift + np.cumsum(-(-lengths // 16) * 16) - -(-lengths // 16) * 16
            memory = any_bits(torch.uint8, shift + sum(-(-size // 16) * 16 for size in sizes), seed=seed)
            runs.append(Runs(memory, starts, lengths))
            meant += [memory[start : start + size] for start, size in zip(starts.tolist(), sizes, strict=True)]
        digests.add_runs(runs)
    assert digests.end() == expected(meant)


@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_the_same_however_many_sums_are_held(
    kind: type[BlockDigests], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is not TorchDigests:
        monkeypatch.setattr("inference_plugin.devices.digest_kernels.HELD_BYTES_OF_SUMS", 200)
    tensors = [any_bits(torch.uint8, size, seed=size) for size in (2000, 100, 5000, 300)]
    digests = kind()
    for tensor in tensors:
        digests.add([tensor])
    assert digests.end() == expected(tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_and_shape_has_the_digest_that_the_host_computes(kind: type[BlockDigests]) -> None:
    tensors = list(CASES["every dtype and shape"]().values())
    digests = kind()
    digests.add(tensors)
    assert digests.end() == expected(tensors)


def test_digests_are_of_what_was_queued_before_and_not_of_what_is_queued_afterwards() -> None:
    device = LateDevice()
    sizes = (3, 200, 241, 5000)
    tensors = [device.tensor(torch.zeros(size, dtype=torch.uint8)) for size in sizes]
    meant = [any_bits(torch.uint8, size, seed=size) for size in sizes]
    digests = device.new_digests()
    with torch.inference_mode():
        for tensor, values in zip(tensors, meant, strict=True):
            device.copy(tensor, values)
        digests.add(tensors)
        for tensor in tensors:
            tensor.fill_(7)
    assert digests.end() == expected(meant)
    device.drain(NOWHERE)
    assert all(tensor.held.eq(7).all() for tensor in tensors)
