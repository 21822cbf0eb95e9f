"""One rank's half of an update. With `dtype="engine"`, an update or verification that fails for the engine's dtypes is
repeated in these."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.reports import UpdateReport
from trainer_adapters.sources.base import WeightSource
from trainer_adapters.update.follower import follow
from trainer_adapters.update.handle import PendingUpdate
from trainer_adapters.update.leader import keep, lead, update
from trainer_adapters.update.rank_context import RankContext

__all__ = ["in_engine_dtypes", "take_part"]

logger = logging.getLogger(__name__)

Report = TypeVar("Report")


def take_part(
    context: RankContext, source: WeightSource, version: int | None, pending: PendingUpdate, deadline_s: float
) -> UpdateReport:
    """Leads the update, or follows it."""
    return in_engine_dtypes(source, lambda: _attempt(context, source, version, pending, deadline_s))


def in_engine_dtypes(source: WeightSource, attempt: Callable[[], Report]) -> Report:
    """Makes an attempt, and a second one if the first was refused for dtypes that the source then adopts.

    That refusal comes before anything changes: of an update, when the group is opened. All ranks raise it, so all try again.
    """
    try:
        return attempt()
    except ManifestMismatch as error:
        if not error.dtypes or not source.adopt_dtypes(error.dtypes):
            raise
        logger.info("weightwire: tensors travel in the engine's dtypes from now on: %s", dict(error.dtypes))
        return attempt()


def _attempt(
    context: RankContext, source: WeightSource, version: int | None, pending: PendingUpdate, deadline_s: float
) -> UpdateReport:
    context.begin(deadline_s, pending.release)
    operation = "update" if version is None else f"update:{version}"
    if context.fleet is None:
        report = decode_as(follow(context, operation, source), UpdateReport)
        pending.answer(report)
        return report
    with context.fleet.updating():
        report = lead(
            context,
            operation,
            source,
            lambda manifest: update(context, source, manifest, version),
            pending.answer,
            group=context.settings.group,
            version=version,
        )
    keep(report)
    return report
