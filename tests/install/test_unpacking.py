"""A packed parameter is read back where packing only orders and pads its elements, whatever its dtype; else it is said to be
unreadable, and nothing is said of it that is not so."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import BoxDigest
from inference_plugin.wire.tensors import box_view, bytes_view
from tests.support.plain_engine import manifest_of

Pack = Callable[[torch.Tensor], torch.Tensor]

SHAPE = (3, 40, 50)
"""6000 elements: two passes of twelve bits for two bytes an element, three of six bits for one."""


def tiles(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 8 rows and 10 columns, each transposed; a new shape, and the rows padded with zeros."""
    padded = torch.zeros(weight.shape[0], 48, weight.shape[2], dtype=weight.dtype)
    padded[:, : weight.shape[1]] = weight
    return padded.view(-1, 6, 8, 5, 10).permute(0, 1, 3, 4, 2).contiguous().view(weight.shape[0], 6, -1)


def scales(weight: torch.Tensor) -> torch.Tensor:
    return weight * 2 if weight.is_floating_point() else weight // 2


def drops(weight: torch.Tensor) -> torch.Tensor:
    """The last row's elements are lost."""
    packed = tiles(weight)
    packed[:, -2:] = 0
    return packed


def doubles(weight: torch.Tensor) -> torch.Tensor:
    """One element stands in the place of another."""
    packed = weight.clone()
    packed.view(-1)[7] = packed.view(-1)[8]
    return packed


def sorts(weight: torch.Tensor) -> torch.Tensor:
    """As SGLang does with the groups of a GPTQ checkpoint: the order hangs on the elements."""
    return weight.reshape(-1).sort().values.view(weight.shape)


class Packing:
    def __init__(self, pack: Pack) -> None:
        self.pack = pack

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight = nn.Parameter(self.pack(layer.weight.data), requires_grad=False)  # type: ignore[arg-type, operator, union-attr]


class Layer(nn.Module):
    def __init__(self, pack: Pack, dtype: torch.dtype) -> None:
        super().__init__()
        self.quant_method = Packing(pack)
        self.weight = nn.Parameter(torch.empty(SHAPE, dtype=dtype), requires_grad=False)


class Model(nn.Module):
    def __init__(self, pack: Pack, dtype: torch.dtype) -> None:
        super().__init__()
        self.one, self.other = Layer(pack, dtype), Layer(pack, dtype)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in tensors:
            parameters[name].data.copy_(tensor)


class Engine(LiveModel):
    post_processing = Packing

    def __init__(self, pack: Pack, dtype: torch.dtype) -> None:
        live = Model(pack, dtype)
        live.load_weights(weights(dtype, 0).items())
        for layer in (live.one, live.other):
            layer.quant_method.process_weights_after_loading(layer)
        super().__init__(live, torch.device("cpu"), *build_skeleton(lambda: Model(pack, dtype), torch.no_grad()))


def weights(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Random bits: NaN, infinities and negative zeros among them."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name in ("one.weight", "other.weight"):
        made[name] = torch.empty(SHAPE, dtype=dtype)
        bytes_view(made[name]).random_(0, 256, generator=random)
    return made


def updated(pack: Pack, dtype: torch.dtype) -> tuple[Engine, ModelInstaller, Manifest]:
    engine, manifest = Engine(pack, dtype), manifest_of(weights(dtype, 0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "standby", partial=False)
    segment = torch.zeros(manifest.layout.nbytes, dtype=torch.uint8)
    for i, spec in enumerate(manifest.tensors):
        bytes_view(box_view(segment, manifest, manifest.whole(i))).copy_(bytes_view(weights(dtype, 1)[spec.name]))
    installer.prepare(segment, lambda: None)
    installer.install(segment)
    installer.finish()
    return engine, installer, manifest


def digests(found: Iterable[BoxDigest | tuple[str, str]]) -> dict[tuple[str, tuple[int, ...]], str]:
    boxes = [box for box in found if isinstance(box, BoxDigest)]
    return {(box.name, box.offsets): box.digest for box in boxes}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8], ids=str
)
def test_an_order_with_padding_is_read_back_whatever_the_bits(dtype: torch.dtype) -> None:
    _, packed, _ = updated(tiles, dtype)
    _, plain, _ = updated(lambda weight: weight.clone(), dtype)
    read = digests(packed.read_back())
    assert {name for name, _ in read} == {"one.weight", "other.weight"} and read == digests(plain.read_back())


def test_one_wrong_element_in_the_live_form_shows() -> None:
    engine, installer, _ = updated(tiles, torch.bfloat16)
    before = digests(installer.read_back())
    bytes_view(engine.live.other.weight.data)[1000] ^= 1  # type: ignore[arg-type, union-attr]
    after = digests(installer.read_back())
    assert {name for (name, where), digest in after.items() if before[name, where] != digest} == {"other.weight"}


@pytest.mark.parametrize(
    ("pack", "dtype"), [(scales, torch.int8), (drops, torch.int8), (doubles, torch.int8), (sorts, torch.int32)]
)
def test_what_computes_with_elements_or_loses_some_is_unreadable(pack: Pack, dtype: torch.dtype) -> None:
    _, installer, _ = updated(pack, dtype)
    assert [found for found in installer.read_back() if isinstance(found, tuple)] == [
        (name, "the engine's form of weight can't be read back") for name in ("one.weight", "other.weight")
    ]
