"""Spans of an update for OpenTelemetry, where the process has a tracer provider of its own.

The spans of one update form one trace in all processes: its trace id is made of the transaction's id. Each process adds a root
span with its role, and its spans below it.

Source: https://opentelemetry.io/docs/specs/otel/trace/api/
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["export", "is_wanted"]

TRACER = "weightwire"
TRACE_ID_BITS = 128
SPAN_ID_BITS = 64


def is_wanted() -> bool:
    """Whether this process has set a tracer provider. Imports nothing: whoever sets one has imported the interface."""
    api = sys.modules.get("opentelemetry.trace")
    return api is not None and getattr(api, "_TRACER_PROVIDER", None) is not None


def export(role: str, txn: str, named: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> None:
    """Hands the spans of one process, as events of the trace file, to its tracer provider."""
    from opentelemetry import trace

    if not events:
        return
    since_ns = time.time_ns() - time.perf_counter_ns()
    starts_ns = [since_ns + int(event["ts"] * 1000) for event in events]
    ends_ns = [start_ns + int(event["dur"] * 1000) for start_ns, event in zip(starts_ns, events, strict=True)]
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
    root = tracer.start_span(f"weightwire {role}", context=around, start_time=min(starts_ns), attributes=_plain(about))
    inside = trace.set_span_in_context(root)
    for event, start_ns, end_ns in zip(events, starts_ns, ends_ns, strict=True):
        facts = _plain({f"weightwire.{key}": each for key, each in event["args"].items()})
        tracer.start_span(event["name"], context=inside, start_time=start_ns, attributes=facts).end(end_ns)
    root.end(max(ends_ns))


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """As attributes may be: numbers and words."""
    return {
        key: each if isinstance(each, bool | int | float | str) else str(each)
        for key, each in facts.items()
        if each is not None
    }
