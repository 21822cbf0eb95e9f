"""Runs a verification on rank 0: compares the weights of replicas, read back, with the trainer's."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import torch

from inference_plugin.transports.registry import transport_named
from inference_plugin.transports.shm import ShmSender
from inference_plugin.wire.comparison import compare_rank
from inference_plugin.wire.dtype_hint import dtype_rules
from inference_plugin.wire.errors import ManifestMismatch, WeightwireError, first_few
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Go, GoTransport, Verified, Verify
from inference_plugin.wire.reports import ReplicaVerify, VerifyReport
from inference_plugin.wire.tensors import box_view
from inference_plugin.wire.tracing import call_it
from trainer_adapters.events import phase_begins
from trainer_adapters.fleet.asking import ask_all
from trainer_adapters.fleet.session import ReplicaSession
from trainer_adapters.sources.base import WeightSource
from trainer_adapters.update.coverage import unread
from trainer_adapters.update.leader import gather_ready, write
from trainer_adapters.update.rank_context import RankContext

__all__ = ["verify"]


def verify(context: RankContext, source: WeightSource, manifest: Manifest) -> VerifyReport:
    """Has all ranks write into shared memory that no worker takes, and compares the replicas with it."""
    assert context.fleet is not None, "rank 0 has the fleet"
    group = context.settings.group
    txn = secrets.token_hex(12)
    call_it(txn)
    phase_begins("verify", group, None, "agree")
    gather_ready(context, source, manifest)
    sender = context.writer.sender(transport_named("shm"))
    assert isinstance(sender, ShmSender)
    with sender.scratch(manifest, context.fleet.segments_needed()) as (place, written):
        way = GoTransport("shm", place, ())
        phase_begins("verify", group, None, "stage")
        write(context, Go(txn, (way,), context.left_s("verify"), copies=True), source, manifest)
        part = context.fleet.take_part(math.inf, context.left_s("verify") / 2)
        phase_begins("verify", group, None, "compare")
        left_s = context.left_s("verify")
        asks = [session.ask_of_coordinator(Verify(group, left_s)) for session in part.sessions]
        silence_s = context.settings.silence_s()
        replies = ask_all(asks, Verified, timeout_s=left_s, silence_s=silence_s)
        if source.follows_engine and not source.engine_dtypes:
            _check_dtypes(manifest, replies)
        found = [
            _compare(manifest, session, reply, written.tensor, partial=context.settings.partial)
            for session, reply in zip(part.sessions, replies, strict=True)
        ]
    found += [ReplicaVerify(card.replica, None, 0, (), (), error.info()) for card, error in part.unreached]
    return VerifyReport(group, tuple(sorted(found, key=lambda each: each.replica)))


def _check_dtypes(manifest: Manifest, replies: Sequence[Verified | WeightwireError]) -> None:
    """Raises `ManifestMismatch` with the engine's dtypes if the trainer's are others: all ranks adopt them, and verify again."""
    held = {
        box.name: box.dtype
        for reply in replies
        if isinstance(reply, Verified)
        for rank in reply.ranks
        for box in rank.boxes
        if box.name in manifest.index
    }
    differ = sorted(name for name, dtype in held.items() if dtype != manifest.tensors[manifest.index[name]].dtype)
    if any("float" in held[name] for name in differ):
        error = ManifestMismatch(f"dtypes differ: {first_few(differ)}", phase="verify")
        error.dtypes = dtype_rules(held)
        raise WeightwireError.of(error.info())  # with the rules that the other ranks get: too many don't travel


def _compare(
    manifest: Manifest,
    session: ReplicaSession,
    reply: Verified | WeightwireError,
    segment: torch.Tensor,
    *,
    partial: bool,
) -> ReplicaVerify:
    if isinstance(reply, WeightwireError):
        return ReplicaVerify(session.card.replica, None, 0, (), (), reply.at(replica=session.card.replica).info())

    def tensor_named(name: str) -> torch.Tensor | None:
        i = manifest.index.get(name)
        return None if i is None else box_view(segment, manifest, manifest.whole(i))

    differ = [words for rank in reply.ranks for words in compare_rank(rank, tensor_named)]
    boxes = (
        Box(manifest.index[box.name], box.offsets, box.sizes)
        for rank in reply.ranks
        for box in rank.boxes
        if box.name in manifest.index and box.lies_in(manifest.tensors[manifest.index[box.name]].shape)
    )
    excused = {name for rank in reply.ranks for name in rank.unreadable if name in manifest.index}
    unreadable_boxes = (manifest.whole(manifest.index[name]) for name in excused)
    skipped = session.agreed.passed_over if session.agreed is not None else ()
    missing = [name for name in unread(manifest, (*boxes, *unreadable_boxes), partial=partial) if name not in skipped]
    if missing:
        differ.append(f"held by no rank: {first_few(missing)}")
    unreadable = [f"rank {r.rank}: {name}: {why}" for r in reply.ranks for name, why in r.unreadable.items()]
    if skipped:
        unreadable.append(f"passed over by the engine's loader: {first_few(list(skipped))}")
    return ReplicaVerify(
        session.card.replica,
        reply.ranks[0].version if reply.ranks else None,
        sum(len(rank.boxes) for rank in reply.ranks),
        tuple(differ[:8]),
        tuple(unreadable[:8]),
    )
