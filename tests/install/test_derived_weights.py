"""Weights that a loader derives from a projection, in a module's attributes: they follow every update, also where the loader
removes the projection, and they are read back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.errors import CommitFailed, EngineUnsupported
from inference_plugin.wire.messages import BoxDigest
from tests.install.installing import segment_of, update
from tests.support.plain_engine import manifest_of

SIZE = 4


class Packs:
    """A quantisation method, called after the load: what is derived is derived before it."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight.data.neg_()  # type: ignore[union-attr, operator]


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Packs()
        self.weight = nn.Parameter(torch.empty(2 * SIZE, SIZE), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(2 * SIZE), requires_grad=False)  # of which nothing is derived


class Attention(nn.Module):
    """As latent attention in SGLang."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = Projection()
        self.norm = nn.Parameter(torch.empty(SIZE), requires_grad=False)
        self.up: torch.Tensor | None = None
        self.down: torch.Tensor | None = None

    def derive(self, removes: bool) -> None:
        up, down = self.projection.weight.detach().split(SIZE)
        self.up, self.down = up.t().contiguous().t(), down.clone()
        if removes:
            del self.projection


class Model(nn.Module):
    def __init__(self, removes: bool) -> None:
        super().__init__()
        self.removes = removes
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)
        for layer in self.layers:
            layer.derive(self.removes)  # type: ignore[operator]

    def finish(self) -> Model:
        for module in self.modules():
            if isinstance(module, Projection):
                module.quant_method.process_weights_after_loading(module)
        return self

    def computes_with(self) -> list[list[float]]:
        tensors = [t for layer in self.layers for t in (layer.up, layer.down, *layer.parameters())]
        return [tensor.tolist() for tensor in tensors]  # type: ignore[union-attr]


@contextlib.contextmanager
def projections_kept(model: Model) -> Iterator[None]:
    held = [(layer, layer.projection) for layer in model.layers]
    try:
        yield
    finally:
        for layer, projection in held:
            layer.projection, layer.up, layer.down = projection, None, None


class Engine(LiveModel):
    post_processing = Packs
    reads_finished = False

    def __init__(self, removes: bool, known: bool = True) -> None:
        self.known = known
        skeleton = build_skeleton(lambda: Model(removes), torch.no_grad())
        live = Model(removes)
        live.load_weights(weights(0).items())
        super().__init__(live.finish(), torch.device("cpu"), *skeleton)

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        assert isinstance(model, Model)
        with projections_kept(model):
            return super().load_weights(model, tensors)

    def finishers(self):  # type: ignore[no-untyped-def]
        removes = self.live.removes
        found = {f"layers.{i}": lambda module: module.derive(removes) for i in range(2) if self.known}
        return {**super().finishers(), **found}

    def reads(self, module: nn.Module) -> tuple[str, ...]:
        return ("projection",) if isinstance(module, Attention) else ()

    left_bytes = 1 << 40

    def free_bytes(self) -> int:
        return self.left_bytes


def weights(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"projection.weight": (2 * SIZE, SIZE), "projection.bias": (2 * SIZE,), "norm": (SIZE,)}
    return {f"layers.{i}.{n}": torch.randn(shape, generator=random) for i in range(2) for n, shape in shapes.items()}


def cold(seed: int, removes: bool) -> list[list[float]]:
    live = Model(removes)
    live.load_weights(weights(seed).items())
    return live.finish().computes_with()


removes = pytest.mark.parametrize("removes", [False, True], ids=["kept", "removed"])


@removes
@pytest.mark.parametrize("fixed", [False, True], ids=["swapped", "in-place"])
@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_derived_weights_follow_every_update_and_the_way_back(policy: str, fixed: bool, removes: bool) -> None:
    engine = Engine(removes)
    engine.fixed_addresses = fixed
    assert engine.live.computes_with() == cold(0, removes)
    addresses = [layer.up.data_ptr() for layer in engine.live.layers]
    manifest = manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=False)
    before = torch.empty(0)
    for seed in (1, 2, 0, 3, 1):
        before = update(installer, manifest, weights(seed))
        assert engine.live.computes_with() == cold(seed, removes)
    segment = segment_of(weights(2), manifest)
    installer.prepare(segment, lambda: None)
    installer.install(segment)
    assert engine.live.computes_with() == cold(2, removes)
    installer.undo(before if installer.needs_previous else None)
    assert engine.live.computes_with() == cold(1, removes)
    if fixed:
        assert [layer.up.data_ptr() for layer in engine.live.layers] == addresses


class Noting(Engine):
    """Notes whose post-processing runs."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        super().__init__(False)

    def finishers(self):  # type: ignore[no-untyped-def]
        def noting(name: str, finish: Callable[[nn.Module], object]) -> Callable[[nn.Module], None]:
            def noted(module: nn.Module) -> None:
                self.noted.append(name)
                finish(module)

            return noted

        return {name: noting(name, finish) for name, finish in super().finishers().items()}


def test_beside_a_decoding_engine_modules_are_made_one_by_one_with_a_rest_after_each_and_none_at_the_commit() -> None:
    engine, manifest = Noting(), manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "standby", partial=False)
    segment = segment_of(weights(1), manifest)
    engine.noted.clear()
    installer.prepare(segment, lambda: engine.noted.append("rest"))
    by_module = " ".join(engine.noted).split("rest")
    made = [names.split() for names in by_module if names.strip()]
    assert sorted(name for names in made for name in names) == sorted(engine.finishers())
    assert [len(names) for names in made] == [1] * len(made) and not by_module[-1]
    engine.noted.clear()
    installer.install(segment)
    installer.finish()
    assert engine.noted == [] and engine.live.computes_with() == cold(1, False)


def test_modules_that_every_update_makes_anew_are_refused_where_memory_lacks_though_a_second_set_is_held() -> None:
    engine, manifest = Engine(False), manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "standby", partial=False)
    update(installer, manifest, weights(1))
    engine.left_bytes = 10
    with pytest.raises(EngineUnsupported, match=r"a second set of \d+ MiB does not fit: 0 MiB are free") as raised:
        update(installer, manifest, weights(2))
    assert raised.value.phase == "seal" and engine.live.computes_with() == cold(1, False)
    installer.discard()
    engine.left_bytes = 1 << 40
    update(installer, manifest, weights(3))
    assert engine.live.computes_with() == cold(3, False)


@removes
def test_derived_weights_are_read_back_and_a_wrong_one_shows(removes: bool) -> None:
    engine, manifest = Engine(removes), manifest_of(weights(0))
    installer = ModelInstaller(engine)
    installer.open(manifest, "standby", partial=False)

    def read() -> set[tuple[str, str]]:
        found = [box for box in installer.read_back() if isinstance(box, BoxDigest)]
        return {(box.name, box.digest) for box in found if not box.signed_zeros}  # those of another form

    update(installer, manifest, weights(1))
    right = read()
    assert {name for name, _ in right} == {"layers.0.projection.weight", "layers.1.projection.weight"}
    engine.live.layers[1].up[0, 0] += 1
    assert {name for name, _ in read() - right} == {"layers.1.projection.weight"}
    update(installer, manifest, weights(1))
    assert read() == right


def test_a_removed_module_that_no_post_processing_reads_refuses_the_model_by_name() -> None:
    with pytest.raises(
        EngineUnsupported, match=r"lacks these modules, .*: layers\.0\.projection, layers\.1\.projection"
    ):
        ModelInstaller(Engine(True, known=False)).open(manifest_of(weights(0)), "copy", partial=False)


def test_a_trial_of_post_processing_is_refused_with_both_numbers_before_it_takes_memory() -> None:
    engine, manifest = Engine(False), manifest_of(weights(0))
    noted: list[str] = []
    finishers = engine.finishers
    engine.finishers = lambda: {name: partial(note, name, finish) for name, finish in finishers().items()}  # type: ignore[method-assign]

    def note(name: str, finish: Callable[[nn.Module], None], module: nn.Module) -> None:
        noted.append(name)
        finish(module)

    engine.left_bytes = 3 * 4 * (2 * SIZE * SIZE + 3 * SIZE) - 1  # two stand-ins and a copy of a layer, of float32
    with pytest.raises(
        EngineUnsupported, match=r"post-processing of layers\.0 takes \d+ MiB, and \d+ MiB are free"
    ) as raised:
        ModelInstaller(engine).open(manifest, "copy", partial=False)
    assert raised.value.phase == "open" and "layers.0" not in noted
    engine.left_bytes += 1
    ModelInstaller(engine).open(manifest, "copy", partial=False)
    assert "layers.0" in noted


class Scales:
    """A quantisation method that derives a tensor from two parameters, and leaves both as they are."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.scaled = layer.get_parameter("weight").detach() * layer.get_parameter("scale").detach()


class Scaled(nn.Module):
    """The constructor gives `scale` a value."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Scales()
        self.weight = nn.Parameter(torch.empty(SIZE), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(SIZE), requires_grad=False)


class ScaledModel(nn.Module):
    kind: type[nn.Module] = Scaled

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.kind()

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.layer.get_parameter(name).data.copy_(tensor)


class ScaledEngine(LiveModel):
    post_processing: type = Scales
    model: type[ScaledModel] = ScaledModel

    def __init__(self) -> None:
        live = self.model()
        live.load_weights({"weight": torch.full((SIZE,), 1.0), "scale": torch.full((SIZE,), 3.0)}.items())
        live.layer.quant_method.process_weights_after_loading(live.layer)
        super().__init__(live, torch.device("cpu"), *build_skeleton(self.model, torch.no_grad()))

    def free_bytes(self) -> int:
        return 1 << 30


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_what_is_derived_of_a_part_and_of_a_parameter_outside_it_takes_that_one_as_the_engine_has_it(
    policy: str,
) -> None:
    """The checkpoint filled it, not the constructor."""
    engine, manifest = ScaledEngine(), manifest_of({"weight": torch.zeros(SIZE)})
    installer = ModelInstaller(engine)
    installer.open(manifest, policy, partial=True)
    for value in (5.0, 6.0):
        update(installer, manifest, {"weight": torch.full((SIZE,), value)})
        assert engine.live.layer.scaled.tolist() == [3.0 * value] * SIZE  # type: ignore[union-attr, operator]


def test_an_update_whose_modules_were_made_before_another_group_wrote_is_refused_and_changes_nothing() -> None:
    engine, parts = ScaledEngine(), ["weight", "scale"]
    manifests = {name: manifest_of({name: torch.zeros(SIZE)}) for name in parts}
    installers = {name: ModelInstaller(engine) for name in parts}
    for name in parts:
        installers[name].open(manifests[name], "standby", partial=True)
    segment = segment_of({"weight": torch.full((SIZE,), 5.0)}, manifests["weight"])
    installers["weight"].prepare(segment, lambda: None)
    update(installers["scale"], manifests["scale"], {"scale": torch.full((SIZE,), 4.0)})
    with pytest.raises(CommitFailed, match=r"another group has written .* modules .* were made: layer\.scale"):
        installers["weight"].check_model()
    installers["weight"].discard()
    assert engine.live.layer.scaled.tolist() == [4.0] * SIZE  # type: ignore[union-attr, operator]
    update(installers["weight"], manifests["weight"], {"weight": torch.full((SIZE,), 6.0)})
    assert engine.live.layer.scaled.tolist() == [24.0] * SIZE  # type: ignore[union-attr, operator]


class Counts:
    """A quantisation method that adds what it derives to buffers, which no checkpoint fills."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.get_buffer("total").add_(layer.get_parameter("weight").detach().sum())
        layer.get_buffer("loads").add_(1)


class Counted(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Counts()  # type: ignore[assignment]
        self.register_buffer("total", torch.full((1,), 0.5), persistent=False)
        self.register_buffer("loads", torch.zeros(1), persistent=False)


class CountedModel(ScaledModel):
    kind = Counted


class CountedEngine(ScaledEngine):
    post_processing, model = Counts, CountedModel


@pytest.mark.parametrize("policy", ["copy", "standby", "streaming"])
def test_a_buffer_to_which_post_processing_adds_begins_with_the_constructors_value_at_each_update(policy: str) -> None:
    engine, tensors = CountedEngine(), {"weight": torch.zeros(SIZE), "scale": torch.zeros(SIZE)}
    manifest, installer = manifest_of(tensors), ModelInstaller(engine)
    assert installer.open(manifest, policy, partial=False).install == policy
    for value in (5.0, 6.0):
        tensors = {name: torch.full((SIZE,), value) for name in tensors}
        for i, spec in enumerate(manifest.tensors if policy == "streaming" else ()):
            installer.place(manifest.whole(i), tensors[spec.name])
        update(installer, manifest, tensors)
        assert (engine.live.layer.total.item(), engine.live.layer.loads.item()) == (value * SIZE + 0.5, 1.0)  # type: ignore[union-attr, operator]
