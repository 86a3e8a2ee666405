"""Tracing of turns: W3C trace context from caller to engine, and spans where they are collected.

    trainer ──traceparent──► gateway ──traceparent──► replica ──trace_headers──► engine
       ◄──── traceparent ───────┘

The gateway hands a context on as it came, unless OpenTelemetry is installed and configured: then
its spans stand in between. `context` is the header, `spans` the spans.
"""

from rose.tracing.context import (
    TRACEPARENT,
    TRACESTATE,
    TraceContext,
    current_trace,
    trace_of,
)
from rose.tracing.spans import NO_SPANS, Span, Spans, spans_of

__all__ = [
    "NO_SPANS",
    "TRACEPARENT",
    "TRACESTATE",
    "Span",
    "Spans",
    "TraceContext",
    "current_trace",
    "spans_of",
    "trace_of",
]
