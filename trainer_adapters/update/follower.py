"""The half of an operation on the ranks above 0; rank 0's half is `leader`.

rank 0                                       every other rank
scans its model                              scans its model
                          <-- Ready --       "I am in update:7, and this is what I am going to write"
opens the group, begins   --- Go ---->       where to write, and to whom
writes its slices                            writes its slices (`Writer.write`, as rank 0 does)
                          <-- Wrote --       pieces with their digests
seals, commits            -- Outcome ->      the report; or `Failed`, at any time: the error is raised on all ranks
"""

from __future__ import annotations

from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Ready
from inference_plugin.wire.tracing import call_it, span
from trainer_adapters.events import phase_begins
from trainer_adapters.sources.base import WeightSource
from trainer_adapters.sources.differing import packed
from trainer_adapters.update.rank_context import RankContext

__all__ = ["follow"]


def follow(context: RankContext, operation: str, source: WeightSource) -> bytes:
    """Takes part in an operation that rank 0 leads. Returns its report in msgpack; raises the error that ended it."""
    ranks = context.ranks
    name, _, number = operation.partition(":")
    version = int(number) if number else None
    manifest: Manifest | None = None
    claims: tuple[Box, ...] | None = None
    news: tuple[tuple[Box, ...] | None, bool] = None, False
    model = b""
    error: WeightwireError | None = None
    try:
        phase_begins(name, context.settings.group, version, "agree", ranks.rank)
        with span("scan"):
            manifest = context.scan(source)
            claims = source.claims()
            news = context.claims.news(ranks.rank, manifest, claims)
            model = packed(manifest) if context.claims.is_new(manifest) else b""
    except Exception as raised:  # noqa: BLE001 -- it travels to rank 0 and is raised on all ranks
        error = WeightwireError.wrap(raised).at(side="trainer", rank=ranks.rank)
    except BaseException:  # the caller ends this call; rank 0 must not wait for this rank
        ranks.give_up(Ready(context.count, operation, ranks.rank, secret=ranks.secret))
        raise
    ready = Ready(
        context.count,
        operation,
        ranks.rank,
        manifest.fingerprint if manifest and not error else "",
        error.info() if error else None,
        *news,
        secret=ranks.secret,
        model=model,
    )
    try:
        with span("agree"):
            go = ranks.ask_go(ready, deadline_s=context.deadline_s)
        version = go.version if version is None else version
        call_it(go.txn, version)
        assert manifest is not None, "rank 0 answers an error with an error"
        context.claims.agree(ranks.rank, manifest, claims)
        phase_begins(name, context.settings.group, version, "stage", ranks.rank)
        with span("stage"):
            wrote = context.writer.write(go, manifest, source, context.deadline_s, released=context.released)
        phase_begins(name, context.settings.group, version, "report", ranks.rank)
        with span("outcome"):
            return ranks.ask_outcome(wrote, deadline_s=context.deadline_s)
    except Exception as raised:
        failed = WeightwireError.wrap(raised).at(group=context.settings.group)
        if failed is not raised:  # a plug-in's before a phase, or what this rank reports can't be encoded
            raise failed.at(side="trainer", rank=ranks.rank) from raised
        if error is not None and error.message not in failed.message:
            failed.add_note(f"this rank had failed by itself: {error}")
        raise
    finally:
        if ranks.is_awaited:
            ranks.give_up(ready)
