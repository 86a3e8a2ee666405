"""Spans of leases for OpenTelemetry: "rose lease" from grant to end, below it "rose release", the
decision to end it.

A node gets their contexts in `NodeCommand.traceparent`: its own spans of the work are children.
"""

from collections.abc import Sequence
from typing import Final

from rose.scheduler.core.messages import Action, Command, LogRecord
from rose.tracing import NO_SPANS, Span, Spans, TraceContext, attributes_of

ENDS: Final = frozenset({"lease_released", "lease_expired", "revoked"})


class LeaseSpans:
    """Spans of the leases of one term; `trace` is called with the actions of each step."""

    def __init__(self, spans: Spans = NO_SPANS) -> None:
        self._spans = spans
        self._leases: dict[tuple[object, object], Span] = {}

    def trace(self, actions: Sequence[Action], asked: TraceContext | None) -> None:
        """Begin and end spans by the log records, and put contexts into the commands.

        asked: context of the trainer whose call led to the step; nodes get it with its version.
        """
        contexts: dict[tuple[object, object], TraceContext | None] = {}
        for record in actions if self._spans is not NO_SPANS else ():
            if isinstance(record, LogRecord) and "epoch" in record.fields:
                lease = record.fields["replica"], record.fields["epoch"]
                contexts[lease] = self._happened(lease, record)
        for action in actions if contexts or asked else ():
            if isinstance(action, Command):
                kind = action.command.WhichOneof("command")
                order = action.command.lease if kind == "lease" else action.command.release
                context = contexts.get((order.replica, order.epoch))
                if context := asked if kind == "version" else context:
                    action.command.traceparent = context.traceparent

    def close(self) -> None:
        """End all spans with the term; leases may live on under the next leader."""
        for span in self._leases.values():
            span.end({"end": "term_over"})

    def _happened(self, lease: tuple[object, object], record: LogRecord) -> TraceContext | None:
        said, known = attributes_of(record.fields), self._leases.get(lease)
        if record.event in ("lease_granted", "lease_adopted"):
            known = self._leases[lease] = self._spans.begin("rose lease", None, said)
        elif known is not None and record.event == "lease_releasing":
            known = self._spans.begin("rose release", known.context, said)
            known.end({})
        elif known is not None and record.event in ENDS:
            self._leases.pop(lease).end({**said, "end": record.event})
        return known.context if known else None
