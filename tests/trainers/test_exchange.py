"""On which device trainer ranks hand each other bytes: one that their process group has a backend for. And what they say of each
other's models."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from inference_plugin.wire.errors import ConfigError, ProtocolError
from inference_plugin.wire.manifest import Manifest, TensorSpec
from trainer_adapters import ModuleAdapter
from trainer_adapters.sources.differing import another_model, packed
from trainer_adapters.sources.exchange import exchange_device
from trainer_adapters.sources.gather import gathered

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


def test_gathering_without_torch_distributed_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"not initialised.*dist\.init_process_group"):
        next(gathered(ModuleAdapter({"a": torch.ones(2)})))


@pytest.mark.parametrize(
    ("theirs", "how"),
    [
        (
            (("a", "float32", (3,)), ("b", "int8", (2,))),
            r"a is float32 \[2\] on rank 0 and float32 \[3\] on rank 5 \(1 in all\)",
        ),
        ((("b", "int8", (2,)), ("a", "float32", (2,))), "another order: tensor 0 is a on rank 0 and b on rank 5"),
        ((("b", "int8", (2,)),), r"only rank 0 has a, head \(2 in all\)"),
    ],
)
def test_another_rank_is_told_how_its_model_differs(
    theirs: tuple[tuple[str, str, tuple[int, ...]], ...], how: str
) -> None:
    def manifest(*specs: tuple[str, str, tuple[int, ...]]) -> Manifest:
        names = [name for name, _, _ in specs]
        return Manifest(tuple(TensorSpec(*spec) for spec in specs), {"head": "a"} if "a" in names else {})

    mine = manifest(("a", "float32", (2,)), ("b", "int8", (2,)))
    error = another_model(mine, 5, packed(manifest(*theirs)))
    assert re.search(rf"trainer rank 5 has another model than rank 0 \({how}\)", error.message)


@pytest.mark.parametrize("cut", [0, -6])
def test_what_is_no_manifest_of_another_rank_is_a_typed_error(cut: int) -> None:
    manifest = Manifest((TensorSpec("a", "float32", (2,)),), {})
    theirs = packed(manifest)[:cut] or b"garbage"
    with pytest.raises(ProtocolError, match="anifest"):
        another_model(manifest, 1, theirs)
