"""Post-processing that asks other ranks: a maximum is taken from what all ranks told, anything else is refused by name.

The process group is torch's fake one, of two ranks in one process: a collective on it would change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.collectives import Share
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.errors import CommitFailed, EngineUnsupported, TransportUnavailable, WeightwireError
from tests.install.installing import segment_of
from tests.support.plain_engine import manifest_of

SENT: list[str] = []

Reduce = Callable[[torch.Tensor], torch.Tensor]


@torch.library.custom_op("weightwire_test::tensor_parallel_all_reduce", mutates_args=())
def engine_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """As the engines' own operators."""
    SENT.append("engine")
    return tensor.clone()


def by_maximum(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def by_sum(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    SENT.append("torch")
    return tensor


def by_gathering(tensor: torch.Tensor) -> torch.Tensor:
    found = [torch.empty_like(tensor)] * 2
    dist.all_gather(found, tensor)
    SENT.append("torch")
    return found[0]


def by_what_was_answered(tensor: torch.Tensor) -> torch.Tensor:
    return by_maximum(by_maximum(tensor) * 2)


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Broadcasts as tensors do, to another shape."""
    return tensor.broadcast_to(1, *tensor.shape).squeeze(0)


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    yield
    dist.destroy_process_group()


class Scales:
    """Divides a weight by its largest element, of all ranks."""

    def __init__(self, reduce: Reduce) -> None:
        self.reduce = reduce

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight").detach()
        scale = self.reduce(weight.abs().amax(dim=1, keepdim=True))
        layer.weight = nn.Parameter(weight / scale, requires_grad=False)
        layer.scale = nn.Parameter(scale, requires_grad=False)


class Linear(nn.Module):
    def __init__(self, reduce: Reduce) -> None:
        super().__init__()
        self.quant_method = Scales(reduce)
        self.weight = nn.Parameter(torch.empty(4, 8), requires_grad=False)


class Model(nn.Module):
    def __init__(self, reduce: Reduce) -> None:
        super().__init__()
        self.linear = Linear(reduce)

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in dict(tensors).items():
            self.get_parameter(name).data.copy_(tensor)


class Engine(LiveModel):
    post_processing = Scales

    def __init__(self, reduce: Reduce) -> None:
        live = Model(reduce)
        live.load_weights(weights(1))
        live.linear.quant_method.process_weights_after_loading(live.linear)
        super().__init__(live, torch.device("cpu"), *build_skeleton(lambda: Model(reduce), torch.no_grad()))
        SENT.clear()

    def free_bytes(self) -> int:
        return 1 << 40

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.live.linear.weight.clone(), self.live.linear.scale.clone()


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {"linear.weight": torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))}


@functools.cache
def segment(seed: int) -> torch.Tensor:
    return segment_of(weights(seed), manifest_of(weights(seed)))


def opened(policy: str, reduce: Reduce = by_maximum) -> tuple[Engine, ModelInstaller]:
    engine = Engine(reduce)
    installer = ModelInstaller(engine)
    installer.open(manifest_of(weights(1)), policy, partial=False)
    return engine, installer


def told(seed: int, rank: int) -> bytes:
    """What the rank that has the weights of that seed tells the others."""
    _, installer = opened("standby")
    installer.prepare(segment(seed), lambda: None)
    share = msgspec.msgpack.decode(installer.share(), type=Share)
    assert share.rank == dist.get_rank() and share.operands["linear"][0].ranks == (0, 1)
    return msgspec.msgpack.encode(msgspec.structs.replace(share, rank=rank))


def expected(seed: int, other: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and scale of the rank that has the weights of one seed, beside a rank that has those of another."""
    mine, theirs = weights(seed)["linear.weight"], weights(other)["linear.weight"]
    scale = torch.maximum(mine.abs().amax(1, keepdim=True), theirs.abs().amax(1, keepdim=True))
    return mine / scale, scale


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_a_maximum_is_that_of_all_ranks_and_the_way_back_has_its_own(policy: str) -> None:
    engine, installer = opened(policy)
    for seed, other in ((2, 12), (3, 13)):
        installer.prepare(segment(seed), lambda: None)
        installer.install(segment(seed), [installer.share(), told(other, rank=1)])
        assert same(engine.held(), expected(seed, other))
        installer.finish()
    before = engine.held()
    installer.prepare(segment(2), lambda: None)
    installer.undo(segment(3))  # this rank failed before it began to install
    installer.discard()
    installer.prepare(segment(2), lambda: None)
    installer.install(segment(2), [installer.share(), told(14, rank=1)])
    assert same(engine.held(), expected(2, 14))
    installer.undo(segment(3))
    assert same(engine.held(), before)


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_a_rank_that_told_nothing_or_other_things_fails_the_commit_and_the_old_version_comes_back(policy: str) -> None:
    engine, installer = opened(policy)
    installer.prepare(segment(2), lambda: None)
    installer.install(segment(2), [installer.share(), told(12, rank=1)])
    installer.finish()
    before = engine.held()
    for shares, words in [
        ((b"",), "reduces over 2 ranks, and 1 sent"),
        ((told(4, rank=0), told(12, rank=1)), "reduces other values"),
    ]:
        installer.prepare(segment(3), lambda: None)
        own = () if len(shares) == 2 else (installer.share(),)
        with pytest.raises(CommitFailed, match=words):
            installer.install(segment(3), [*own, *shares])
        installer.undo(segment(2))
        assert same(engine.held(), before)
    with pytest.raises(WeightwireError):
        installer.install(segment(3), [b"no share"])
    installer.undo(segment(2))
    assert same(engine.held(), before)


@pytest.mark.parametrize("reduce", [by_sum, by_gathering, engine_all_reduce])
@pytest.mark.parametrize("policy", ["copy", "standby", "streaming"])
def test_any_other_collective_is_refused_by_the_modules_name_and_nothing_is_sent(reduce: Reduce, policy: str) -> None:
    engine = Engine(reduce)
    with pytest.raises(
        EngineUnsupported, match="post-processing of linear communicates with the other ranks"
    ) as refused:
        ModelInstaller(engine).open(manifest_of(weights(1)), policy, partial=False)
    assert not SENT
    assert refused.value.phase == "open" and "quantise in blocks" in refused.value.hint


def test_a_question_that_depends_on_an_earlier_answer_is_refused() -> None:
    with pytest.raises(
        EngineUnsupported, match="post-processing of linear reduces values over the ranks that depend on"
    ):
        opened("standby", by_what_was_answered)


def test_weights_that_stream_in_are_refused_where_a_maximum_needs_all_of_them() -> None:
    with pytest.raises(EngineUnsupported, match=r"streaming: post-processing of linear .* reduces over the ranks"):
        opened("streaming")


def test_a_zone_is_refused_where_modules_are_made_at_the_commit() -> None:
    with pytest.raises(TransportUnavailable, match="together with the other ranks"):
        ModelInstaller(Engine(by_maximum)).open(manifest_of(weights(1)), "standby", partial=False, zone=True)


def test_broadcasting_to_another_shape_is_no_collective() -> None:
    engine = Engine(alone)
    terms = ModelInstaller(engine).open(manifest_of(weights(1)), "standby", partial=False)
    assert terms.install == "standby"
