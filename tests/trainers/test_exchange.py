"""On which device trainer ranks hand each other bytes: one that their process group has a backend for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer_adapters.sources.exchange import exchange_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("backend", "near", "expected"),
    [
        ("gloo", CPU, CPU),
        ("gloo", GPU, CPU),  # gloo gathers nothing on a GPU
        ("cpu:fake,cuda:fake", CPU, CPU),
        ("cpu:fake,cuda:fake", GPU, GPU),
        ("cuda:fake", GPU, GPU),
        ("meta:fake", CPU, torch.device("meta", 3)),
        ("meta:fake", GPU, torch.device("meta", 3)),
    ],
)
def test_bytes_are_exchanged_where_the_group_has_a_backend(
    backend: str, near: torch.device, expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` stands in for the accelerator of a group that knows no other device, as `nccl`, `hccl` and `xccl` alone do."""

    class Current:
        @staticmethod
        def current_device() -> int:
            return 3

    monkeypatch.setattr(torch, "get_device_module", lambda _kind: Current)
    store = FakeStore() if "fake" in backend else dist.HashStore()  # type: ignore[no-untyped-call]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        assert exchange_device(None, near) == expected
    finally:
        dist.destroy_process_group()
