"""Whole updates through zones, from slices to live parameters: any sharding lands in any layout, rebuilt modules included."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.transports import pieces
from inference_plugin.transports.base import Delivery, Target
from inference_plugin.transports.zone import ZoneReceiver, ZoneSender
from inference_plugin.wire.errors import TransportUnavailable
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest
from tests.install.test_added_parameters import SIZE, Engine, Model
from tests.install.test_streaming import cut
from tests.support.plain_engine import TIED, PlainEngineModel, checkpoint, digests_expected, live_digests, manifest_of
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.update.cutting import cut_slices, edges_of

WIDE = 64


class WideModel(Model):
    """Most of its bytes stay as they were loaded; others are made from the projection, which may itself be packed."""

    def __init__(self, dtype: torch.dtype, wide: int = WIDE, packs: bool = True) -> None:
        super().__init__(packs=packs, dtype=dtype)
        self.embed = nn.Parameter(torch.empty(wide, SIZE), requires_grad=False)


class WideEngine(Engine):
    def __init__(self, dtype: torch.dtype = torch.float32, wide: int = WIDE, packs: bool = True) -> None:
        live = WideModel(dtype, wide, packs)
        live.load_weights(wide_weights(0, wide).items())
        skeleton = build_skeleton(lambda: WideModel(dtype, wide, packs), torch.no_grad())
        LiveModel.__init__(self, live.finish(), torch.device("cpu"), *skeleton)


def wide_weights(seed: int, wide: int = WIDE) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"embed": (wide, SIZE), "projection.weight": (2 * SIZE, SIZE), "norm": (SIZE,)}
    return {name: torch.randn(*shape, generator=random) for name, shape in shapes.items()}


def cold(seed: int, dtype: torch.dtype, packs: bool = True) -> dict[str, list[float]]:
    live = WideModel(dtype, packs=packs)
    live.load_weights(wide_weights(seed).items())
    return {name: tensor.tolist() for name, tensor in live.finish().named_parameters()}


class Zoned:
    """A worker's installer and zones, and the ranks of a trainer that write into them."""

    def __init__(self, model: LiveModel, manifest: Manifest, *, partial: bool = False) -> None:
        self.manifest = manifest
        self.installer = ModelInstaller(model)
        self.receiver, self.ranks = ZoneReceiver(), [ZoneSender(), ZoneSender()]
        terms = self.installer.open(manifest, "standby", partial=partial, zone=True)
        assert terms.zone is not None and (terms.mechanism, terms.install) == ("plan", "standby")
        self.receiver.land_in(terms.zone, terms.device)

    @contextmanager
    def sealed(self, tensors: Mapping[str, torch.Tensor], boxes: list[Box]) -> Iterator[torch.Tensor]:
        """An update that every rank has written its share of, checked and prepared; dropped unless it was installed."""
        staging = self.receiver.open(self.manifest, b"", ())
        staging.segment.fill_(0xFF)
        target = Target("r", 0, "ipc:///nowhere", os.getpid(), "boot", (), 0, staging.landing)
        pieces: list[Piece] = []
        for number, rank in enumerate(self.ranks):
            slices = [LocalSlice(box, self.part(tensors, box)) for box in boxes[number :: len(self.ranks)]]
            cut_up = cut_slices(slices, edges_of([rank.edges(self.manifest, target)]))
            wrote, _ = rank.write(
                Delivery("t", "policy", number, self.manifest, b"", cut_up, [target], time.monotonic() + 3600)
            )
            pieces += wrote
        self.target, self.boxes = target, [piece.box for piece in pieces]
        staging.check(self.manifest, pieces, lambda: None)
        self.installer.prepare(staging.segment, lambda: None)
        self.staging, self.is_settled = staging, False
        yield staging.segment
        if not self.is_settled:
            self.installer.discard()
        staging.close()

    def update(self, tensors: Mapping[str, torch.Tensor], boxes: list[Box]) -> None:
        with self.sealed(tensors, boxes) as segment:
            self.installer.install(segment)
            self.installer.finish()
            self.staging.settle()
            self.is_settled = True

    def close(self) -> None:
        for one in (self.installer, self.receiver, *self.ranks):
            one.close()

    def part(self, tensors: Mapping[str, torch.Tensor], box: Box) -> torch.Tensor:
        tensor = tensors[self.manifest.tensors[box.tensor].name]
        return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


@settings(max_examples=12, deadline=None)
@given(data=st.data(), rank=st.integers(0, 1), tp=st.integers(1, 2), shortest=st.sampled_from([1, 256]))
def test_any_sharding_leaves_in_any_tensor_parallel_layout_what_a_load_leaves(
    data: st.DataObject, rank: int, tp: int, shortest: int
) -> None:
    """Fused, sharded by rows and by columns, tied; the rows of a slice are read where they lie, or packed first."""
    model = PlainEngineModel(2, rank % tp, tp)
    manifest = manifest_of(checkpoint(0), TIED)
    with closing(Zoned(model, manifest)) as case, patch.object(pieces, "SHORTEST_ROW_BYTES", shortest):
        for version in (1, 2, 0):
            case.update(checkpoint(version), data.draw(cut(case.manifest)))
            assert live_digests(model.live) == digests_expected(checkpoint(version), tp)[rank % tp]


@settings(max_examples=12, deadline=None)
@given(data=st.data(), rank=st.integers(0, 1))
def test_any_sharding_of_a_part_of_the_model_leaves_the_rest_as_it_is(data: st.DataObject, rank: int) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(checkpoint(0))), min_size=1, max_size=4, unique=True))
    model = PlainEngineModel(2, rank, 2)
    part = {name: tensor for name, tensor in checkpoint(0).items() if name in names}
    with closing(Zoned(model, manifest_of(part), partial=True)) as case:
        for version in (1, 2):
            case.update(checkpoint(version), data.draw(cut(case.manifest)))
            mixed = checkpoint(0) | {name: checkpoint(version)[name] for name in names}
            assert live_digests(model.live) == digests_expected(mixed, 2)[rank]


class PaddedModel(nn.Module):
    """A vocabulary whose last rows the engine pads, of which each rank holds its part; the loader fills them."""

    def __init__(self, rows: int, rank: int, tp: int) -> None:
        super().__init__()
        self.rows, self.rank, self.tp = rows, rank, tp
        held = -(-rows // (8 * tp)) * 8
        self.embed = nn.Parameter(torch.empty(held, SIZE, dtype=torch.bfloat16), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(SIZE), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in tensors:
            target = self.get_parameter(name).data
            if name == "embed":
                mine = tensor[self.rank * len(target) :][: len(target)]
                target[len(mine) :].zero_()
                target[: len(mine)].copy_(mine)
            else:
                target.copy_(tensor)
            loaded.add(name)
        return loaded


class PaddedEngine(LiveModel):
    def __init__(self, rows: int, rank: int, tp: int) -> None:
        live, skeleton = (
            PaddedModel(rows, rank, tp),
            build_skeleton(lambda: PaddedModel(rows, rank, tp), torch.no_grad()),
        )
        live.load_weights(padded_weights(0, rows).items())
        super().__init__(live, torch.device("cpu"), *skeleton)

    def pads(self, module: nn.Module) -> bool:
        return True

    def free_bytes(self) -> int:
        return 1 << 30


def padded_weights(seed: int, rows: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    embed = torch.randn(rows, SIZE, generator=random).bfloat16()
    return {"embed": embed, "norm": torch.randn(SIZE, generator=random)}


@settings(max_examples=20, deadline=None)
@given(data=st.data(), rows=st.integers(9, 40), tp=st.integers(1, 2), rank=st.integers(0, 1))
def test_any_sharding_of_a_vocabulary_that_the_engine_pads_leaves_what_a_load_leaves(
    data: st.DataObject, rows: int, tp: int, rank: int
) -> None:
    engine = PaddedEngine(rows, rank % tp, tp)
    with closing(Zoned(engine, manifest_of(padded_weights(0, rows)))) as case:
        for version in (1, 2, 3):
            case.update(padded_weights(version, rows), data.draw(cut(case.manifest)))
            cold_start = PaddedModel(rows, rank % tp, tp)
            cold_start.load_weights(padded_weights(version, rows).items())
            assert live_digests(engine.live) == live_digests(cold_start)


@settings(max_examples=12, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), packs=st.booleans())
def test_modules_that_the_engine_makes_anew_are_made_from_the_zone(
    data: st.DataObject, dtype: torch.dtype, packs: bool
) -> None:
    engine = WideEngine(dtype, packs=packs)
    with closing(Zoned(engine, manifest_of(wide_weights(0)))) as case:
        for version in (1, 2, 0, 3):
            case.update(wide_weights(version), data.draw(cut(case.manifest)))
            assert engine.state() == cold(version, dtype, packs)


def whole(manifest: Manifest) -> list[Box]:
    return [manifest.whole(i) for i in range(len(manifest.tensors))]


def test_rebuilt_modules_are_undone_and_dropped_with_their_zone() -> None:
    engine = WideEngine()
    with closing(Zoned(engine, manifest_of(wide_weights(0)))) as case:
        boxes = whole(case.manifest)
        case.update(wide_weights(1), boxes)
        with case.sealed(wide_weights(2), boxes) as segment:
            case.installer.install(segment)
            assert engine.state() == cold(2, torch.float32)
            case.installer.undo(None)
        assert engine.state() == cold(1, torch.float32)
        with case.sealed(wide_weights(3), boxes):
            pass  # dropped
        assert engine.state() == cold(1, torch.float32)
        case.update(wide_weights(4), boxes)
        assert engine.state() == cold(4, torch.float32)


def test_what_an_engine_computes_with_is_no_view_of_the_tensors_that_it_was_rebuilt_from() -> None:
    """So that post-processing in place leaves what late replicas are caught up from, and the next writer changes nothing."""
    engine = WideEngine()
    case = Zoned(engine, manifest_of(wide_weights(0)))
    with closing(case), case.sealed(wide_weights(1), whole(case.manifest)) as segment:
        start, end = segment.data_ptr(), segment.data_ptr() + segment.nbytes
        case.installer.install(segment)
        case.installer.finish()
        inside = {n for n, p in engine.live.named_parameters() if start <= p.untyped_storage().data_ptr() < end}
        assert inside == {"embed", "norm"}
        kept = case.ranks[0].kept(case.manifest, b"", [case.target])
        assert kept is not None
        for box in case.boxes:
            assert torch.equal(kept(box), case.part(wide_weights(1), box))


def test_a_model_of_which_most_is_rebuilt_takes_a_segment() -> None:
    engine = WideEngine(wide=1)
    installer = ModelInstaller(engine)
    manifest = manifest_of(wide_weights(0, wide=1))
    with pytest.raises(TransportUnavailable, match=r"something else of .*projection.*, which is most of the model"):
        installer.open(manifest, "standby", partial=False, zone=True)
    assert installer.open(manifest, "standby", partial=False).zone is None


def test_a_parameter_that_the_engine_replaced_between_two_updates_takes_the_next_one() -> None:
    model = PlainEngineModel(2, 0, 1)
    with closing(Zoned(model, manifest_of(checkpoint(0), TIED))) as case:
        for version in (1, 2, 3, 4, 5, 6):
            if version == 4:
                model.live.norm.weight = nn.Parameter(model.live.norm.weight.detach().clone(), requires_grad=False)
            case.update(checkpoint(version), whole(case.manifest))
            assert live_digests(model.live) == digests_expected(checkpoint(version))[0]
