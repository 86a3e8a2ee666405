"""Spans of a node's work on its scheduler's orders, for OpenTelemetry.

    lease ──► "rose admit" ──► lease_taken                 version ──► "rose weights" ──► activated
    release, lease_taken_back ──► "rose drain" ──► lease_ended
    end of a guest is decided ──► "rose reclaim" ──► engine_reclaimed

A span is made at its end: its begin, the order's arrival, is known by then.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

from rose.rpc import rose_pb2
from rose.tracing import NO_SPANS, Spans, TraceContext, attributes_of, parsed

WEIGHTS: Final = "activated version_not_fetched version_refused signature_refused quarantined"
NAMES: Final = {
    "lease_taken": "rose admit",
    "lease_ended": "rose drain",
    "engine_reclaimed": "rose reclaim",
    **dict.fromkeys(WEIGHTS.split(), "rose weights"),
}


class OrderSpans:
    """Spans of one node, made of its scheduler's orders and its own events."""

    def __init__(self, spans: Spans = NO_SPANS) -> None:
        self._spans = spans
        # Context and arrival, in nanoseconds of Unix time, by kind and replica or job.
        self._orders: dict[tuple[str, str], tuple[TraceContext | None, int]] = {}

    def ordered(self, command: rose_pb2.NodeCommand) -> None:
        """Note an order's arrival; a renewal of a lease has no trace context, and is none."""
        kind = command.WhichOneof("command")
        if self._spans is NO_SPANS or (kind == "lease" and not command.traceparent):
            return
        if kind in ("lease", "release", "version"):
            order = getattr(command, kind)
            key = kind, order.job if kind == "version" else order.replica
            self._orders[key] = parsed(command.traceparent), time.time_ns()

    def heard(self, event: str, fields: Mapping[str, Any]) -> None:
        """Make the span that an event of the node ends, if there is one."""
        if self._spans is NO_SPANS or "replica" not in fields:
            return
        replica, now_ns = fields["replica"], time.time_ns()
        lease = context, begin_ns = self._orders.get(("lease", replica), (None, now_ns))
        if event == "lease_taken_back":
            self._orders["release", replica] = context, now_ns
        elif event == "lease_ended":
            context, begin_ns = self._orders.pop(("release", replica), lease)
        elif event == "engine_reclaimed":
            begin_ns = now_ns - int(fields["seconds"] * 1e9)
        elif "version" in fields:
            told = self._orders.get(("version", fields.get("job", "")), lease)
            context, begin_ns = told[0] or context, max(told[1], begin_ns if context else 0)
        if name := NAMES.get(event):
            span = self._spans.begin(name, context, attributes_of(fields), begin_ns)
            span.end({}, str(fields.get("message", "")))
