"""What only several GPUs show. Nobody has run it: no machine with two was at hand."""

from __future__ import annotations

import pytest
import torch

from inference_plugin.devices import device_of
from inference_plugin.wire.digest import digest_bytes
from tests.transports.cases import any_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def test_digests_of_memory_of_another_gpu_than_the_current_one_are_those_of_the_host() -> None:
    values = [any_bits(torch.uint8, 5000, seed=seed) for seed in range(50)]
    there = [value.to("cuda:1") for value in values]
    with torch.cuda.device(0):
        assert device_of(there[0].device).digests(there) == [digest_bytes(value.numpy()) for value in values]
