"""Spans of an update for OpenTelemetry, where the process has a tracer provider of its own.

The spans of one update form one trace in all processes: its trace id is made of the transaction's id. Each process adds a root
span with its role, and its spans below it.

Source: https://opentelemetry.io/docs/specs/otel/trace/api/
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["TimedSpan", "export", "is_wanted"]

TRACER = "weightwire"
TRACE_ID_BITS = 128
SPAN_ID_BITS = 64


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """`start_ns` and `end_ns` are Unix times."""

    name: str
    start_ns: int
    end_ns: int
    facts: Mapping[str, Any]


def is_wanted() -> bool:
    """Whether this process has set a tracer provider. Imports nothing: whoever sets one has imported the interface."""
    api = sys.modules.get("opentelemetry.trace")
    return api is not None and getattr(api, "_TRACER_PROVIDER", None) is not None


def export(role: str, txn: str, named: Mapping[str, Any], spans: Sequence[TimedSpan]) -> None:
    """Hands the spans of one process to its tracer provider."""
    from opentelemetry import trace

    if not spans:
        return
    tracer = trace.get_tracer(TRACER)
    number = int(txn, 16) if txn else 0
    around = None
    if 0 < number < 1 << TRACE_ID_BITS:
        origin = trace.SpanContext(
            number,
            number % (1 << SPAN_ID_BITS) or 1,
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        around = trace.set_span_in_context(trace.NonRecordingSpan(origin))
    about = {f"weightwire.{key}": each for key, each in named.items()} | {"weightwire.txn": txn}
    first_ns, last_ns = min(one.start_ns for one in spans), max(one.end_ns for one in spans)
    root = tracer.start_span(f"weightwire {role}", context=around, start_time=first_ns, attributes=_plain(about))
    inside = trace.set_span_in_context(root)
    for one in spans:
        tracer.start_span(
            one.name,
            context=inside,
            start_time=one.start_ns,
            attributes=_plain({f"weightwire.{k}": v for k, v in one.facts.items()}),
        ).end(one.end_ns)
    root.end(last_ns)


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """As attributes may be: numbers and words."""
    return {
        key: each if isinstance(each, bool | int | float | str) else str(each)
        for key, each in facts.items()
        if each is not None
    }
