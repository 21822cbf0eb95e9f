"""What the poison of the tests does to the memory of an installation (see `tests/support/poison.py`)."""

from __future__ import annotations

import torch

from inference_plugin.install import layout, proof
from inference_plugin.transports.segment import SharedSegment
from tests.support import poison


def test_fresh_memory_of_an_installation_is_nan_until_the_poison_is_taken_back() -> None:
    undo = poison.spread()
    try:
        again = poison.spread()
        made = [layout.torch.empty(3), proof.torch.empty_like(torch.zeros(3, dtype=torch.bfloat16))]
        assert all(bool(tensor.isnan().all()) for tensor in made)
        assert layout.torch.empty(3, device="meta").is_meta and torch.equal(layout.torch.zeros(2), torch.zeros(2))
        segment = SharedSegment.create(1)
        assert bool((segment.tensor == 0xFF).all())
        segment.close()
        again()
        assert bool(layout.torch.empty(3).isnan().all())
    finally:
        undo()
    assert layout.torch is torch and proof.torch is torch
    segment = SharedSegment.create(1)
    assert not segment.tensor.any()
    segment.close()
