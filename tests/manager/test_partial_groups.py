"""A group that sends another part of the model each time: what an update does not send keeps the bytes that it has."""

from __future__ import annotations

from typing import Any

import pytest

from inference_plugin.wire.errors import CommitFailed, ManifestMismatch, TornReplica
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.messages import GroupOpened
from tests.manager.conftest import Start
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected
from tests.support.rig import Rig
from trainer_adapters.update.coverage import check_needs, passed_over

PARTS: dict[str, tuple[str, ...]] = {
    "A": ("layers.0.",),
    "B": ("layers.1.",),
    "AB": ("layers.",),
    "k": ("layers.0.k.",),  # a third of a fused parameter
    "qv": ("layers.0.q.", "layers.0.v."),
    "norm": ("norm.", "layers.0.norm."),
    "embed": ("embed.",),  # and with it the head, which is tied
    "all": ("",),
}
"""Prefixes of the names that an update of each part sends."""

ORDERS = ["AB A", "A AB", "A B A B", "AB A B AB A", "AB k qv k", "k AB k", "all norm A k all B", "embed A embed all"]


class Held:
    """What a replica must hold: of each tensor, the version that last sent it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.tensors = checkpoint(0, rig.layers)

    def part(self, part: str, version: int) -> ShardSource:
        tensors = checkpoint(version, self.rig.layers)
        return ShardSource({name: t for name, t in tensors.items() if name.startswith(PARTS[part])})

    def committed(self, sent: ShardSource) -> None:
        self.tensors |= sent.tensors

    def check(self, after: str) -> None:
        assert self.rig.peek() == digests_expected(self.tensors, self.rig.tp, self.rig.layers), after


@pytest.mark.parametrize("install", ["standby", "copy"])
@pytest.mark.parametrize("order", ORDERS)
def test_what_a_partial_update_does_not_send_keeps_its_bytes_whatever_was_sent_before(
    start: Start, order: str, install: Any
) -> None:
    held = Held(start(tp=2))
    held.check("the start")
    with SyncManager(partial=True, install=install, timeout_s=60) as manager:
        for version, part in enumerate([*order.split(), *order.split()], 1):
            sent = held.part(part, version)
            report = manager.update(sent, version)
            assert [(r.status, r.install) for r in report.replicas] == [("committed", install)]
            held.committed(sent)
            held.check(f"{part} as version {version} of {order}, {order}")
        assert manager.verify(sent).ok


@pytest.mark.parametrize("failed", ["AB", "A", "all", "k"])
def test_a_partial_update_after_a_failed_one_of_another_part_brings_back_nothing_of_it(
    start: Start, failed: str
) -> None:
    held = Held(start(tp=2))
    with SyncManager(partial=True, install="standby", timeout_s=60) as manager:
        for version, part in ((1, "all"), (4, "B"), (7, "A"), (10, "k")):
            manager.update(sent := held.part(part, version), version)
            held.committed(sent)
            held.rig.ask("fail", step="install", rank=1)
            with pytest.raises(CommitFailed):
                manager.update(held.part(failed, version + 1), version + 1)
            held.check(f"the failed update of {failed} after {part}")
            manager.update(sent := held.part("B", version + 2), version + 2)
            held.committed(sent)
            held.check(f"B after the failed update of {failed} after {part}")


def test_a_torn_replica_is_not_healed_by_a_part_that_leaves_some_of_the_tear(start: Start) -> None:
    """Under `copy` the way back is gone where the update before sent another part."""
    held = Held(start(tp=2))
    with SyncManager(partial=True, install="copy", timeout_s=60) as manager:
        manager.update(held.part("all", 1), 1)
        held.rig.ask("fail", step="install", rank=1)
        with pytest.raises(TornReplica):
            manager.update(held.part("AB", 2), 2)
        assert held.rig.ask("state")["refusal"]
        with pytest.raises(TornReplica):
            manager.update(held.part("B", 3), 3)
        assert held.rig.ask("state")["refusal"]
        manager.update(sent := held.part("all", 4), 4)
        held.committed(sent)
        held.check("the whole model")
        assert held.rig.ask("state")["refusal"] is None


def test_two_groups_whose_parts_change_keep_out_of_each_others_bytes(start: Start) -> None:
    held = Held(start(tp=2))
    with (
        SyncManager("inner", partial=True, install="standby", timeout_s=60) as inner,
        SyncManager("outer", partial=True, install="standby", timeout_s=60) as outer,
    ):
        for version, (first, second) in enumerate([("AB", "norm"), ("A", "embed"), ("B", "norm"), ("AB", "embed")], 1):
            for manager, part in ((inner, first), (outer, second)):
                if part == "norm":
                    sent = ShardSource({"norm.weight": checkpoint(100 + version)["norm.weight"]})
                else:
                    sent = held.part(part, version)
                manager.update(sent, version)
                held.committed(sent)
                held.check(f"{part} as version {version}")


def test_indices_that_an_engine_passes_over_are_left_out_of_a_whole_model_alone() -> None:
    """Where a group is a part, nothing tells a misspelt packed weight from an index that the engine does without."""
    manifest = Manifest((TensorSpec("a.scales", "float32", (2,)), TensorSpec("a.g_idx", "int32", (4,))))
    scales, indices = (GroupOpened((manifest.whole(i),), "plan", "copy") for i in (0, 1))
    check_needs(manifest, [scales], partial=False)
    with pytest.raises(ManifestMismatch, match=r"no place for: a\.g_idx"):
        check_needs(manifest, [scales], partial=True)
    with pytest.raises(ManifestMismatch, match=r"no place for: a\.scales"):
        check_needs(manifest, [indices], partial=False)


def test_a_tensor_counts_as_passed_over_where_every_rank_passes_over_it() -> None:
    """Of two ranks one knows a layer, or the other does: what only one passes over is nowhere."""
    manifest = Manifest(tuple(TensorSpec(name, "float32", (2,)) for name in ("first", "second", "pooler")))
    first = GroupOpened((manifest.whole(0),), "plan", "copy", passed_over=(1, 2))
    second = GroupOpened((manifest.whole(1),), "plan", "copy", passed_over=(0, 2))
    check_needs(manifest, [first, second], partial=False)
    assert passed_over(manifest, [first, second]) == ("pooler",)
    unknown = GroupOpened((manifest.whole(1),), "plan", "copy", passed_over=(0,))
    with pytest.raises(ManifestMismatch, match=r"no place for: pooler \(1 in all\)"):
        check_needs(manifest, [first, unknown], partial=False)
