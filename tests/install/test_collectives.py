"""Post-processing that would talk to other ranks, on a thread beside the engine's own, is refused before it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.errors import EngineUnsupported
from tests.support.plain_engine import manifest_of

SENT: list[str] = []


@torch.library.custom_op("weightwire_test::tensor_parallel_all_reduce", mutates_args=())
def engine_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """As the engines' own operators."""
    SENT.append("engine")
    return tensor.clone()


def by_torch(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    SENT.append("torch")
    return tensor


def by_gathering(tensor: torch.Tensor) -> torch.Tensor:
    found = [torch.empty_like(tensor)]
    dist.all_gather(found, tensor)
    SENT.append("torch")
    return found[0]


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Broadcasts as tensors do, to another shape."""
    return tensor.broadcast_to(1, *tensor.shape).squeeze(0)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Scales:
    """Divides a weight by its largest element, of all ranks."""

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.reduce = reduce

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight").detach()
        scale = self.reduce(weight.abs().amax(dim=1, keepdim=True))
        layer.weight = nn.Parameter(weight / scale, requires_grad=False)
        layer.scale = nn.Parameter(scale, requires_grad=False)


class Linear(nn.Module):
    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.quant_method = Scales(reduce)
        self.weight = nn.Parameter(torch.empty(4, 8), requires_grad=False)


class Model(nn.Module):
    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = Linear(reduce)

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in dict(tensors).items():
            self.get_parameter(name).data.copy_(tensor)


class Engine(LiveModel):
    post_processing = Scales

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        live = Model(reduce)
        live.load_weights(weights())
        live.linear.quant_method.process_weights_after_loading(live.linear)
        super().__init__(live, torch.device("cpu"), *build_skeleton(lambda: Model(reduce), torch.no_grad()))
        SENT.clear()

    def free_bytes(self) -> int:
        return 1 << 40


def weights() -> dict[str, torch.Tensor]:
    return {"linear.weight": torch.randn(4, 8, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("reduce", [by_torch, by_gathering, engine_all_reduce])
@pytest.mark.parametrize("policy", ["copy", "standby", "streaming"])
def test_it_is_refused_by_the_modules_name_and_nothing_is_sent(
    reduce: Callable[[torch.Tensor], torch.Tensor], policy: str
) -> None:
    engine = Engine(reduce)
    with pytest.raises(EngineUnsupported, match="post-processing of linear talks to the other ranks") as refused:
        ModelInstaller(engine).open(manifest_of(weights()), policy, partial=False)
    assert not SENT
    assert refused.value.phase == "open" and "quantise in blocks" in refused.value.hint


def test_broadcasting_to_another_shape_is_no_collective() -> None:
    terms = ModelInstaller(Engine(alone)).open(manifest_of(weights()), "standby", partial=False)
    assert terms.install == "standby"
