"""What hangs on a layer beside its parameters follows every update, or the model is refused by name when the group opens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.errors import EngineUnsupported, ManifestMismatch
from tests.install.installing import segment_of, update
from tests.support.plain_engine import manifest_of

SIZE = 4


class Kernel:
    """Keeps what it computes with, as kernels of engines do."""

    packed: torch.Tensor | None = None
    run: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(self) -> None:
        self.alpha: float | None = None

    def scaled(self, layer: Any) -> float:
        """Computes its factor at first use, from a scale."""
        if self.alpha is None:
            self.alpha = layer.scale * 2
        return self.alpha

    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.packed is not None
        return inputs @ self.packed


class Method:
    """A quantisation method: packs the weight behind its kernel, notes a scale as a float, and drops the weight."""

    def __init__(self) -> None:
        self.kernel = Kernel()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.kernel.packed = layer.weight.detach().t().contiguous()  # type: ignore[union-attr, operator]
        self.kernel.run = self.kernel.multiply
        layer.scale = float(layer.weight.detach().abs().max())  # type: ignore[assignment, arg-type, operator, union-attr]
        layer.weight_scale.fill_(layer.scale)  # type: ignore[operator]
        layer.weight = None


class SometimesMore(Method):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if layer.weight.view(torch.uint8).sum() % 2:  # type: ignore[union-attr, operator]
            layer.odd = True  # type: ignore[assignment]
        super().process_weights_after_loading(layer)


class Attention:
    """An implementation that refers to another module's parameter, and replaces it by a copy of its own at first use."""

    def __init__(self, sinks: torch.Tensor, view: torch.Tensor) -> None:
        self.sinks = sinks
        self.view = view

    def forward(self) -> torch.Tensor:
        if self.sinks.dtype != torch.float32:
            self.sinks = self.sinks.detach().to(torch.float32)
        return self.sinks[:2] + self.view.to(torch.float32)


class Layer(nn.Module):
    def __init__(self, method: Method) -> None:
        super().__init__()
        self.quant_method = method
        self.weight = nn.Parameter(torch.empty(SIZE, SIZE))
        self.register_buffer("weight_scale", torch.ones(()))


class Positions(nn.Module):
    """Keeps its table for each size of an image, and the angles of the largest one, as vision towers of engines do."""

    angles: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE))
        self.tables: dict[tuple[int, int], torch.Tensor] = {}

    def forward(self, size: tuple[int, int]) -> torch.Tensor:
        if size not in self.tables:
            self.tables[size] = self.weight.detach().repeat(*size)
        self.angles = torch.arange(max(size))
        return self.tables[size]


class Model(nn.Module):
    def __init__(self, method: type[Method]) -> None:
        super().__init__()
        self.positions = Positions()
        self.packed = Layer(method())
        self.sinks = nn.Parameter(torch.empty(SIZE, dtype=torch.bfloat16))
        self.attention = Attention(self.sinks, self.sinks.data.view(2, -1)[1])
        self.embed = nn.Parameter(torch.empty(SIZE, SIZE))
        self.head = nn.Parameter(torch.empty(SIZE, SIZE))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in tensors:
            parameters[name].data.copy_(tensor)


class Folding(Model):
    """Its loader derives a weight itself, as Sarvam's latent attention in SGLang."""

    folded: torch.Tensor | None = None

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(tensors)
        self.folded = self.embed.detach().t().contiguous()


class FoldingAtOnce(Folding):
    """Its constructor derives that weight as well, so that a step can be tried without a load: openPangu's sinks in vLLM."""

    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        self.folded = self.embed.detach().t().contiguous()


class FoldingIntoWhatThereIs(FoldingAtOnce):
    """Its loader writes into the tensor that its constructor has left, or leaves another one there."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            Model.load_weights(self, [(name, tensor)])
            if name == "embed":
                self.fold(tensor * 2)

    def fold(self, tensor: torch.Tensor) -> None:
        assert self.folded is not None
        self.folded.copy_(tensor)


class FoldingIntoAKernel(FoldingIntoWhatThereIs):
    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        self.kernel = Kernel()
        self.kernel.folded = torch.zeros(SIZE, SIZE)  # type: ignore[attr-defined]

    def fold(self, tensor: torch.Tensor) -> None:
        self.kernel.folded = tensor  # type: ignore[attr-defined]


class FoldingIntoAKernelsMemory(FoldingIntoAKernel):
    def fold(self, tensor: torch.Tensor) -> None:
        self.kernel.folded.data.copy_(tensor)  # type: ignore[attr-defined]


class FoldingIntoAList(FoldingIntoWhatThereIs):
    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        self.by_name = {"folded": [torch.zeros(SIZE, SIZE)]}

    def fold(self, tensor: torch.Tensor) -> None:
        self.by_name["folded"][0] = tensor


class FoldingBesideAParameter(FoldingIntoWhatThereIs):
    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        self.embed.folded = torch.zeros(SIZE, SIZE)  # type: ignore[attr-defined]

    def fold(self, tensor: torch.Tensor) -> None:
        self.embed.folded = tensor  # type: ignore[attr-defined]


class FillingWithOnes(FoldingIntoWhatThereIs):
    """Writes there whatever the weights are."""

    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        self.folded = torch.ones(SIZE)

    def fold(self, tensor: torch.Tensor) -> None:
        assert self.folded is not None
        self.folded.fill_(1)


class Counting(Model):
    """Its loader keeps a number that it makes of a weight."""

    kept: Any = staticmethod(float)

    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        self.scale = nn.Parameter(torch.empty(1))
        self.inverse = 1.0

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            super().load_weights([(name, tensor)])
            if name == "scale":
                self.inverse = self.kept(1 / tensor.item())


class Engine(LiveModel):
    post_processing, placeholders = Method, frozenset({"Missing"})
    runtime_state, derived_caches = frozenset({"angles"}), frozenset({"tables"})

    def __init__(self, method: type[Method] = Method, *, retied: bool = False, model: type[Model] = Model) -> None:
        live = model(method)
        live.load_weights(weights(0).items())
        if retied:
            live.head = live.embed
        live.packed.quant_method.process_weights_after_loading(live.packed)
        super().__init__(live, torch.device("cpu"), *build_skeleton(lambda: model(method), torch.no_grad()))

    def free_bytes(self) -> int:
        return 1 << 40

    def state(self) -> list[Any]:
        live: Any = self.live
        kernel = live.packed.quant_method.kernel
        return [
            kernel.packed.tolist(), kernel.run(torch.eye(SIZE)).tolist(), live.packed.scale, live.packed.weight_scale.item(),
            kernel.scaled(live.packed), live.attention.forward().tolist(), live.embed.tolist(), live.head.tolist(),
            live.positions((2, 1)).tolist(),
        ]  # fmt: skip


def weights(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "packed.weight": torch.randn(SIZE, SIZE, generator=random),
        "sinks": torch.randn(SIZE, generator=random).to(torch.bfloat16),
        "embed": torch.randn(SIZE, SIZE, generator=random),
        "head": torch.randn(SIZE, SIZE, generator=random),
        "positions.weight": torch.randn(SIZE, generator=random),
    }


def cold(seed: int) -> list[Any]:
    """What an engine that starts with these weights computes with."""
    live: Any = Model(Method)
    live.load_weights(weights(seed).items())
    live.packed.quant_method.process_weights_after_loading(live.packed)
    fresh = Engine()
    fresh.live = live
    return fresh.state()


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_a_warm_model_equals_a_cold_one_in_all_that_it_computes_with(policy: str) -> None:
    engine = Engine()
    assert engine.state() == cold(0)  # the first use of the sinks is over
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    terms = installer.open(manifest, policy, partial=False)
    assert {"packed.quant_method.kernel.packed", "packed.scale", "packed.weight_scale"} <= set(terms.derived)
    assert terms.untouched == ()
    for seed in (1, 2, 0, 3, 1):
        update(installer, manifest, weights(seed))
        assert engine.state() == cold(seed)


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_what_an_engine_folds_into_a_buffer_once_is_folded_anew_after_each_commit_and_each_undo(policy: str) -> None:
    """The routers of Gemma 4 in SGLang."""

    class Folds(Engine):
        def derive_in_place(self) -> None:
            held: Any = self.live
            held.mask.data.copy_(held.embed[0] * 2)

    class Masked(Model):
        def __init__(self, method: type[Method]) -> None:
            super().__init__(method)
            self.register_buffer("mask", torch.ones(SIZE), persistent=False)

    engine = Folds(model=Masked)
    engine.derive_in_place()
    mask: Any = engine.live.mask
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=False)
    before = update(installer, manifest, weights(1))
    assert engine.live.mask is mask and mask.tolist() == (weights(1)["embed"][0] * 2).tolist()
    segment = segment_of(weights(2), manifest)
    installer.prepare(segment, lambda: None)
    installer.install(segment)
    assert mask.tolist() == (weights(2)["embed"][0] * 2).tolist()
    installer.undo(before if policy == "copy" else None)
    assert mask.tolist() == (weights(1)["embed"][0] * 2).tolist()


class HoldsABuffer(Model):
    """Its loader writes a weight a second time, into a buffer that it holds itself, where the weight has memory, as Kimi-K3's in
    vLLM."""

    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        turned = torch.empty(SIZE, SIZE, device=self.embed.device)
        self.register_buffer("turned", turned, persistent=False)

        def turn(weight: torch.Tensor) -> None:
            if not weight.is_meta:
                turned.copy_(weight.data.t())

        self.embed.turn = turn  # type: ignore[attr-defined]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(tensors)
        self.embed.turn(self.embed)  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_a_buffer_that_the_loader_holds_itself_and_writes_where_weights_have_memory_follows_every_update(
    policy: str,
) -> None:
    engine, manifest = Engine(model=HoldsABuffer), manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=False)
    for seed in (1, 2, 0):
        update(installer, manifest, weights(seed))
        assert engine.state() == cold(seed)
        assert torch.equal(engine.live.get_buffer("turned"), weights(seed)["embed"].t())


class Runner:
    """Of captured graphs: keeps a part of a model that the model has replaced since, as SGLang's of the towers of Qwen3-Omni."""

    def __init__(self, attribute: str) -> None:
        setattr(self, attribute, nn.ModuleList([nn.Linear(SIZE, SIZE)]))


def with_runner(attribute: str) -> type[Model]:
    class Run(Model):
        def __init__(self, method: type[Method]) -> None:
            super().__init__(method)
            self.runner = Runner(attribute)

    return Run


def test_a_part_outside_the_model_refuses_it_unless_the_engine_says_that_it_is_no_weight() -> None:
    manifest = manifest_of(weights(0))
    with pytest.raises(EngineUnsupported, match=r"outside its model.*runner\.part\.0\.weight"):
        ModelInstaller(Engine(model=with_runner("part"))).open(manifest, "copy", partial=False)
    assert "angles" in Engine.runtime_state
    engine = Engine(model=with_runner("angles"))
    installer = ModelInstaller(engine)
    installer.open(manifest, "copy", partial=False)
    update(installer, manifest, weights(1))
    assert engine.state() == cold(1)


class Scaled(Model):
    """Has a buffer that its loader takes from a checkpoint which has it, as the towers of Gemma 4 in SGLang have."""

    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        self.register_buffer("gain", torch.ones(1))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = dict(tensors)
        if "gain" in held:
            self.get_buffer("gain").data.copy_(held.pop("gain"))
        super().load_weights(held.items())


@pytest.mark.parametrize("shipped", [False, True])
def test_a_buffer_that_the_engines_own_checkpoint_does_not_fill_stays_as_the_constructor_made_it(shipped: bool) -> None:
    class Started(Engine):
        def checkpoint(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
            tensors = weights(0) | ({"gain": torch.ones(1)} if shipped else {})
            return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    engine, manifest = Started(model=Scaled), manifest_of(weights(0))
    installer = ModelInstaller(engine)
    if shipped:
        with pytest.raises(
            ManifestMismatch, match="fills these buffers, which the engine reads from a checkpoint: gain"
        ):
            installer.open(manifest, "copy", partial=False)
        return
    installer.open(manifest, "copy", partial=False)
    update(installer, manifest, weights(1))
    assert engine.state() == cold(1)
    with torch.no_grad():
        engine.live.get_buffer("gain").fill_(2)
    with pytest.raises(ManifestMismatch, match="fills these buffers"):
        ModelInstaller(engine).open(manifest, "copy", partial=False)


class Judge(Method):
    """Only notes what the weights are like. Neither trial weights nor the first ones are so large."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.is_large = bool((layer.weight > 1e6).any())


class Judged(Model):
    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        self.judged = Layer(Judge())


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_what_post_processing_decides_by_the_weights_alone_follows_every_update(policy: str) -> None:
    engine = Engine(model=Judged)
    judged: Any = engine.live.judged
    judged.weight.data.fill_(1.0)
    judged.quant_method.process_weights_after_loading(judged)
    manifest = manifest_of(weights(0) | {"judged.weight": torch.ones(SIZE, SIZE)})
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=False)
    for seed, large in ((1, True), (2, False), (3, True)):
        update(installer, manifest, weights(seed) | {"judged.weight": torch.full((SIZE, SIZE), 1e7 if large else 1.0)})
        assert judged.is_large is large


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_the_way_back_restores_it_too(policy: str) -> None:
    engine = Engine()
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=False)
    before = update(installer, manifest, weights(1))
    segment = segment_of(weights(2), manifest)
    installer.prepare(segment, lambda: None)
    installer.install(segment)
    assert engine.state() == cold(2)
    installer.undo(before if policy == "copy" else None)
    assert engine.state() == cold(1)
    update(installer, manifest, weights(3))
    assert engine.state() == cold(3)


def test_the_skeleton_and_the_live_objects_stay_theirs() -> None:
    engine = Engine()
    kernel = engine.live.packed.quant_method.kernel  # type: ignore[union-attr]
    installer = ModelInstaller(engine)
    manifest = manifest_of(weights(0))
    installer.open(manifest, "standby", partial=False)
    update(installer, manifest, weights(1))
    assert engine.live.packed.quant_method.kernel is kernel  # type: ignore[union-attr]
    assert kernel.run.__self__ is kernel
    assert engine.skeleton.packed.quant_method.kernel.packed is None  # type: ignore[union-attr]


def test_a_tensor_that_nothing_explains_refuses_the_model_by_name() -> None:
    engine = Engine()
    live: Any = engine.live
    live.packed.quant_method.kernel.lazily_made = torch.zeros(3)
    live.positions.weight.shuffled = torch.zeros(3)
    with pytest.raises(EngineUnsupported, match=r"weight\.shuffled.*packed\.quant_method\.kernel\.lazily_made"):
        ModelInstaller(engine).open(manifest_of(weights(0)), "standby", partial=False)


class Poolers:
    """Chooses a head by its task, as an engine's pooler does. Its modules are not registered in the model."""

    def __init__(self, head: nn.Module) -> None:
        self.by_task = {"embed": [head]}


class Missing(nn.Module):
    """Stands for a module that the engine doesn't need."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_parameters_outside_the_model_refuse_the_whole_of_it_by_name_and_no_part(policy: str) -> None:
    engine = Engine()
    live: Any = engine.live
    live.pooler = Poolers(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()))
    live.attention.layer = live.packed  # a registered one
    live.output = Missing(nn.Linear(SIZE, SIZE))
    installer = ModelInstaller(engine)
    with pytest.raises(
        EngineUnsupported, match=r"pooler\.by_task\.embed\.0\.0\.weight, [^ ]+ \(2 in all\).*partial=True"
    ):
        installer.open(manifest_of(weights(0)), policy, partial=False)
    manifest = manifest_of(weights(0))
    installer.open(manifest, policy, partial=True)
    update(installer, manifest, weights(1))
    assert engine.state() == cold(1)


@pytest.mark.parametrize("opened", ["the first group", "a later one"])
@pytest.mark.parametrize(
    "model",
    [
        *(Folding, FoldingAtOnce, FoldingIntoWhatThereIs, FoldingIntoAKernel, FoldingIntoAKernelsMemory),
        *(FoldingIntoAList, FoldingBesideAParameter),
    ],
)
def test_a_weight_that_the_loader_derives_itself_refuses_the_model_by_name(opened: str, model: type[Model]) -> None:
    engine = Engine(model=model)
    if opened == "a later one":
        engine.load_weights(engine.skeleton, weights(0).items())  # as the trial load of a group before it
    with pytest.raises(EngineUnsupported, match=r"folded"):
        ModelInstaller(engine).open(manifest_of(weights(0)), "standby", partial=False)


def test_a_tensor_that_the_loader_fills_with_the_same_for_any_weights_refuses_no_model() -> None:
    engine, manifest = Engine(model=FillingWithOnes), manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "copy", partial=False)
    update(installer, manifest, weights(1))
    assert engine.state() == cold(1)


class CountingInAList(Counting):
    kept = staticmethod(lambda number: [number])


class CountingInWhole(Counting):
    kept = staticmethod(lambda number: round(1 / number))


class Signed(Counting):
    kept = staticmethod(lambda number: number > 0)


class Clamped(Counting):
    """A scale that no checkpoint has yet is negative."""

    kept = staticmethod(lambda number: number if number > 0 else 1.0)


class Filling(Counting):
    """Fills its scale with the number that it also keeps another one of, so that a plan describes the load."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "scale":
                number = tensor.item()
                self.scale.data.fill_(number)
                self.inverse = 1 / number
            else:
                super().load_weights([(name, tensor)])


class CountingInAKernel(Counting):
    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        self.inverse: Any = self.holder()
        self.inverse.alpha = 1.0

    def holder(self) -> Any:
        return Kernel()

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            Model.load_weights(self, [(name, tensor)])
            if name == "scale":
                number = tensor.item()
                self.scale.data.fill_(number)
                self.inverse.alpha = 1 / number


class CountingOnAParameter(CountingInAKernel):
    def holder(self) -> Any:
        return nn.Parameter(torch.zeros(0))


class CountingInAConstant(Filling):
    """Also fills a tensor that is no parameter with the number."""

    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        del self.inverse
        self.inverse: Any = torch.zeros(1)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "scale":
                number = tensor.item()
                self.scale.data.fill_(number)
                self.inverse.data.fill_(number)
            else:
                Model.load_weights(self, [(name, tensor)])


class CountingBesideNaN(Counting):
    """What is NaN before and after the load was not made by it."""

    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        self.unknown = float("nan")


@pytest.mark.parametrize(
    "model",
    [
        *(Counting, CountingInAList, CountingInWhole, Signed, Clamped, Filling),
        *(CountingInAKernel, CountingOnAParameter, CountingInAConstant, CountingBesideNaN),
    ],
)
def test_a_number_that_the_loader_makes_of_a_weight_and_keeps_refuses_the_model_by_name(model: type[Model]) -> None:
    manifest = manifest_of({**weights(0), "scale": torch.ones(1)})
    engine = Engine(model=model)
    for _ in range(2):  # the second model has a number from the first trial load
        with pytest.raises(EngineUnsupported, match=r"might leave behind: inverse\b(?!.*unknown)"):
            ModelInstaller(engine).open(manifest, "standby", partial=False)


class FillingWhole(Filling):
    """With whole numbers."""

    def __init__(self, method: type[Method]) -> None:
        super().__init__(method)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "scale":
                number = tensor.item()
                self.scale.data.fill_(number)
                self.inverse = number + 1
            else:
                Model.load_weights(self, [(name, tensor)])


def test_a_whole_number_that_the_loader_fills_in_and_keeps_refuses_the_model_by_name() -> None:
    manifest = manifest_of({**weights(0), "scale": torch.ones(1, dtype=torch.int64)})
    with pytest.raises(EngineUnsupported, match=r"might leave behind: inverse\b"):
        ModelInstaller(Engine(model=FillingWhole)).open(manifest, "standby", partial=False)


def keep_in_a_kernel(live: Any) -> None:
    live.packed.quant_method.kernel.run_fast = live.embed.detach().to(torch.float16)


def keep_in_a_dict(live: Any) -> None:
    live.positions.sizes = {}
    live.positions.sizes[2, 1] = (live.positions.weight.detach() * 2,)


def keep_in_a_list(live: Any) -> None:
    live.steps[0] = live.embed.detach() * 2


def keep_a_view(live: Any) -> None:
    """Under `standby` it would be one of the replaced weights."""
    live.flat = live.embed.detach().view(-1)


def keep_a_buffer(live: Any) -> None:
    live.packed.register_buffer("scale_inverse", 1 / live.packed.weight_scale)


def keep_on_a_parameter(live: Any) -> None:
    live.embed.transposed = live.embed.detach().t().contiguous()


def keep_in_place_of_a_flag(live: Any) -> None:
    live.packed.quant_method.kernel.fused = live.embed.detach() * 2


def keep_in_place_of_a_number(live: Any) -> None:
    live.steps[2] = live.embed.detach() * 2


LATER = {
    keep_in_a_kernel: r"packed\.quant_method\.kernel\.run_fast",
    keep_in_a_dict: r"positions\.sizes\.\(2, 1\)\.0",
    keep_in_a_list: r"steps\.0",
    keep_a_view: r"flat",
    keep_a_buffer: r"packed\._buffers\.scale_inverse",
    keep_on_a_parameter: r"_parameters\.embed\.transposed",
    keep_in_place_of_a_flag: r"packed\.quant_method\.kernel\.fused",
    keep_in_place_of_a_number: r"steps\.2",
}
"""What an engine derives from weights while it serves, and the name by which the update is refused."""


@pytest.mark.parametrize("policy", ["copy", "standby"])
@pytest.mark.parametrize("keep", LATER)
def test_what_the_engine_derives_after_the_group_was_opened_is_followed_or_refuses_the_update_by_name(
    policy: str, keep: Callable[[Any], None]
) -> None:
    engine = Engine()
    live: Any = engine.live
    live.steps = [None, None, 0]
    live.packed.quant_method.kernel.fused = False
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=False)
    live.note, live.mask, live.sizes = "no tensor", torch.ones(3, dtype=torch.bool), {}
    live.attention.layer, live.attention.weight = live.packed, live.embed  # other names
    update(installer, manifest, weights(1))
    segment = segment_of(weights(2), manifest)
    installer.prepare(segment, lambda: None)
    installer.check_model()
    keep(live)
    for _ in range(2):
        installer.prepare(segment, lambda: None)
        with pytest.raises(EngineUnsupported, match=LATER[keep]):
            installer.check_model()
    assert engine.state() == cold(1)


def test_what_a_step_makes_and_drops_refuses_no_update() -> None:
    engine = Engine()
    live: Any = engine.live
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "standby", partial=False)
    live.positions.hidden = torch.ones(SIZE)
    segment = segment_of(weights(1), manifest)
    installer.prepare(segment, lambda: None)
    del live.positions.hidden
    installer.check_model()
    installer.install(segment)
    installer.finish()
    update(installer, manifest, weights(2))
    assert engine.state() == cold(2)


def test_a_look_that_a_step_disturbs_is_made_again_at_the_boundary() -> None:
    engine = Engine()
    live: Any = engine.live
    installer = ModelInstaller(engine)
    manifest = manifest_of(weights(0))
    installer.open(manifest, "standby", partial=False)

    class Disturbing(nn.Module):
        """A step adds a submodule while the look is at this one."""

        def parameters(self, recurse: bool = True) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    live.positions.steps = [Disturbing()]
    segment = segment_of(weights(1), manifest)
    installer.prepare(segment, lambda: None)
    live.positions.steps = [torch.ones(SIZE)]
    with pytest.raises(EngineUnsupported, match=r"positions\.steps\.0"):
        installer.check_model()
    del live.positions.steps
    installer.check_model()
    installer.install(segment)
    installer.finish()
    assert engine.state() == cold(1)


def test_streaming_is_refused_by_what_the_engine_derived_later_before_a_byte_is_written() -> None:
    engine = Engine()
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "streaming", partial=False)
    keep_in_a_kernel(engine.live)
    with pytest.raises(EngineUnsupported, match=LATER[keep_in_a_kernel]):
        installer.place(manifest.whole(manifest.index["embed"]), weights(1)["embed"])
    installer.undo(None)
    assert engine.state() == cold(0)


def test_tables_of_angles_and_working_memory_may_come_whenever_they_like() -> None:
    engine = Engine()
    live: Any = engine.live
    live.rotary = RotaryEmbedding()
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "standby", partial=False)
    live.rotary.cos_sin = torch.ones(3)
    for seed in (1, 2):
        live.positions((seed, 1))
        update(installer, manifest, weights(seed))


class RotaryEmbedding(nn.Module):
    pass


def test_an_attribute_that_some_weights_set_and_others_do_not_refuses_the_model() -> None:
    engine = Engine(SometimesMore)
    installer = ModelInstaller(engine)
    manifest = manifest_of(weights(0))

    def forty_updates() -> None:
        installer.open(manifest, "standby", partial=False)
        for seed in range(1, 40):
            update(installer, manifest, weights(seed))

    with pytest.raises(EngineUnsupported, match=r"odd"):
        forty_updates()


@pytest.mark.parametrize("derived", [r"attention\.sinks", r"packed\.quant_method\.kernel\.alpha"])
def test_what_was_derived_at_first_use_and_may_be_in_a_captured_graph_refuses_the_model(derived: str) -> None:
    engine = Engine()
    engine.state()
    engine.fixed_addresses = True
    with pytest.raises(EngineUnsupported, match=derived):
        ModelInstaller(engine).open(manifest_of(weights(0)), "copy", partial=False)


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_another_number_than_that_with_which_graphs_were_captured_is_refused(policy: str) -> None:
    """As a scale of the KV cache: a kernel's launch in a graph has the number in it."""
    engine = Engine()
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=False)
    engine.fixed_addresses = engine.captures_graphs = True
    same = {**weights(1), "packed.weight": -weights(0)["packed.weight"]}
    update(installer, manifest, same)
    with pytest.raises(EngineUnsupported, match=r"makes packed\.scale .*, and captured graphs go on with"):
        update(installer, manifest, weights(2))


def test_weights_that_are_other_tensors_together_are_refused_by_name() -> None:
    """As torchao's of a quantised layer: integers and scales."""
    engine = Engine()
    engine.live.head = nn.Parameter(TwoTensor(torch.zeros(SIZE), torch.ones(SIZE)), requires_grad=False)
    with pytest.raises(EngineUnsupported, match=r"head has no memory of its own: it is torchao's TwoTensor"):
        ModelInstaller(engine).open(manifest_of(weights(0)), "copy", partial=False)


def test_weights_on_several_devices_are_refused_when_the_group_is_opened() -> None:
    """As of an engine that offloads some to the host; here a tensor only says that it is on the other device."""
    engine = Engine()
    with FakeTensorMode():
        engine.live.head = nn.Parameter(torch.empty(SIZE, SIZE, device="cuda"))
    with pytest.raises(EngineUnsupported, match=r"several devices: cpu, cuda"):
        ModelInstaller(engine).open(manifest_of(weights(0)), "copy", partial=False)


def test_what_scales_cached_keys_and_values_is_told() -> None:
    """Then requests in flight can't keep theirs: an update may change the numbers by which they are read."""
    engine = Engine()
    installer = ModelInstaller(engine)
    installer.open(manifest_of(weights(0)), "standby", partial=False)
    assert not installer.scales_cache
    engine.cache_scales = frozenset({"scale", "scale_of_values"})
    assert installer.scales_cache
    part = {name: tensor for name, tensor in weights(0).items() if name != "packed.weight"}
    installer.open(manifest_of(part), "standby", partial=True)
    assert not installer.scales_cache


class Marks(Method):
    """Marks the parameter that it leaves, so that the engine chooses a kernel by it."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight: torch.Tensor = layer.weight.detach()  # type: ignore[assignment, operator]
        super().process_weights_after_loading(layer)
        layer.weight = nn.Parameter(weight * 2, requires_grad=False)
        layer.weight.is_positive = bool((weight > 0).all())  # type: ignore[attr-defined]
        layer.weight.loader = self  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_weights_with_which_the_engine_would_have_to_choose_another_kernel_are_refused(policy: str) -> None:
    engine = Engine(Marks)
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=False)
    update(installer, manifest, weights(1))
    positive = {name: tensor.abs() + 1 for name, tensor in weights(2).items()}
    with pytest.raises(EngineUnsupported, match=r"packed\.weight\.is_positive True, and the engine runs with False"):
        update(installer, manifest, positive)


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_weights_that_the_engine_tied_after_loading_are_one(policy: str) -> None:
    engine = Engine(retied=True)
    installer = ModelInstaller(engine)
    tied = {name: tensor for name, tensor in weights(0).items() if name != "head"}
    for manifest in (manifest_of(tied, {"head": "embed"}), manifest_of(tied)):
        installer.open(manifest, policy, partial=False)
        for seed in (1, 2, 3, 4, 5):
            tensors = weights(seed)
            update(installer, manifest, tensors)
            assert torch.equal(engine.live.embed, tensors["embed"])  # type: ignore[arg-type]
            assert engine.live.head is engine.live.embed


def test_a_trainer_that_holds_two_weights_where_the_engine_holds_one_is_told_of_the_tie() -> None:
    with pytest.raises(ManifestMismatch, match=r"tie different weights.*head and embed"):
        ModelInstaller(Engine(retied=True)).open(manifest_of(weights(0)), "standby", partial=False)


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_a_second_name_of_a_tied_weight_that_the_loader_does_not_know_is_left_out(policy: str) -> None:
    """A checkpoint has the weight once. What is only a part of a model is refused: nobody could say whether it lacks the name."""
    engine = Engine()
    installer = ModelInstaller(engine)
    manifest = manifest_of(weights(0), {"tower.head": "embed", "tower.other_head": "head"})
    installer.open(manifest, policy, partial=False)
    for seed in (1, 2, 3):
        update(installer, manifest, weights(seed))
        assert engine.state() == cold(seed)
    part = manifest_of({"embed": weights(0)["embed"]}, {"tower.head": "embed"})
    with pytest.raises(ManifestMismatch, match="tower"):
        ModelInstaller(Engine()).open(part, policy, partial=True)


@pytest.mark.parametrize("policy", ["copy", "standby"])
@pytest.mark.parametrize("order", [("both", "one"), ("one", "both"), ("both", "one", "both", "one")])
def test_what_a_part_does_not_send_keeps_its_bytes_whatever_was_sent_before(
    policy: str, order: tuple[str, ...]
) -> None:
    engine = Engine()
    installer = ModelInstaller(engine)
    parts = {"both": ("embed", "head"), "one": ("head",)}
    held = {name: weights(0)[name] for name in ("embed", "head")}
    for version, part in enumerate(order, 1):
        tensors = {name: weights(version)[name] for name in parts[part]}
        manifest = manifest_of(tensors)
        installer.open(manifest, policy, partial=True)
        update(installer, manifest, tensors)
        held |= tensors
        assert all(torch.equal(getattr(engine.live, name), tensor) for name, tensor in held.items())


def test_the_same_manifest_as_a_whole_model_is_checked_anew() -> None:
    installer = ModelInstaller(Engine())
    manifest = manifest_of({"head": weights(1)["head"]})
    installer.open(manifest, "standby", partial=True)
    with pytest.raises(ManifestMismatch, match="no tensor of the manifest fills"):
        installer.open(manifest, "standby", partial=False)
