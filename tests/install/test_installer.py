"""The installer alone, on a small live model: what a commit moves, what a way back restores, what stays untouched."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest
import torch
from torch import nn

from inference_plugin.install.installer import ModelInstaller
from inference_plugin.install.memory import without_full_collections
from inference_plugin.wire.errors import (
    CommitFailed,
    EngineUnsupported,
    ManifestMismatch,
    TornReplica,
    TransportUnavailable,
)
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import BoxDigest
from tests.install.installing import segment_of, update
from tests.support.plain_engine import TIED, PlainEngineModel, checkpoint, digests_expected, live_digests, manifest_of


def addresses_of(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


class Case:
    """A model that serves version 0, and its installer, opened with a policy."""

    def __init__(self, policy: str, model: PlainEngineModel | None = None) -> None:
        self.model = model or PlainEngineModel(2, 0, 1)
        self.manifest = manifest_of(checkpoint(0), TIED)
        self.installer = ModelInstaller(self.model)
        self.terms = self.installer.open(self.manifest, policy, partial=False)

    def prepare(self, version: int) -> torch.Tensor:
        segment = segment_of(checkpoint(version), self.manifest)
        self.installer.prepare(segment, lambda: None)
        return segment

    def update(self, version: int) -> torch.Tensor:
        segment = self.prepare(version)
        self.installer.install(segment)
        self.installer.finish()
        return segment

    def serves(self, version: int) -> bool:
        return live_digests(self.model.live) == digests_expected(checkpoint(version))[0]


class ComputingLoader(PlainEngineModel):
    """A loader that computes with what it loads: no placement plan describes it."""

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        return super().load_weights(model, ((name, tensor * 1.0) for name, tensor in tensors))


class CapturedGraphs(ComputingLoader):
    """Something holds raw addresses of the live parameters."""

    fixed_addresses = True


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_updates_there_and_back_leave_exactly_what_a_load_leaves(policy: str) -> None:
    case = Case(policy)
    assert (case.terms.mechanism, case.terms.install) == ("plan", policy)
    for version in (1, 2, 0, 1):
        case.update(version)
        assert case.serves(version)
    live = case.model.live
    assert live.get_submodule("head").weight is live.get_submodule("embed").weight


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_the_way_back_restores_the_version_before(policy: str) -> None:
    case = Case(policy)
    first = case.update(1)
    case.installer.install(case.prepare(2))
    assert case.serves(2)
    case.installer.undo(first if policy == "copy" else None)
    assert case.serves(1)
    case.update(3)
    assert case.serves(3)


def test_a_first_copy_has_no_way_back_and_says_so() -> None:
    case = Case("copy")
    case.installer.install(case.prepare(1))
    with pytest.raises(TornReplica, match="previous version's bytes are gone"):
        case.installer.undo(None)
    case.update(2)
    assert case.serves(2)


def test_an_installation_that_never_began_needs_no_way_back() -> None:
    case = Case("standby")
    case.installer.undo(None)
    with pytest.raises(CommitFailed, match="nothing was prepared"):
        case.installer.install(segment_of(checkpoint(1), case.manifest))
    case.installer.undo(None)
    assert case.serves(0)


@contextlib.contextmanager
def full_collections() -> Iterator[list[str]]:
    """Notes those of Python's garbage collector, which comes often, and has only what is made from now on to look at."""
    seen: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(phase)

    before = gc.get_threshold()
    gc.freeze()
    gc.collect()  # so that it counts no older object
    gc.set_threshold(50, 1, 1)
    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
        gc.unfreeze()


def test_a_group_that_is_opened_sets_off_no_full_garbage_collection() -> None:
    """Each would keep the engine's own thread from running, for longer the more objects the engine has."""
    case = Case("copy")
    with full_collections() as seen:
        case.installer.open(case.manifest, "copy", partial=True)
        assert seen == [] and gc.get_threshold() == (50, 1, 1)
        with pytest.raises(ManifestMismatch):
            case.installer.open(manifest_of({"unknown": torch.zeros(2)}), "copy", partial=True)
        assert seen == [] and gc.get_threshold() == (50, 1, 1)
        case.update(1)
    assert case.serves(1)


def test_thresholds_that_the_engine_sets_while_groups_are_opened_stay() -> None:
    with full_collections():
        with without_full_collections(), without_full_collections():
            assert gc.get_threshold()[:2] == (50, 1) and gc.get_threshold()[2] > 1 << 30
            gc.set_threshold(700, 10, 10)
        assert gc.get_threshold() == (700, 10, 10)


def alive(addresses: set[int]) -> set[int]:
    """Those addresses at which a tensor or parameter lies. Objects of other tests may still be there: some have no memory of
    their own, and those of other classes are left out, since a parameter without a shape refuses the question."""
    found = set()
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, nn.Parameter):
            with contextlib.suppress(RuntimeError):
                found.add(one.data_ptr())
    return addresses & found


def test_once_the_trainer_is_gone_no_second_set_is_held_and_the_next_update_makes_one() -> None:
    case = Case("standby")
    replaced = set(addresses_of(case.model.live).values())
    case.update(1)
    assert alive(replaced) == replaced, "it serves the next update"
    case.installer.free_kept()
    assert alive(replaced) == set() and case.serves(1)
    assert case.installer.open(case.manifest, "standby", partial=False).takes_bytes > 0
    for version in (2, 1):
        case.update(version)
        assert case.serves(version)


def test_a_swap_keeps_every_parameter_object_and_takes_two_sets_in_turn() -> None:
    case = Case("standby")
    objects = {name: id(p) for name, p in case.model.live.named_parameters()}
    seen = []
    for version in (1, 2, 3, 4):
        case.update(version)
        seen.append(addresses_of(case.model.live))
    assert {name: id(p) for name, p in case.model.live.named_parameters()} == objects
    assert seen[0] == seen[2] and seen[1] == seen[3]
    assert all(seen[0][name] != seen[1][name] for name in seen[0])


def test_a_parameter_that_the_engine_replaced_since_is_noticed_before_anything_moves() -> None:
    case = Case("standby")
    segment = case.prepare(1)
    norm = case.model.live.get_submodule("norm")
    norm.weight = nn.Parameter(norm.get_parameter("weight").detach().clone())
    with pytest.raises(CommitFailed, match=r"replaced parameters .*: norm\.weight"):
        case.installer.install(segment)
    case.installer.undo(None)
    assert case.serves(0)
    case.installer.discard()
    case.update(2)
    assert case.serves(2)


@pytest.mark.parametrize("policy", ["copy", "standby"])
@pytest.mark.parametrize("as_parameter", [True, False])
def test_memory_that_a_parameter_was_given_since_the_last_update_is_written_and_no_other(
    policy: str, as_parameter: bool
) -> None:
    case = Case(policy)
    segment = case.update(1)
    norm = case.model.live.get_submodule("norm")
    other = norm.get_parameter("weight").detach().clone()
    if as_parameter:
        norm.weight = nn.Parameter(other)
    else:
        norm.weight.data = other
    segment.copy_(segment_of(checkpoint(2), case.manifest))
    case.installer.prepare(segment, lambda: None)
    case.installer.install(segment)
    case.installer.finish()
    assert case.serves(2)


@pytest.mark.parametrize("policy", ["copy", "standby", "streaming"])
def test_modules_that_somebody_put_into_the_model_since_are_noticed_and_updated_once_the_group_is_opened_again(
    policy: str,
) -> None:
    case = Case(policy)
    live = case.model.live
    live.add_module("norm", copy.deepcopy(live.get_submodule("norm")))
    with pytest.raises(ManifestMismatch, match="other modules"):
        case.installer.check_terms()
    with pytest.raises(ManifestMismatch, match="other modules"):
        next(case.installer.read_back())
    case.installer.open(case.manifest, "copy", partial=False)
    case.installer.check_terms()
    case.update(2)
    assert case.serves(2)


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_a_parameter_of_another_dtype_than_when_the_group_was_opened_is_an_error_before_anything_is_written(
    policy: str,
) -> None:
    case = Case(policy)
    case.update(1)
    norm = case.model.live.get_submodule("norm")
    before, norm.weight = norm.weight, nn.Parameter(norm.get_parameter("weight").detach().double())
    with pytest.raises(ManifestMismatch, match=r"size or dtype of these .*: norm\.weight"):
        case.prepare(2)
    norm.weight = before
    assert case.serves(1)


def test_a_swap_that_the_memory_does_not_suffice_for_leaves_the_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("standby", CapturedGraphs(2, 0, 1))
    segment = case.prepare(1)
    clone, cloned = torch.Tensor.clone, itertools.count()

    def scarce(tensor: torch.Tensor) -> torch.Tensor:
        if next(cloned) == 3:
            raise torch.OutOfMemoryError("no more of the device's memory")
        return clone(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", scarce)
        with pytest.raises(CommitFailed, match=r"no memory .* no more of the device's memory"):
            case.installer.install(segment)
    case.installer.undo(None)
    assert case.serves(0)
    case.update(2)
    assert case.serves(2)


def test_what_was_prepared_and_dropped_is_not_installed_later() -> None:
    case = Case("standby")
    segment = case.prepare(1)
    case.installer.discard()
    with pytest.raises(CommitFailed):
        case.installer.install(segment)
    case.update(2)
    assert case.serves(2)


@pytest.mark.parametrize("model", [ComputingLoader, CapturedGraphs])
def test_a_loader_that_computes_fills_a_second_set_itself(model: type[PlainEngineModel]) -> None:
    case = Case("copy", model(2, 0, 1))
    assert (case.terms.mechanism, case.terms.install) == ("loader", "standby")
    assert "computed while loading" in case.terms.why
    before = addresses_of(case.model.live)
    for version in (1, 2, 0):
        case.update(version)
        assert case.serves(version)
    case.installer.install(case.prepare(3))
    case.installer.undo(None)
    assert case.serves(0)
    assert (addresses_of(case.model.live) == before) == case.model.fixed_addresses


def test_two_groups_of_one_model_write_their_own_parameters_only() -> None:
    model = PlainEngineModel(2, 0, 1)
    mixed, newer = dict(checkpoint(0)), checkpoint(1)
    claims: list[frozenset[str]] = []
    for norms in (True, False):
        own = {name: tensor for name, tensor in newer.items() if ("norm" in name) == norms}
        manifest = manifest_of(own, {} if norms else TIED)
        installer = ModelInstaller(model)
        with pytest.raises(ManifestMismatch, match="no tensor of the manifest fills"):
            installer.open(manifest, "standby", partial=False)
        installer.open(manifest, "standby", partial=True)
        claims.append(installer.claims)
        segment = segment_of(newer, manifest)
        installer.prepare(segment, lambda: None)
        installer.install(segment)
        installer.finish()
        mixed |= own
        assert live_digests(model.live) == digests_expected(mixed)[0]
    assert claims[0] and claims[1] and not claims[0] & claims[1]


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_what_was_prepared_before_another_group_was_installed_brings_none_of_its_old_values_back(policy: str) -> None:
    model = PlainEngineModel(2, 0, 1)
    newer = checkpoint(1)
    prepared: list[tuple[ModelInstaller, torch.Tensor]] = []
    for norms in (True, False):
        own = {name: tensor for name, tensor in newer.items() if ("norm" in name) == norms}
        manifest = manifest_of(own, {} if norms else TIED)
        installer = ModelInstaller(model)
        installer.open(manifest, policy, partial=True)
        prepared.append((installer, segment_of(newer, manifest)))
        installer.prepare(prepared[-1][1], lambda: None)
    for installer, segment in prepared:
        installer.install(segment)
        installer.finish()
    assert live_digests(model.live) == digests_expected(newer)[0]


class PaddingLoader(PlainEngineModel):
    """A loader that fills what a narrow tensor leaves, and says nothing."""

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        def padded() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                if name == "norm.weight":
                    self.fill(model.get_parameter(name).data, tensor)
                else:
                    yield name, tensor

        return super().load_weights(model, padded())

    def fill(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        target[: len(tensor)].copy_(tensor)
        target[len(tensor) :].zero_()


class ZeroingLoader(PaddingLoader):
    """Fills all of it first, as the router of Inkling in vLLM."""

    def fill(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        target.zero_()
        target[: len(tensor)].copy_(tensor)


@pytest.mark.parametrize("kind", [PaddingLoader, ZeroingLoader])
def test_a_tensor_that_a_loader_would_pad_silently_is_refused_unless_the_engine_pads_there(
    kind: type[PaddingLoader],
) -> None:
    model = kind(2, 0, 1)
    whole = dict(checkpoint(1))
    narrow = whole | {"norm.weight": whole["norm.weight"][:-3]}
    installer = ModelInstaller(model)
    with pytest.raises(ManifestMismatch, match=r"would write zeros .*: norm\.weight \(3 elements\)"):
        installer.open(manifest_of(narrow, TIED), "standby", partial=False)
    installer.open(manifest_of(whole, TIED), "standby", partial=False)
    norm = model.live.get_parameter("norm.weight")
    norm.data[-3:] = 0  # now the engine holds padding there, as it would after a load of its own
    installer.open(manifest_of(narrow, TIED), "standby", partial=False)
    update(
        installer, manifest_of(narrow, TIED), dict(checkpoint(2)) | {"norm.weight": checkpoint(2)["norm.weight"][:-3]}
    )
    norm = model.live.get_parameter("norm.weight")
    assert norm.tolist() == [*checkpoint(2)["norm.weight"][:-3].tolist(), 0, 0, 0]


def test_a_tensor_that_is_half_of_the_checkpoints_is_told_to_look_like_a_shard_where_the_loader_pads() -> None:
    class OfACheckpoint(PaddingLoader):
        def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
            return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in checkpoint(0).items()}

    half = checkpoint(1) | {"norm.weight": checkpoint(1)["norm.weight"][:8]}
    with pytest.raises(ManifestMismatch) as raised:
        ModelInstaller(OfACheckpoint(2, 0, 1)).open(manifest_of(half, TIED), "standby", partial=False)
    assert "smaller than the engine's; these look like one of 2 tensor-parallel shards" in raised.value.hint


class ZonedCase(Case):
    """As `Case`; what is prepared is a zone, filled place by place, whose other bytes are 0xFF."""

    def __init__(self, model: PlainEngineModel | None = None, *, names: Sequence[str] = ()) -> None:
        self.model = model or PlainEngineModel(2, 0, 1)
        whole = checkpoint(0)
        self.names = names or list(whole)
        self.manifest = manifest_of({name: whole[name] for name in self.names}, {} if names else TIED)
        self.installer = ModelInstaller(self.model)
        self.terms = self.installer.open(self.manifest, "standby", partial=bool(names), zone=True)

    def prepare(self, version: int) -> torch.Tensor:
        assert self.terms.zone is not None
        zone = torch.full((self.terms.zone.nbytes,), 0xFF, dtype=torch.uint8)
        tensors = checkpoint(version)
        for place in self.terms.zone.check(self.manifest).places:
            tensor = tensors[self.names[place.box.tensor]]
            part = tensor[tuple(slice(o, o + n) for o, n in zip(place.box.offsets, place.box.sizes, strict=True))]
            for landing in self.terms.zone.landings(self.manifest, place.box):
                landing.view(zone, tensor.dtype).copy_(part)
        self.installer.prepare(zone, lambda: None)
        return zone


def test_a_zone_that_was_filled_place_by_place_is_what_a_load_leaves_and_can_be_swapped_back() -> None:
    case = ZonedCase()
    objects = {name: id(p) for name, p in case.model.live.named_parameters()}
    for version in (1, 2, 0, 1):
        case.update(version)
        assert case.serves(version)
    case.installer.install(case.prepare(3))
    assert case.serves(3)
    case.installer.undo(None)
    assert case.serves(1)
    zone = case.update(4)
    assert case.serves(4) and {name: id(p) for name, p in case.model.live.named_parameters()} == objects
    start, end = zone.data_ptr(), zone.data_ptr() + zone.nbytes
    assert all(start <= address < end for address in addresses_of(case.model.live).values()), (
        "it computes with the zone"
    )
    live = case.model.live
    assert live.get_submodule("head").weight is live.get_submodule("embed").weight
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in live.parameters()}
    assert sum(storages.values()) <= zone.nbytes, "each parameter keeps a storage of its own"


def test_what_a_group_leaves_of_a_fused_parameter_keeps_its_live_bytes_in_a_zone() -> None:
    case = ZonedCase(names=["layers.0.q.weight", "layers.1.norm.weight"])
    for version in (1, 2, 3):
        case.update(version)
        mixed = checkpoint(0) | {name: checkpoint(version)[name] for name in case.names}
        assert live_digests(case.model.live) == digests_expected(mixed)[0]


def test_padding_is_filled_in_a_zone_as_the_loader_fills_it() -> None:
    model = PaddingLoader(2, 0, 1)
    narrow = checkpoint(1) | {"norm.weight": checkpoint(1)["norm.weight"][:-3]}
    norm = model.live.get_parameter("norm.weight")
    norm.data[-3:] = 0
    installer = ModelInstaller(model)
    terms = installer.open(manifest_of(narrow, TIED), "standby", partial=False, zone=True)
    assert terms.zone is not None
    zone = torch.full((terms.zone.nbytes,), 0xFF, dtype=torch.uint8)
    installer.prepare(zone, lambda: None)
    installer.install(zone)
    assert norm.data[-3:].tolist() == [0, 0, 0] and torch.isnan(norm.data[:-3]).all()


class ClearingLoader(PlainEngineModel):
    """A loader that clears a padded parameter before it writes it: in a zone the weights are there before the constant is."""

    def pads(self, module: nn.Module) -> bool:
        return True

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        model.get_parameter("norm.weight").data.zero_()
        return super().load_weights(model, tensors)


@pytest.mark.parametrize(
    ("model", "policy", "why"),
    [
        (ClearingLoader, "standby", "with constants, and then writes weights there"),
        (PlainEngineModel, "copy", "its weights are copied"),
        (ComputingLoader, "standby", "loaded by its own loader"),
        (CapturedGraphs, "auto", "loaded by its own loader"),
    ],
)
def test_where_the_trainer_cannot_write_the_second_set_a_zone_is_refused_and_the_next_terms_hold(
    model: type[PlainEngineModel], policy: str, why: str
) -> None:
    installer = ModelInstaller(model(2, 0, 1))
    manifest = manifest_of(checkpoint(0), TIED)
    with pytest.raises(TransportUnavailable, match=why):
        installer.open(manifest, policy, partial=False, zone=True)
    assert installer.open(manifest, policy, partial=False).zone is None


class Cramped(PlainEngineModel):
    """Little memory is left."""

    left_bytes = 1000

    def free_bytes(self) -> int:
        return self.left_bytes


def take(installer: ModelInstaller, manifest: Manifest, version: int) -> None:
    """A whole update."""
    segment = segment_of(checkpoint(version), manifest)
    installer.prepare(segment, lambda: None)
    installer.install(segment)
    installer.finish()


def test_a_second_set_that_does_not_fit_is_refused_with_both_numbers_and_auto_does_without() -> None:
    model = Cramped(2, 0, 1)
    installer, manifest = ModelInstaller(model), manifest_of(checkpoint(0), TIED)
    model.left_bytes = 1 << 30
    installer.open(manifest, "copy", partial=False)  # the plan is proven
    model.left_bytes = 1 << 10
    with pytest.raises(
        EngineUnsupported, match=r"a second set of \d+ MiB does not fit: 0 MiB are free for this rank .* install='copy'"
    ):
        installer.open(manifest, "standby", partial=False)
    assert installer.open(manifest, "auto", partial=False).install == "copy"
    model.left_bytes = 1 << 30
    assert installer.open(manifest, "auto", partial=False).install == "standby"
    model.left_bytes = manifest.nbytes
    assert installer.open(manifest, "auto", partial=False).install == "copy", "its second set was never made"
    model.left_bytes = 1 << 30
    installer.open(manifest, "auto", partial=False)
    take(installer, manifest, 1)
    model.left_bytes = manifest.nbytes
    assert installer.open(manifest, "auto", partial=False).install == "standby", "its second set is held already"


class Portions(Cramped):
    """Notes the bytes of each load."""

    def __init__(self, layers: int) -> None:
        self.loaded_bytes: list[int] = []
        super().__init__(layers, 0, 1)
        self.loaded_bytes.clear()  # of the live model

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        tensors = list(tensors)
        self.loaded_bytes.append(sum(tensor.nbytes for _, tensor in tensors if not tensor.is_meta))
        return super().load_weights(model, tensors)


def test_a_plan_is_proven_in_the_memory_that_is_free_or_refused_with_both_numbers_before_any_is_taken() -> None:
    model = Portions(40)
    manifest = manifest_of(checkpoint(0, 40), TIED)
    embedding = checkpoint(0)["embed.weight"].nbytes
    model.left_bytes = 2 * embedding - 1  # it is loaded, and replayed in the same place
    with pytest.raises(
        EngineUnsupported, match=r"a trial of the engine's loader takes \d+ MiB, and \d+ MiB are free"
    ) as raised:
        ModelInstaller(model).open(manifest, "copy", partial=False)
    assert raised.value.phase == "open" and set(model.loaded_bytes) == {0}
    model.left_bytes = 2 * embedding
    assert ModelInstaller(model).open(manifest, "copy", partial=False).mechanism == "plan"
    assert sum(model.loaded_bytes) >= manifest.nbytes and max(model.loaded_bytes) <= model.left_bytes


def test_trials_of_a_loader_that_computes_are_refused_with_both_numbers_before_they_take_anything() -> None:
    class Computing(Portions, ComputingLoader):
        pass

    model = Computing(2)
    manifest = manifest_of(checkpoint(0), TIED)
    model.left_bytes = 1 << 10
    with pytest.raises(EngineUnsupported, match="a trial of the engine's loader takes"):
        ModelInstaller(model).open(manifest, "copy", partial=False)
    assert set(model.loaded_bytes) == {0}


def test_ranks_that_share_a_host_do_not_each_count_on_all_of_its_memory() -> None:
    model = Cramped(2, 0, 2)
    installer, manifest = ModelInstaller(model), manifest_of(checkpoint(0), TIED)
    model.left_bytes = 1 << 30
    installer.open(manifest, "copy", partial=False)  # the plan is proven
    model.ranks, model.left_bytes = 1, manifest.nbytes  # a rank's second set is more than half of it all
    assert installer.open(manifest, "standby", partial=False).install == "standby"
    installer.open(manifest, "copy", partial=False)
    model.ranks = 2
    with pytest.raises(EngineUnsupported, match="does not fit"):
        installer.open(manifest, "standby", partial=False)
    assert installer.open(manifest, "auto", partial=False).install == "copy"


def test_replicas_that_share_a_host_do_not_each_count_on_all_of_its_memory() -> None:
    model = Cramped(2, 0, 1)
    installer, manifest = ModelInstaller(model), manifest_of(checkpoint(0), TIED)
    model.left_bytes = 1 << 30
    installer.open(manifest, "copy", partial=False)  # the plan is proven
    model.left_bytes = 3 * manifest.nbytes
    with pytest.raises(EngineUnsupported, match="does not fit"):
        installer.open(manifest, "standby", partial=False, sharing=4)
    two = installer.open(manifest, "auto", partial=False, sharing=2)
    assert (two.install, two.takes_bytes) == ("copy", 0)
    alone = installer.open(manifest, "auto", partial=False)
    assert alone.install == "standby" and alone.takes_bytes >= manifest.nbytes
    take(installer, manifest, 1)
    held = installer.open(manifest, "auto", partial=False, sharing=2)
    assert (held.install, held.takes_bytes) == ("standby", 0)


@pytest.mark.parametrize("loader", [False, True])
def test_memory_that_went_after_the_terms_were_agreed_refuses_the_update_before_anything_is_taken(
    loader: bool,
) -> None:
    class Shrinking(Cramped, ComputingLoader if loader else PlainEngineModel):  # type: ignore[misc]
        pass

    model = Shrinking(2, 0, 1)
    installer, tensors = ModelInstaller(model), checkpoint(0)
    manifest = manifest_of(tensors, TIED)
    model.left_bytes = 1 << 30
    installer.open(manifest, "standby", partial=False)
    segment = segment_of(tensors, manifest)
    model.left_bytes = 1000
    with pytest.raises(EngineUnsupported, match=r"a second set of \d+ MiB does not fit: 0 MiB are free"):
        installer.prepare(segment, lambda: None)
    installer.discard()
    model.left_bytes = 1 << 30
    assert installer.prepare(segment, lambda: None) > 0, "the next update finds nothing in its way"


def test_what_is_read_back_is_what_was_sent() -> None:
    found = []
    for policy in ("standby", "copy"):
        case = Case(policy)
        case.update(5)
        found.append([item for item in case.installer.read_back() if isinstance(item, BoxDigest)])
    assert found[0] == found[1]
    assert {item.name for item in found[0]} == set(checkpoint(5))


class CountingLoader(ComputingLoader):
    """Counts its loads: a proof makes some."""

    loads = 0

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in checkpoint(0).items()}

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        self.loads += 1
        return super().load_weights(model, tensors)


def test_a_group_whose_zone_is_refused_is_proven_once_though_it_is_opened_twice() -> None:
    model, manifest = CountingLoader(2, 0, 1), manifest_of(checkpoint(0), TIED)
    with pytest.raises(TransportUnavailable, match="no second set to write"):
        model.installer("policy").open(manifest, "standby", partial=False, zone=True)
    loads = model.loads
    installer = model.installer("policy")
    installer.open(manifest, "standby", partial=False)
    assert model.loads == loads
    take(installer, manifest, 1)
    assert live_digests(model.live) == digests_expected(checkpoint(1))[0]
    model.installer("another").open(manifest, "standby", partial=False)
    assert model.loads > loads, "what is in force is one group's alone"


def test_a_proof_is_not_used_again_for_another_manifest() -> None:
    model, whole = CountingLoader(2, 0, 1), checkpoint(0)
    with pytest.raises(TransportUnavailable):
        model.installer("policy").open(manifest_of(whole, TIED), "standby", partial=False, zone=True)
    loads = model.loads
    part = {name: tensor for name, tensor in whole.items() if ".0." in name}
    model.installer("policy").open(manifest_of(part), "standby", partial=True)
    assert model.loads > loads


def test_a_proof_is_not_used_again_once_another_group_has_written_what_it_leaves_to_the_engine() -> None:
    model, manifest = CountingLoader(2, 0, 1), manifest_of(checkpoint(0), TIED)
    for holder, device in ((model.live, "cpu"), (model.skeleton, "meta")):
        holder.register_parameter("scale", nn.Parameter(torch.ones(4, device=device)))  # no checkpoint fills it
    scale = {"scale": torch.full((4,), 3.0)}
    another, part = model.installer("another"), manifest_of(scale)
    another.open(part, "copy", partial=True)
    with pytest.raises(TransportUnavailable):
        model.installer("policy").open(manifest, "standby", partial=False, zone=True)
    segment = segment_of(scale, part)
    another.prepare(segment, lambda: None)
    another.install(segment)
    another.finish()
    with pytest.raises(ManifestMismatch, match="scale"):
        model.installer("policy").open(manifest, "standby", partial=False)
