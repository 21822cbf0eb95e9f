"""The Prometheus metrics of a manager's updates, for a registry that the training program serves. Extra `metrics`.

    from prometheus_client import start_http_server
    from trainer_adapters.metrics import UpdateMetrics

    metrics = UpdateMetrics(manager)    # on rank 0
    start_http_server(9400)

Engines serve metrics of their own at `/metrics` (docs/metrics.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.reports import UpdateReport
from trainer_adapters.fleet.machine_io import ReplicaStatus
from trainer_adapters.manager import SyncManager

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
except ImportError as error:
    raise ImportError(
        f"metrics need prometheus-client ({error}): pip install '.[metrics]' in a checkout of weightwire"
    ) from None

__all__ = ["UpdateMetrics"]


class UpdateMetrics:
    """Counts the updates of one manager or several. A failure to count never reaches an update."""

    def __init__(self, manager: SyncManager, *, registry: CollectorRegistry = REGISTRY) -> None:
        """`manager`: on rank 0. Raises ValueError where `registry` has these metrics already: `add` another manager instead."""
        self._removers: list[Callable[[], None]] = []
        self._registry = registry
        per_group: dict[str, Any] = {"labelnames": ("group",), "registry": registry}
        per_replica: dict[str, Any] = {"labelnames": ("replica", "group"), "registry": registry}
        self.version = Gauge("weightwire_version", "Version that the last update brought.", **per_group)
        self.updates = Counter("weightwire_updates", "Updates that at least one replica took.", **per_group)
        self.failures = Counter(
            "weightwire_update_failures",
            "Updates that no replica took, by class of the error.",
            labelnames=("group", "kind"),
            registry=registry,
        )
        self.seconds = Counter("weightwire_update_seconds", "Seconds from beginning to last commit.", **per_group)
        self.phase_seconds = Counter(
            "weightwire_update_phase_seconds",
            "Seconds of updates by phase: agree, stage, seal, commit, and their parts.",
            labelnames=("group", "phase"),
            registry=registry,
        )
        self.bytes = Counter("weightwire_update_bytes", "Bytes of the manifests of updates.", **per_group)
        self.messages = Counter("weightwire_update_messages", "Requests that all trainer ranks sent.", **per_group)
        self.replica_version = Gauge("weightwire_replica_version", "Version that the replica serves.", **per_replica)
        self.replica_torn = Gauge(
            "weightwire_replica_torn", "1 while the replica refuses to generate because it is torn.", **per_replica
        )
        self.replica_stopped = Counter(
            "weightwire_replica_stopped_seconds", "Seconds for which updates stopped generation.", **per_replica
        )
        self.replica_failures = Counter(
            "weightwire_replica_failures",
            "Updates that the replica did not take, by class of the error.",
            labelnames=("replica", "group", "kind"),
            registry=registry,
        )
        self.add(manager)

    def add(self, manager: SyncManager) -> None:
        """Counts the updates of `manager` too: another group's, say."""
        self._removers += [
            manager.on("committed", self._committed),
            manager.on("failed", self._failed),
            manager.on("replica_state", self._state),
            manager.on("replica_lost", self._lost),
        ]

    def close(self) -> None:
        """Counts no longer, and takes the metrics out of the registry; may be called twice."""
        while self._removers:
            self._removers.pop()()
        for metric in (value for value in vars(self).values() if isinstance(value, Counter | Gauge)):
            with contextlib.suppress(KeyError):  # closed before
                self._registry.unregister(metric)

    def _committed(self, report: UpdateReport) -> None:
        group = report.group
        self.version.labels(group).set(report.version)
        self.updates.labels(group).inc()
        self.seconds.labels(group).inc(report.seconds)
        self.bytes.labels(group).inc(report.bytes)
        self.messages.labels(group).inc(report.messages)
        for phase, seconds in report.phases.items():
            self.phase_seconds.labels(group, phase).inc(seconds)
        for replica in report.replicas:
            if replica.version is not None:
                self.replica_version.labels(replica.replica, group).set(replica.version)
            self.replica_stopped.labels(replica.replica, group).inc(replica.stopped_s)
            if replica.error is not None:
                self.replica_failures.labels(replica.replica, group, replica.error.kind).inc()

    def _failed(self, group: str, version: int, error: WeightwireError) -> None:
        self.failures.labels(group, type(error).__name__).inc()

    def _state(self, group: str, status: ReplicaStatus) -> None:
        self.replica_torn.labels(status.replica, group).set(status.state == "torn")
        if status.version is not None:
            self.replica_version.labels(status.replica, group).set(status.version)
        else:  # torn, or somebody else wrote the weights, or the group is closed
            _remove(self.replica_version, status.replica, group)

    def _lost(self, group: str, replica: str, reason: str) -> None:
        for gauge in (self.replica_version, self.replica_torn):
            _remove(gauge, replica, group)


def _remove(gauge: Gauge, replica: str, group: str) -> None:
    with contextlib.suppress(KeyError):  # it was never set
        gauge.remove(replica, group)
