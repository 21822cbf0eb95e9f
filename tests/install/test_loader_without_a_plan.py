"""Where no placement plan describes the loader, a manifest is as strictly checked as where one does."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from inference_plugin.install import misfits
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.errors import EngineUnsupported, ManifestMismatch, WeightwireError
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import GroupOpened
from tests.install.installing import update
from tests.install.test_installer import Case, ComputingLoader
from tests.support.plain_engine import TIED, PlainEngineModel, checkpoint, manifest_of
from trainer_adapters.update.coverage import check_needs


class KeepsOneForAnother(PlainEngineModel):
    """Keeps q until k has come: the loader takes each tensor alone, and no plan describes it with all of them.

    It says nothing to names that it doesn't know.
    """

    runtime_state = frozenset({"kept"})  # nothing computes with it

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        held = dict(tensors)
        if {"layers.0.q.weight", "layers.0.k.weight"} <= held.keys():
            model.kept = held["layers.0.q.weight"]
        known = ((name, tensor) for name, tensor in held.items() if not name.startswith("extra"))
        return super().load_weights(model, known)


class NamesAllParameters(PlainEngineModel):
    """Refuses a name that it doesn't know by a list of all parameters, and a tied head without its embedding, as vLLM does."""

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        held = dict(tensors)
        if unknown := held.keys() - checkpoint(0).keys() - TIED.keys():
            raise ValueError(
                f"There is no {unknown}. The available parameters are {list(dict(model.named_parameters())) * 99}"
            )
        if not TIED.items() & {(alias, name) for alias in held for name in held} and TIED.keys() & held.keys():
            raise ValueError("the head is tied, and its embedding was not found")
        return super().load_weights(model, held.items())


def test_a_tensor_that_the_engine_lacks_is_named_alone_and_briefly_and_the_hint_says_how_to_leave_it_out() -> None:
    installer = ModelInstaller(NamesAllParameters(2, 0, 1))
    tensors = checkpoint(1) | {"value_head.weight": torch.zeros(3)}
    with pytest.raises(
        ManifestMismatch, match=r"can't take: value_head\.weight \[3\] float32: .*\(1 in all\)"
    ) as raised:
        installer.open(manifest_of(tensors, TIED), "standby", partial=False)
    assert len(raised.value.message) < 400 and "exclude=" in raised.value.hint


class KnowsItsCheckpoint(NamesAllParameters):
    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in checkpoint(0).items()}


class HasScales(KnowsItsCheckpoint):
    """Started from weights that somebody quantised."""

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        scales = {f"{name}_scale_2": ((), torch.float32) for name in super().checkpoint()}
        return {**super().checkpoint(), **scales}


@pytest.mark.parametrize("quantises", [False, True])
def test_who_quantises_already_is_not_told_to_but_what_else_is_wrong(quantises: bool) -> None:
    tensors = checkpoint(1) | {"value_head.weight": torch.zeros(3)}
    if quantises:
        tensors |= {name: torch.ones(()) for name in HasScales(2, 0, 1).checkpoint() if name.endswith("_scale_2")}
    with pytest.raises(ManifestMismatch) as raised:
        ModelInstaller(HasScales(2, 0, 1)).open(manifest_of(tensors, TIED), "standby", partial=False)
    assert ("exclude=" if quantises else "QuantizedAdapter(source, checkpoint)") in raised.value.hint


def of_peft(name: str) -> str:
    return "base_model.model." + name.replace("q.weight", "q.base_layer.weight")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (
            {n.removeprefix("layers."): t for n, t in checkpoint(1).items()},
            "names begin with 'layers.': give the whole",
        ),
        (
            {f"model.{n}": t for n, t in checkpoint(1).items()} | {"v.weight": torch.ones(3)},
            "don't begin with 'model.'",
        ),
        ({of_peft(n): t for n, t in checkpoint(1).items()}, "give the PEFT model itself"),
        ({n: t[::2] if ".q." in n else t for n, t in checkpoint(1).items()}, "one of 2 tensor-parallel shards"),
        ({n: torch.zeros(15, 15) for n in checkpoint(1)}, "leave out what the engine lacks"),
    ],
    ids=["a part of the model", "a wrapper", "PEFT's state dict", "a shard", "another model"],
)
def test_what_was_given_is_told_once_from_the_names_and_shapes_that_the_loader_refuses(
    given: dict[str, torch.Tensor], hint: str
) -> None:
    with pytest.raises(ManifestMismatch) as raised:
        ModelInstaller(KnowsItsCheckpoint(2, 0, 1)).open(manifest_of(given), "standby", partial=False)
    assert hint in raised.value.hint and raised.value.message.count("the loader raised") == 1


class JoinsInHostMemory(PlainEngineModel):
    """Takes a weight only together with a factor of it, and moves both to the host, which no meta tensor can: as vLLM loads the
    adapters of Jina's embedding models."""

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        held = dict(tensors)
        for name in [name for name in held if name.endswith(".factor")]:
            weight = held[name.removesuffix(".factor")].to("cpu") * held.pop(name).to("cpu")
            held[name.removesuffix(".factor")] = weight
        return super().load_weights(model, held.items())


def test_tensors_that_a_loader_takes_only_together_are_no_misfits_where_it_needs_their_values() -> None:
    tensors = checkpoint(1) | {"norm.weight.factor": torch.full((16,), 3.0)}
    terms = ModelInstaller(JoinsInHostMemory(2, 0, 1)).open(manifest_of(tensors, TIED), "standby", partial=False)
    assert terms.mechanism == "loader" and "cannot be traced" in terms.why
    lone = manifest_of({name: tensor for name, tensor in tensors.items() if name != "norm.weight"}, TIED)
    with pytest.raises(WeightwireError, match=r"norm\.weight"):
        ModelInstaller(JoinsInHostMemory(2, 0, 1)).open(lone, "standby", partial=False)


class MovesAPart(PlainEngineModel):
    """Moves a part of the model to the engine's device once it is loaded, as vLLM does for MiniCPM-V."""

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        loaded = super().load_weights(model, tensors)
        model.get_submodule("norm").to("cpu")
        return loaded


def test_a_loader_that_moves_a_part_of_the_model_to_a_device_installs_itself() -> None:
    terms = ModelInstaller(MovesAPart(2, 0, 1)).open(manifest_of(checkpoint(1), TIED), "standby", partial=False)
    assert terms.mechanism == "loader" and "cannot be traced" in terms.why


class OfACheckpoint(PlainEngineModel):
    """Counts its loads, each of which takes a real engine's model as long as the number of its tensors."""

    loads = 0

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in checkpoint(0, 20).items()}

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        self.loads += 1
        return super().load_weights(model, tensors)


def test_a_tensor_of_a_wrong_shape_is_named_with_the_expected_one_after_a_few_loads_however_many_tensors_there_are() -> (
    None
):
    model = OfACheckpoint(20, 0, 1)
    tensors = checkpoint(1, 20) | {"layers.17.norm.weight": torch.zeros(15)}
    before = model.loads
    with pytest.raises(
        ManifestMismatch, match=r"layers\.17\.norm\.weight \[15\] float32, expected \[16\] as .*: .*\(1 in all\)"
    ):
        ModelInstaller(model).open(manifest_of(tensors, TIED), "standby", partial=False)
    assert model.loads - before < 10


def test_where_all_shapes_are_wrong_the_first_are_named_with_the_expected_ones() -> None:
    tensors = {name: torch.zeros(15, 15) for name in checkpoint(1, 20)}
    with pytest.raises(ManifestMismatch, match=r"embed\.weight \[15, 15\].*, expected \[48, 16\].*\(122 in all"):
        ModelInstaller(OfACheckpoint(20, 0, 1)).open(manifest_of(tensors), "standby", partial=False)


class Counted(PlainEngineModel):
    """Counts its loads. Its checkpoint can't be read."""

    loads = 0

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        self.loads += 1
        return super().load_weights(model, tensors)


class RaisesAtTheEnd(Counted):
    """Tells only then that it can't take a tensor."""

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        held = dict(tensors)
        unknown = held.pop("extra.weight", None)
        held = {name.replace("last", "norm"): tensor for name, tensor in held.items()}
        super().load_weights(model, held.items())
        assert unknown is None, "unknown tensors"
        return None


@pytest.mark.parametrize(("seconds", "count"), [(10.0, "122 in all"), (0.0, "at least 8")])
def test_where_no_checkpoint_tells_how_many_tensors_are_wrong_they_are_counted_for_a_limited_time(
    seconds: float, count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials of many thousands would take hours."""
    monkeypatch.setattr(misfits, "MISFITS_S", seconds)
    model = Counted(20, 0, 1)
    tensors = {name: torch.zeros(15, 15) for name in checkpoint(1, 20)}
    with pytest.raises(ManifestMismatch, match=rf"embed\.weight \[15, 15\].*, \.\.\. \({count}\)"):
        ModelInstaller(model).open(manifest_of(tensors), "standby", partial=False)
    assert (model.loads < 20) is ("at least" in count)


@pytest.mark.parametrize(("seconds", "named"), [(10.0, True), (0.0, False)])
def test_tensors_are_tried_one_by_one_for_a_limited_time(
    seconds: float, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(misfits, "MISFITS_S", seconds)
    model = RaisesAtTheEnd(5, 0, 1)
    tensors = {**checkpoint(1, 5), "extra.weight": torch.zeros(3)}
    tensors["last.weight"] = tensors.pop("norm.weight")
    error, words = (ManifestMismatch, r"extra\.weight") if named else (EngineUnsupported, "unknown tensors")
    with pytest.raises(error, match=words):
        ModelInstaller(model).open(manifest_of(tensors), "standby", partial=False)
    assert (model.loads > len(tensors)) is named


def test_a_parameter_that_a_smaller_tensor_does_not_fill_is_told_with_that_tensors_expected_shape() -> None:
    class TakesWhatThereIs(OfACheckpoint):
        def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
            norm = model.get_parameter("norm.weight")
            for name, tensor in tensors:
                if name == "norm.weight":
                    norm.data[: len(tensor)].copy_(tensor)
                else:
                    super().load_weights(model, [(name, tensor)])

    tensors = checkpoint(1, 20) | {"norm.weight": torch.zeros(15)}
    with pytest.raises(ManifestMismatch, match=r"norm\.weight \(1 elements\).*norm\.weight \[15\], expected \[16\]"):
        ModelInstaller(TakesWhatThereIs(20, 0, 1)).open(manifest_of(tensors, TIED), "standby", partial=False)


@pytest.mark.parametrize("missing", ["layers.0.v.weight", "layers.1.out.bias", "norm.weight"])
def test_a_model_that_is_not_whole_is_refused_where_the_plan_is(missing: str) -> None:
    tensors = {name: tensor for name, tensor in checkpoint(1).items() if name != missing}
    installer = ModelInstaller(KeepsOneForAnother(2, 0, 1))
    with pytest.raises(ManifestMismatch, match=missing.split(".")[-2]):
        installer.open(manifest_of(tensors, TIED), "standby", partial=False)


def test_a_part_of_a_fused_parameter_that_is_missing_is_refused_where_the_loader_computes_it() -> None:
    tensors = {name: tensor for name, tensor in checkpoint(1).items() if name != "layers.0.k.weight"}
    installer = ModelInstaller(ComputingLoader(2, 0, 1))
    with pytest.raises(ManifestMismatch, match="qkv"):
        installer.open(manifest_of(tensors, TIED), "standby", partial=False)


class MakesItsNorm(OfACheckpoint):
    """Computes one weight from a head, which it loads into memory of its own, as vLLM makes a classifier of two tokens."""

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {**super().checkpoint(), "answers.weight": ((48, 16), torch.float32)}

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        head, held = torch.empty(48, 16), dict(tensors)
        if (sent := held.pop("answers.weight", None)) is not None:
            head.copy_(sent)
        held.pop("norm.weight", None)
        super().load_weights(model, held.items())
        model.get_parameter("norm.weight").data.copy_(head[3] - head[[4]][0])
        return None


@pytest.mark.parametrize("partial", [False, True])
def test_a_weight_that_the_loader_makes_of_tensors_that_are_not_sent_refuses_the_group(partial: bool) -> None:
    tensors = {name: tensor for name, tensor in checkpoint(1, 20).items() if name != "norm.weight"}
    head = {"answers.weight": torch.ones(48, 16)}
    ModelInstaller(MakesItsNorm(20, 0, 1)).open(manifest_of(tensors | head, TIED), "standby", partial=partial)
    with pytest.raises(
        ManifestMismatch, match=r"doesn't send: norm\.weight \(1 in all\); .* also has .*answers\.weight"
    ):
        ModelInstaller(MakesItsNorm(20, 0, 1)).open(manifest_of(tensors, TIED), "standby", partial=partial)


class LoadsItsNormInAThread(OfACheckpoint):
    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        held = dict(tensors)
        if (norm := held.pop("norm.weight", None)) is not None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(super().load_weights, model, [("norm.weight", norm)]).result()
        return super().load_weights(model, held.items())


@pytest.mark.parametrize("partial", [False, True])
def test_what_the_loader_writes_in_another_thread_is_updated(partial: bool) -> None:
    model = LoadsItsNormInAThread(20, 0, 1)
    installer, manifest = ModelInstaller(model), manifest_of(checkpoint(1, 20), TIED)
    assert installer.open(manifest, "standby", partial=partial).mechanism == "loader"
    for seed in (1, 2):
        update(installer, manifest, checkpoint(seed, 20))
        assert torch.equal(model.live.get_parameter("norm.weight"), checkpoint(seed, 20)["norm.weight"])


class MakesItsNormOfHalves(OfACheckpoint):
    """Brings two tensors together in memory of its own, as engines' loaders for Humming do with parts of a fused layer."""

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {**super().checkpoint(), "upper.weight": ((8,), torch.float32), "lower.weight": ((8,), torch.float32)}

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        whole, held = torch.empty(16), dict(tensors)
        for half, name in zip(whole.chunk(2), ("upper.weight", "lower.weight"), strict=True):
            if (sent := held.pop(name, None)) is not None:
                half.copy_(sent)
        held.pop("norm.weight", None)
        super().load_weights(model, held.items())
        model.get_parameter("norm.weight").data.copy_(whole)
        return None


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("missing", ["upper.weight", "lower.weight"])
def test_a_weight_that_the_loader_makes_of_tensors_of_which_one_is_not_sent_refuses_the_group(
    missing: str, partial: bool
) -> None:
    tensors = {name: tensor for name, tensor in checkpoint(1, 20).items() if name != "norm.weight"}
    tensors |= {"upper.weight": torch.ones(8), "lower.weight": torch.ones(8)}
    ModelInstaller(MakesItsNormOfHalves(20, 0, 1)).open(manifest_of(tensors, TIED), "standby", partial=partial)
    del tensors[missing]
    with pytest.raises(ManifestMismatch, match=rf"doesn't send: norm\.weight \(1 in all\); .* also has .*{missing}"):
        ModelInstaller(MakesItsNormOfHalves(20, 0, 1)).open(manifest_of(tensors, TIED), "standby", partial=partial)


def opened(model: PlainEngineModel, tensors: dict[str, torch.Tensor]) -> tuple[Manifest, GroupOpened]:
    manifest = manifest_of(tensors, TIED)
    terms = ModelInstaller(model).open(manifest, "standby", partial=False)
    return manifest, GroupOpened(terms.needs, terms.mechanism, terms.install, passed_over=terms.passed_over)


@pytest.mark.parametrize("kind", [KeepsOneForAnother, ComputingLoader])
def test_a_name_that_the_loader_passes_over_is_refused_where_the_plan_is(kind: type[PlainEngineModel]) -> None:
    class PassesOver(kind):  # type: ignore[valid-type, misc]
        def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
            return super().load_weights(model, ((n, t) for n, t in tensors if not n.startswith("extra")))

    manifest, terms = opened(PassesOver(2, 0, 1), checkpoint(1) | {"extra.weight": torch.zeros(3)})
    assert terms.mechanism == "loader"
    with pytest.raises(ManifestMismatch, match=r"no place for: extra\.weight \(1 in all\)"):
        check_needs(manifest, [terms], partial=False)


def test_an_installation_is_finished_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("copy", ComputingLoader(2, 0, 1))
    segment = case.prepare(1)
    case.installer.install(segment)

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # what CPython says at RLIMIT_NPROC

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        case.installer.finish()
    assert case.serves(1)


class LacksMemory(PlainEngineModel):
    """Allocates more than there is in one of its loads: torch and numpy say so in different words."""

    numpy = False
    lacks_in = 0
    loads = 0

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        self.loads += 1
        if self.loads == self.lacks_in:
            np.empty(1 << 60, dtype=np.uint8) if self.numpy else torch.empty(1 << 60, dtype=torch.uint8, device="cpu")
        return super().load_weights(model, tensors)


class LacksMemoryBesideComputing(LacksMemory, ComputingLoader):
    """No plan describes it: it also runs the trial loads of its parts, and of the whole model."""


@pytest.mark.parametrize("numpy", [False, True], ids=["torch", "numpy"])
@pytest.mark.parametrize("kind", [LacksMemory, LacksMemoryBesideComputing])
def test_memory_that_ends_in_a_trace_or_a_trial_load_says_so_and_decides_nothing_about_the_plan(
    kind: type[LacksMemory], numpy: bool
) -> None:
    fine = kind(2, 0, 1)
    installer, manifest = ModelInstaller(fine), manifest_of(checkpoint(1), TIED)
    fine.loads = 0
    wanted = installer.open(manifest, "standby", partial=False)
    loads = fine.loads
    assert loads >= 2
    for number in range(1, loads + 1):
        model = kind(2, 0, 1)
        installer = ModelInstaller(model)
        model.loads, model.lacks_in, model.numpy = 0, number, numpy
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            installer.open(manifest, "standby", partial=False)
        assert "limit of memory" in WeightwireError.wrap(raised.value).hint
        terms = installer.open(manifest, "standby", partial=False)
        assert (terms.mechanism, terms.why, terms.needs) == (wanted.mechanism, wanted.why, wanted.needs)


def test_a_proof_that_can_start_no_thread_says_so_and_decides_nothing_about_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installer, manifest = ModelInstaller(PlainEngineModel(2, 0, 1)), manifest_of(checkpoint(1), TIED)

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # what CPython says at RLIMIT_NPROC

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread") as raised:
            installer.open(manifest, "standby", partial=False)
    assert "of processes" in WeightwireError.wrap(raised.value).hint
    assert installer.open(manifest, "standby", partial=False).mechanism == "plan"
