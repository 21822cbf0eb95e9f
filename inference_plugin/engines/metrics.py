"""The Prometheus metrics of an engine's replicas, made from their cards and records on request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from inference_plugin.net.records import record_of
from inference_plugin.wire.messages import ReplicaCard

__all__ = ["ENGINE_METRICS", "Metric", "exposition"]


class Metric(NamedTuple):
    """One metric. A counter's samples are named `<name>_total`."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str

    @property
    def sample(self) -> str:
        """The name by which it is queried."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


_GROUP = ("replica", "group")

VERSION = Metric("weightwire_engine_version", "gauge", _GROUP, "Version of the weights that the replica serves.")
COMMITS = Metric("weightwire_engine_commits", "counter", _GROUP, "Versions that the replica has committed.")
FAILURES = Metric(
    "weightwire_engine_commit_failures", "counter", (*_GROUP, "kind"), "Commits that failed, by class of the error."
)
SECONDS = Metric(
    "weightwire_engine_commit_seconds",
    "counter",
    (*_GROUP, "phase"),
    "Seconds of all commits by phase: wait for the step boundary, install (the slowest rank), stopped (generation).",
)
BYTES = Metric(
    "weightwire_engine_installed_bytes", "counter", _GROUP, "Bytes that all ranks have checked and installed."
)
COMMITTED_AT = Metric(
    "weightwire_engine_last_commit_timestamp_seconds", "gauge", _GROUP, "When the replica last committed, in Unix time."
)
TORN = Metric(
    "weightwire_engine_torn", "gauge", ("replica",), "1 while the replica refuses to generate because it is torn."
)
SERVING = Metric(
    "weightwire_engine_serving", "gauge", ("replica",), "1 while the replica generates; 0: paused, asleep or torn."
)
ENGINE_METRICS = (VERSION, COMMITS, FAILURES, SECONDS, BYTES, COMMITTED_AT, TORN, SERVING)


def exposition(cards: Sequence[ReplicaCard], *, openmetrics: bool) -> bytes:
    """The metrics of these replicas in Prometheus' text format, or in OpenMetrics'. Needs prometheus-client."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(cards))
    return (generate_openmetrics if openmetrics else generate_latest)(registry)


@dataclass(eq=False)
class _Collector:
    """A Prometheus collector of some replicas."""

    cards: Sequence[ReplicaCard]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        families = {m: kinds[m.kind](m.name, m.help, labels=m.labels) for m in ENGINE_METRICS}
        for card in self.cards:
            families[TORN].add_metric([card.replica], float(card.state == "torn"))
            families[SERVING].add_metric([card.replica], float(card.state == "serving"))
            for name, group in record_of(card).groups.items():
                labels = [card.replica, name]
                if group.version is not None:
                    families[VERSION].add_metric(labels, group.version)
                    families[COMMITTED_AT].add_metric(labels, group.committed_at_unix_s)
                families[COMMITS].add_metric(labels, group.commits)
                families[BYTES].add_metric(labels, group.installed_bytes)
                phases = {"wait": group.waited_s, "install": group.install_s, "stopped": group.stopped_s}
                for phase, seconds in phases.items():
                    families[SECONDS].add_metric([*labels, phase], seconds)
                for kind, count in group.failures.items():
                    families[FAILURES].add_metric([*labels, kind], count)
        yield from families.values()
