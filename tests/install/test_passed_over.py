"""An update may hold what the engine passes over in its own checkpoint, and may lack what that checkpoint does not fill."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.checkpoint_headers import checkpoint_headers
from inference_plugin.wire.errors import EngineUnsupported, ManifestMismatch
from inference_plugin.wire.messages import GroupOpened
from tests.install.installing import segment_of
from tests.support.plain_engine import TIED, PlainEngineModel, checkpoint, digests_expected, live_digests, manifest_of
from trainer_adapters.update.coverage import check_needs, passed_over

POOLER = {"pooler.weight": torch.ones(3, 2), "pooler.bias": torch.ones(3)}
HEAD = {"lm_head.weight": torch.zeros_like(checkpoint(0)["embed.weight"])}
Headers = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class PassesOver(PlainEngineModel):
    """Takes no pooler, and says nothing to names that it does not know; started from a checkpoint that has one."""

    holds = POOLER

    def checkpoint(self) -> Headers:
        held = checkpoint(0) | self.holds
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        known = checkpoint(0).keys() | TIED.keys()
        return super().load_weights(model, ((name, tensor) for name, tensor in tensors if name in known))


class Unknown(PassesOver):
    """Its checkpoint cannot be read."""

    def checkpoint(self) -> Headers:
        return {}


class HasAHead(PassesOver):
    """Ties its head to its embedding; its checkpoint holds the head all the same."""

    holds = HEAD

    def pads(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Embedding)


class TakesItWithAGate(PassesOver):
    """Looks at other names before it takes one: its own checkpoint has a gate, and with that it needs the pooler."""

    holds = POOLER | {"gate": torch.ones(1)}

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        held = dict(tensors)
        if "gate" in held and "pooler.bias" in held:
            model.get_parameter("norm.weight").data[:3].copy_(held["pooler.bias"])
        return super().load_weights(model, held.items())


def opened(model: PlainEngineModel, tensors: Mapping[str, torch.Tensor], *, partial: bool = False) -> tuple[str, ...]:
    """What an update of these tensors passes over. Raises `ManifestMismatch` as the trainer does."""
    manifest = manifest_of(dict(tensors), TIED if "embed.weight" in tensors else {})
    terms = ModelInstaller(model).open(manifest, "standby", partial=partial)
    answer = GroupOpened(terms.needs, terms.mechanism, terms.install, passed_over=terms.passed_over)
    check_needs(manifest, [answer], partial=partial)
    return passed_over(manifest, [answer])


def test_what_the_engine_passes_over_in_its_own_checkpoint_is_named_and_changes_nothing() -> None:
    model = PassesOver(2, 0, 1)
    assert set(opened(model, checkpoint(1) | POOLER)) == POOLER.keys()
    installer = ModelInstaller(model)
    manifest = manifest_of(checkpoint(1) | POOLER, TIED)
    installer.open(manifest, "standby", partial=False)
    for version in (1, 2, 0):
        segment = segment_of(checkpoint(version) | POOLER, manifest)
        installer.prepare(segment, lambda: None)
        installer.install(segment)
        installer.finish()
        assert live_digests(model.live) == digests_expected(checkpoint(version))[0]


def test_a_part_of_the_model_may_hold_what_the_engine_passes_over() -> None:
    norm = {"norm.weight": checkpoint(1)["norm.weight"]}
    assert set(opened(PassesOver(2, 0, 1), norm | POOLER, partial=True)) == POOLER.keys()


@pytest.mark.parametrize(
    ("model", "extra", "words"),
    [
        (PassesOver, {"poler.bias": torch.ones(3)}, "poler.bias"),
        (PassesOver, {"pooler.bias": torch.ones(4)}, "pooler.bias"),
        (Unknown, {"pooler.bias": torch.ones(3)}, "pooler.bias"),
        (HasAHead, HEAD, "lm_head.weight"),
        (TakesItWithAGate, {"pooler.bias": torch.ones(3)}, "pooler.bias"),
    ],
    ids=[
        "misspelt",
        "another shape",
        "no checkpoint to tell",
        "a head that may be the trainer's own",
        "needed with the names of the checkpoint",
    ],
)
def test_a_name_that_the_engines_own_checkpoint_does_not_explain_is_refused(
    model: type[PlainEngineModel], extra: dict[str, torch.Tensor], words: str
) -> None:
    with pytest.raises(ManifestMismatch, match=rf"no place for: {words} \(1 in all\)"):
        opened(model(2, 0, 1), checkpoint(1) | extra)


def test_a_head_alone_is_refused_where_the_engine_computes_with_its_table() -> None:
    with pytest.raises(ManifestMismatch, match=r"no place for: lm_head.weight \(1 in all\)"):
        opened(HasAHead(2, 0, 1), HEAD, partial=True)


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.out.bias", "layers.0.k.weight"])
def test_a_misspelt_weight_leaves_its_parameter_unfilled_and_is_refused(name: str) -> None:
    tensors = {other if other != name else f"{name}_": tensor for other, tensor in checkpoint(1).items()}
    with pytest.raises(ManifestMismatch, match="no tensor of the manifest fills these parameters"):
        opened(PassesOver(2, 0, 1), tensors | POOLER)


class LeavesOne(PassesOver):
    """Has a parameter that its own checkpoint does not fill, and that its loader takes from one that has it."""

    own: tuple[str, ...] = ()

    def __init__(self, layers: int, rank: int, tp: int) -> None:
        super().__init__(layers, rank, tp)
        for model, data in ((self.live, torch.arange(6.0)), (self.skeleton, torch.empty(6, device="meta"))):
            model.register_parameter("positions", nn.Parameter(data, requires_grad=False))

    def checkpoint(self) -> Headers:
        return {**super().checkpoint(), **dict.fromkeys(self.own, ((6,), torch.float32))}

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        held = dict(tensors)
        if "positions" in held:
            model.get_parameter("positions").data.copy_(held["positions"])
        return super().load_weights(model, held.items())


class Fills(LeavesOne):
    own = ("positions",)


def test_a_parameter_that_the_engines_own_checkpoint_does_not_fill_stays_as_it_is_and_the_report_says_so() -> None:
    model = LeavesOne(2, 0, 1)
    installer = ModelInstaller(model)
    manifest = manifest_of(checkpoint(1), TIED)
    terms = installer.open(manifest, "standby", partial=False)
    assert terms.untouched == ("positions",)
    assert terms.why.endswith("no checkpoint fills these, so they stay as the engine made them: positions (1 in all)")
    segment = segment_of(checkpoint(1), manifest)
    installer.prepare(segment, lambda: None)
    installer.install(segment)
    installer.finish()
    assert model.live.get_parameter("positions").tolist() == [0, 1, 2, 3, 4, 5]
    expected = digests_expected(checkpoint(1))[0]
    assert {name: live_digests(model.live)[name] for name in expected} == expected


def test_a_parameter_that_an_earlier_update_wrote_must_be_sent_again() -> None:
    model = LeavesOne(2, 0, 1)
    tensors = checkpoint(1) | {"positions": torch.full((6,), 7.0)}
    for _ in range(2):  # another installer is what a group gets that was closed and is opened again
        installer = ModelInstaller(model)
        manifest = manifest_of(tensors, TIED)
        installer.open(manifest, "standby", partial=False)
        segment = segment_of(tensors, manifest)
        installer.prepare(segment, lambda: None)
        installer.install(segment)
        installer.finish()
        for which in (installer, ModelInstaller(model)):
            with pytest.raises(
                ManifestMismatch, match=r"no tensor of the manifest fills these parameters: positions \(6 elements\)"
            ):
                which.open(manifest_of(checkpoint(2), TIED), "standby", partial=False)


def test_a_parameter_that_the_engines_own_checkpoint_fills_must_be_sent() -> None:
    with pytest.raises(
        ManifestMismatch, match=r"no tensor of the manifest fills these parameters: positions \(6 elements\)"
    ):
        opened(Fills(2, 0, 1), checkpoint(1))


def test_headers_are_read_from_the_files_that_the_index_names(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.ones(())}, tmp_path / "model-1.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    wanted = {"a": ((2, 3), torch.bfloat16), "b": ((), torch.float32)}
    assert checkpoint_headers(str(tmp_path)) == {**wanted, "other": ((1,), torch.float32)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", "model-1.safetensors")}))
    assert checkpoint_headers(str(tmp_path)) == wanted
    index.write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    assert checkpoint_headers(str(tmp_path)) == {}, "a file is missing"
    assert checkpoint_headers(str(tmp_path / "nowhere")) == {}


class RemovesAModule(PlainEngineModel):
    """Makes something else of a module after its first load, and loads into it no second time."""

    def __init__(self, layers: int, rank: int, tp: int) -> None:
        super().__init__(layers, rank, tp)
        self.live.table = self.live.norm.weight.detach() * 2
        del self.live.norm


def test_a_model_whose_modules_the_engine_removed_is_refused_by_their_names() -> None:
    model = RemovesAModule(2, 0, 1)
    for _ in range(2):
        with pytest.raises(EngineUnsupported, match=r"the running engine lacks these modules, .*: norm \(1 in all\)"):
            opened(model, checkpoint(1))
    assert model.live.table.shape == (16,)
    assert "norm.weight" in dict(model.skeleton.named_parameters())


class MakesAModule(PlainEngineModel):
    """Its loader makes a module for a tensor that the constructor knows nothing of, as vLLM's ColBERT does for its projection."""

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        held = dict(tensors)
        if (sent := held.pop("projection.weight", None)) is not None:
            if not hasattr(model, "projection"):
                model.projection = nn.Linear(4, 4, bias=False)
            model.projection.weight.data.copy_(sent)
        return super().load_weights(model, held.items())


def test_a_module_that_only_a_load_makes_is_refused_by_name_where_the_engine_started_without_one() -> None:
    tensors = {**checkpoint(1), "projection.weight": torch.ones(4, 4)}
    model = MakesAModule(2, 0, 1)
    for _ in range(2):
        with pytest.raises(EngineUnsupported, match=r"lacks these modules, .*: projection \(1 in all\)") as refused:
            opened(model, tensors)
        assert "not with dummy weights" in refused.value.hint
    loaded = MakesAModule(2, 0, 1)
    loaded.load_weights(loaded.live, tensors.items())
    assert opened(loaded, tensors) == ()


def test_a_parameter_that_no_checkpoint_fills_is_refused_by_name_where_the_engine_started_with_random_weights() -> None:
    class Started(PassesOver):
        holds: ClassVar[dict[str, torch.Tensor]] = {}

        def checkpoint(self) -> Headers:
            return {name: held for name, held in super().checkpoint().items() if name != "norm.weight"}

    tensors = {name: tensor for name, tensor in checkpoint(1).items() if name != "norm.weight"}
    model = Started(2, 0, 1)
    assert opened(model, tensors) == ()
    model.random_weights = True
    with pytest.raises(EngineUnsupported, match=r"dummy weights, .* fills these: norm\.weight \(1 in all\)") as refused:
        opened(model, tensors)
    assert "send them too" in refused.value.hint
    assert opened(model, checkpoint(1)) == opened(model, tensors, partial=True) == ()
