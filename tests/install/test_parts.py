"""Parts of a model that the engine's loader computes are loaded one at a time, where that is the same as loading everything."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install import parts
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.install.storages import named_tensors
from inference_plugin.wire.errors import MAX_TEXT
from tests.install.installing import update
from tests.support.plain_engine import manifest_of

Weights = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 8), requires_grad=False)
        self.decay = nn.Parameter(torch.empty(4), requires_grad=False)


class Model(nn.Module):
    """`decay` is computed from `log`; `weight` is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Parameter(torch.empty(3, 8), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name.endswith("log"):
                self.get_parameter(name.replace("log", "decay")).data.copy_(-torch.exp(tensor))
            else:
                self.get_parameter(name).data.copy_(tensor)


class Accumulating(Model):
    """Each block's `decay` depends on how many have come before."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        count = 0
        for name, tensor in tensors:
            count += name.endswith("log")
            super().load_weights([(name, tensor * count if name.endswith("log") else tensor)])


class Demanding(Model):
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = dict(tensors)
        assert "head" in held
        super().load_weights(held.items())


class Listing(Model):
    """Its error lists what it lacks, as SGLang's loaders of Step 3.5 and Gemma do."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = dict(tensors)
        if "head" not in held:
            raise RuntimeError(f"not initialized: {', '.join(f'model.layers.{i}.weight' for i in range(5000))}")
        super().load_weights(held.items())


class Counting(Model):
    """`decay` counts from minus one, whose byte is 0xFF, as two numbers of four bits may be that are put together."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.decay = nn.Parameter(torch.empty(4, dtype=torch.int8), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name.endswith("log"):
                self.get_parameter(name.replace("log", "decay")).data.copy_((8 * tensor.abs() - 1).to(torch.int8))
            else:
                super().load_weights([(name, tensor)])


class DemandingCounting(Counting):
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = dict(tensors)
        assert "head" in held
        super().load_weights(held.items())


class Beside(Model):
    """`decay` is made of what the loader has just put beside it, as the norms of Gemma and Qwen3.5 in SGLang."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.log = nn.Parameter(torch.empty(4), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            held = self.get_parameter(name)
            held.data.copy_(tensor)
            if name.endswith("log"):
                self.get_parameter(name.replace("log", "decay")).data.copy_(held.data).add_(1.0)


class Engine(LiveModel):
    def __init__(self, kind: type[Model]) -> None:
        live = kind()
        live.load_weights(weights(0).items())
        self.loads: list[set[str]] = []
        super().__init__(live, torch.device("cpu"), *build_skeleton(kind, torch.no_grad()))

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        real = {name for name, tensor, _ in named_tensors(model) if not tensor.is_meta}
        self.loads.append(real)
        return super().load_weights(model, tensors)

    def free_bytes(self) -> int:
        return 1 << 40


def weights(seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    shapes = {"head": (3, 8), **{f"blocks.{i}.{n}": s for i in (0, 1) for n, s in (("weight", (4, 8)), ("log", (4,)))}}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def updated(kind: type[Model], *, partial: bool = False) -> tuple[Engine, str]:
    """An engine after two updates, whose loads are those of the second alone, and why the loader installs."""
    engine, manifest = Engine(kind), manifest_of(weights(1))
    installer = ModelInstaller(engine)
    terms = installer.open(manifest, "standby", partial=partial)
    assert (terms.mechanism, terms.install) == ("loader", "standby")
    for seed in (1, 2):
        engine.loads.clear()
        update(installer, manifest, weights(seed))
    fresh = kind()
    fresh.load_weights(weights(2).items())
    for (name, held), wanted in zip(engine.live.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(held, wanted), name
    return engine, terms.why


@pytest.fixture
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts as large as those of real models."""
    monkeypatch.setattr(parts, "JOINED_BYTES", 0)


@pytest.mark.usefixtures("each_alone")
@pytest.mark.parametrize("partial", [False, True])
def test_memory_for_one_part_at_a_time_and_the_rest_is_copied(partial: bool) -> None:
    engine, why = updated(Model, partial=partial)
    assert engine.loads == [{"blocks.0.decay"}, {"blocks.1.decay"}]
    assert "part by part" in why and "not part by part" not in why


@pytest.mark.usefixtures("each_alone")
def test_what_the_loader_makes_of_a_parameter_beside_it_is_loaded_with_that_as_one_part() -> None:
    engine, why = updated(Beside)
    assert engine.loads == [{f"blocks.{i}.decay", f"blocks.{i}.log"} for i in (0, 1)]
    assert "part by part" in why and "not part by part" not in why


def test_small_parts_are_loaded_together_as_each_load_goes_through_all_names_of_the_model() -> None:
    engine, _ = updated(Model)
    assert engine.loads == [{"blocks.0.decay", "blocks.1.decay"}]


@pytest.mark.usefixtures("each_alone")
@pytest.mark.parametrize(
    ("kind", "words"), [(Accumulating, "computes blocks.1.decay differently"), (Demanding, "raised AssertionError")]
)
def test_a_loader_that_computes_otherwise_with_less_is_given_everything(kind: type[Model], words: str) -> None:
    engine, why = updated(kind)
    assert [len(real) for real in engine.loads] == [5]
    assert f"not part by part: the loader {words}" in why


def test_a_long_error_of_a_loader_fits_into_the_message_that_says_why() -> None:
    assert len(updated(Listing)[1]) < MAX_TEXT / 10


@pytest.mark.parametrize("kind", [Counting, DemandingCounting])
def test_what_the_loader_computes_counts_as_written_whatever_its_bytes_are(kind: type[Model]) -> None:
    updated(kind)


def test_a_part_that_the_trainer_leaves_out_is_refused() -> None:
    tensors = {name: tensor for name, tensor in weights(1).items() if name != "blocks.1.log"}
    with pytest.raises(Exception, match=r"no tensor of the manifest fills these parameters: blocks\.1\.decay"):
        ModelInstaller(Engine(Model)).open(manifest_of(tensors), "standby", partial=False)
