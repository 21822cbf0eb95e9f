"""What no update brings back comes back after an engine has discarded the memory of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from inference_plugin.engines.keepsakes import Keepsakes
from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.operations import RankOperation, RankReply
from inference_plugin.engines.rank_runtime import RankIdentity, RankRuntime
from inference_plugin.net import addresses
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import EngineUnsupported
from tests.support.plain_engine import PlainEngineModel, checkpoint, live_digests, manifest_of
from tests.support.reachable import reachable_tensors
from tests.worker.driver import Driver


class Attention:
    """Of an engine: no module."""

    def __init__(self) -> None:
        self.slopes = torch.rand(4)
        self.kv_cache = torch.rand(64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(100, 100))
        self.scale = nn.Parameter(torch.rand(1))
        self.register_buffer("table", torch.rand(8))
        self.ranges = torch.rand(6)[2:4]
        self.packed = torch.rand(100, 100)
        self.impl = Attention()


class Served(LiveModel):
    runtime_state = frozenset({"kv_cache"})


LOST = {".weight", ".packed", ".table", ".impl.kv_cache"}
NEVER_KEPT = {".table", ".impl.kv_cache"}


@pytest.mark.parametrize(("updated", "lost"), [((), LOST), (("weight",), LOST), (("another.weight",), NEVER_KEPT)])
def test_what_no_update_brings_back_survives_the_loss_of_the_memory(updated: tuple[str, ...], lost: set[str]) -> None:
    """The engine keeps buffers, a KV cache is no weight, and an update that writes `weight` packs it anew."""
    layer, keepsakes = Layer(), Keepsakes()
    served = Served(layer, torch.device("cpu"), nn.Module())
    served.note_updated(updated)
    before = {name: tensor.clone() for name, tensor in reachable_tensors(layer).items()} | {
        ".impl.slopes": layer.impl.slopes.clone(),
        ".impl.kv_cache": layer.impl.kv_cache.clone(),
    }
    keepsakes.take([served])
    with torch.no_grad():
        held = reachable_tensors(layer) | {".impl.slopes": layer.impl.slopes, ".impl.kv_cache": layer.impl.kv_cache}
        for tensor in held.values():
            tensor.fill_(float("nan"))
    keepsakes.take([served])  # asleep already: reading the memory would end an engine on a GPU
    keepsakes.give_back()
    assert {name for name, tensor in held.items() if not torch.equal(tensor, before[name])} == lost
    layer.impl.slopes.fill_(7)
    keepsakes.give_back()
    assert layer.impl.slopes.eq(7).all(), "a second time it writes over what lives"


def test_buffers_of_a_draft_are_kept_and_what_somebody_has_loaded_meanwhile_is_left_alone() -> None:
    layers, keepsakes = (Layer(), Layer()), Keepsakes()
    models = [Served(layer, torch.device("cpu"), nn.Module()) for layer in layers]
    before = [layer.table.clone() for layer in layers]
    keepsakes.take(models)
    for layer in layers:
        layer.table.fill_(7)
    keepsakes.give_back()
    assert [torch.equal(layer.table, table) for layer, table in zip(layers, before, strict=True)] == [False, True]
    keepsakes.take(models)
    layers[1].table.fill_(8)
    keepsakes.drop()
    keepsakes.give_back()
    assert layers[1].table.eq(8).all()


class Sleeper:
    """A rank whose engine sleeps by itself, and a small parameter of it that no update has written."""

    def __init__(self, model: PlainEngineModel) -> None:
        self.model = model
        self.runtime = RankRuntime(RankIdentity(addresses.new_replica_id("test"), 0, tp_rank=0), model)
        self.norm = next(p for name, p in model.live.named_parameters() if "norm" in name).data
        self.before = self.norm.clone()

    def sleep(self) -> None:
        self.runtime.note_sleep("the engine's own sleep discarded the weights")
        self.norm.fill_(7)


@pytest.fixture
def sleeper(directory: Path) -> Iterator[Sleeper]:
    one = Sleeper(PlainEngineModel(1, 0, 1))
    with contextlib.closing(one.runtime):
        yield one


def test_an_engine_that_sleeps_by_itself_gets_back_what_no_update_brings(sleeper: Sleeper) -> None:
    sleeper.sleep()
    sleeper.runtime.note_wake_up()
    assert torch.equal(sleeper.norm, sleeper.before)


def test_where_no_memory_went_nothing_is_written_back(sleeper: Sleeper) -> None:
    """The sleep failed, or released nothing, so that somebody could load weights before the end of it."""
    sleeper.sleep()
    sleeper.runtime.note_wake_up("it failed")
    assert sleeper.norm.eq(7).all()
    sleeper.sleep()
    sleeper.runtime.note_load("somebody loads weights")
    sleeper.runtime.note_wake_up()
    assert sleeper.norm.eq(7).all()


def test_an_engine_that_slept_though_nothing_could_be_kept_takes_no_update_any_more(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does its draft, whose group may be open already."""

    def fail(keepsakes: Keepsakes, models: Sequence[LiveModel]) -> None:
        raise MemoryError("the host is full")

    draft = PlainEngineModel(1, 0, 1)
    draft_group = draft.installer("policy")
    monkeypatch.setattr(sleeper.model, "and_draft", lambda: [sleeper.model, draft])
    monkeypatch.setattr(Keepsakes, "take", fail)
    sleeper.sleep()
    assert sleeper.runtime.is_asleep_by_engine
    sleeper.runtime.note_wake_up()
    for let_in in (lambda: sleeper.model.installer("policy"), draft_group.check_terms):
        with pytest.raises(
            EngineUnsupported, match=r"not everything could be kept that no update brings back .* restart the engine"
        ):
            let_in()


def test_a_commit_that_waits_while_the_engine_releases_its_weights_writes_nothing(sleeper: Sleeper) -> None:
    """Requests in flight end first (`drain`), and the user's own sleep comes before the commit's turn."""

    def perform(name: str, txn: str, version: int) -> RankReply:
        operation = RankOperation("n", name, "policy", txn, version)  # type: ignore[arg-type]
        return decode_as(sleeper.runtime.call(msgspec.msgpack.encode(operation)), RankReply)

    before = live_digests(sleeper.model.live)
    weights = checkpoint(5, layers=1)
    with contextlib.closing(Driver(sleeper.runtime.card().address, manifest=manifest_of(weights))) as trainer:
        trainer.open()
        trainer.update("t1", 1, weights)
        assert perform("check", "t1", 1).error is None
        sleeper.runtime.note_sleep("")
        refused = perform("install", "t1", 1).error
        assert refused is not None and refused.kind == "ReplicaAsleep"
        assert perform("undo", "t1", 1).error is None
        sleeper.runtime.note_wake_up()
        assert live_digests(sleeper.model.live) == before
        trainer.update("t2", 2, weights)
        for name in ("check", "install", "finish"):
            assert perform(name, "t2", 2).error is None
    assert live_digests(sleeper.model.live) != before
