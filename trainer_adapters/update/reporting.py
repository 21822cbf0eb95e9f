"""Makes the report of each replica after an update."""

from __future__ import annotations

from typing import Any

import msgspec

from inference_plugin.wire.messages import ReplicaCard
from inference_plugin.wire.reports import ReplicaReport
from trainer_adapters.events import harmless
from trainer_adapters.update.machine_io import Participant

__all__ = ["replica_report"]


def replica_report(card: ReplicaCard, one: Participant, version: int) -> ReplicaReport:
    """The report of one replica. Details that cannot be read don't change its outcome."""
    report = ReplicaReport(replica=card.replica, engine=card.engine, status="failed", version=None, lacks=card.lacks)
    found: dict[str, Any] = {}
    if one.state == "committed":
        found |= {"status": "committed", "version": version}
    elif one.error is not None:
        found["error"] = one.error.info()
    with harmless("reading a replica's terms"):
        found |= _terms(one)
    with harmless("reading a replica's answer to the commit"):
        found |= costs(one)
    return msgspec.structs.replace(report, **found)


def _terms(one: Participant) -> dict[str, Any]:
    if one.agreed is None:
        return {}
    first, opened = one.agreed.opened[0], one.agreed.opened
    return {
        "transport": one.agreed.transport,
        "install": first.install,
        "mechanism": first.mechanism,
        "why": first.why,
        "written": sum(each.written for each in opened),
        "derived": sum(each.derived for each in opened),
        "untouched": sum(each.untouched for each in opened),
        "passed_over": one.agreed.passed_over,
    }


def costs(one: Participant) -> dict[str, Any]:
    if (committed := one.committed) is None:
        return {}
    return {
        "version": committed.version,
        "digest": one.sealed[0].digest if one.sealed else "",
        "stopped_s": committed.stopped_s,
        "waited_s": committed.waited_s,
        "install_s": max((rank.install_s for rank in committed.ranks), default=0.0),
        "verify_s": max((sealed.verify_s for sealed in one.sealed), default=0.0),
        "prepare_s": max((sealed.prepare_s for sealed in one.sealed), default=0.0),
        "extra_bytes": sum(sealed.extra_bytes for sealed in one.sealed),
    }
