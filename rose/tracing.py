"""Tracing of turns: W3C trace context from caller to engine, and spans where they are collected.

    trainer ──traceparent──► gateway ──traceparent──► replica ──trace_headers──► engine
       ◄──── traceparent ───────┘

    00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
    version  trace id                   parent id        flags (bit 0: sampled)

If the version is a later one, its first four fields count if a dash follows them. A malformed
header is ignored, and `tracestate` with it, as https://www.w3.org/TR/trace-context/ says: a turn
never fails by its trace.

The gateway passes a context on as it came, unless OpenTelemetry is installed and configured: then
its spans stand in between. Configured means that the program has a tracer provider already
(`opentelemetry-instrument rose gateway …`), or that the environment names a collector
(`OTEL_EXPORTER_OTLP_ENDPOINT`), which gets them over OTLP. Without either no module of
OpenTelemetry is imported, and a span is the context that it was given.
"""

import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rose.otlp import is_disabled, limited, resource_of

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
# The specification asks that at least so much is handed on; more than that is left out.
MAX_STATE_CHARS: Final = 512
MAX_PARENT_CHARS: Final = 256

_PARENT = re.compile(
    r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?", re.ASCII
)
_NO_TRACE, _NO_PARENT = "0" * 32, "0" * 16


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context of a turn: the trace's id, the id of the caller's span in it, the sampled
    flag, and tracestate.
    """

    trace_id: str
    parent_id: str
    sampled: bool = False
    state: str = ""

    @property
    def traceparent(self) -> str:
        """Value of the `traceparent` header, in version 00."""
        return f"00-{self.trace_id}-{self.parent_id}-{int(self.sampled):02x}"

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers that pass this context on: traceparent, and tracestate if there
        is one.
        """
        said = {TRACEPARENT: self.traceparent}
        return said | {TRACESTATE: self.state} if self.state else said

    def head(self) -> bytes:
        """Return these headers as bytes of an HTTP request's head, each line ended by CR LF."""
        return "".join(f"{name}: {value}\r\n" for name, value in self.headers().items()).encode()


def trace_of(headers: Mapping[str, str]) -> TraceContext | None:
    """Return the trace context in a request's headers; None without a valid `traceparent`, or with
    several.
    """
    said = headers.get(TRACEPARENT)
    if said is None:
        return None
    every = getattr(headers, "getall", None)
    if every is not None and len(every(TRACEPARENT)) != 1:
        return None
    return parsed(said, headers.get(TRACESTATE, ""))


def parsed(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Return the trace context of these two header values; None if `traceparent` is invalid.

    An invalid `tracestate` is dropped.
    """
    if len(traceparent) > MAX_PARENT_CHARS:
        return None
    found = _PARENT.fullmatch(traceparent.strip(" \t"))
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if version == "ff" or trace_id == _NO_TRACE or parent_id == _NO_PARENT:
        return None
    if version == "00" and more is not None:
        return None
    usable = (
        len(tracestate) <= MAX_STATE_CHARS and tracestate.isascii() and tracestate.isprintable()
    )
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & 1), tracestate if usable else "")


def current_trace() -> TraceContext | None:
    """Return the trace context of the OpenTelemetry span that is current in this program; None
    without one.

    A program that has not imported OpenTelemetry has no span, so nothing is imported for it here.
    """
    opentelemetry = sys.modules.get("opentelemetry.trace")
    if opentelemetry is None:
        return None
    return of_span(opentelemetry.get_current_span())


def of_span(span: object) -> TraceContext | None:
    """Return the trace context for work done under an OpenTelemetry span; None for an invalid
    span.
    """
    made = span.get_span_context()  # type: ignore[attr-defined]  # of an optional package
    if not made.is_valid:
        return None
    state = made.trace_state.to_header()[:MAX_STATE_CHARS]
    trace_id, parent_id = f"{made.trace_id:032x}", f"{made.span_id:016x}"
    return TraceContext(trace_id, parent_id, bool(made.trace_flags.sampled), state)


# ---- spans ----

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
Attributes = Mapping[str, str | int | float | bool]

_log = logging.getLogger(__name__)


class Span:
    """Span of one piece of work. context: trace context to send with requests for that work, None
    without a trace.

    Without a tracer the context is the caller's own, and the span is not collected.
    """

    __slots__ = ("_collected", "context")

    def __init__(self, context: TraceContext | None, collected: Any = None) -> None:  # noqa: ANN401 -- of an optional package
        self.context = context
        self._collected = collected

    def end(self, attributes: Attributes, error: str = "") -> None:
        """End the span and add its attributes; a non-empty `error` marks it failed.

        Nothing happens without a tracer.
        """
        if self._collected is None:
            return
        from opentelemetry.trace import Status, StatusCode

        self._collected.set_attributes(dict(attributes))
        if error:
            self._collected.set_status(Status(StatusCode.ERROR, error))
        self._collected.end()


class Spans:
    """Factory of spans: OpenTelemetry's with a tracer, else spans that only pass their context
    on.
    """

    def __init__(self, tracer: Any = None) -> None:  # noqa: ANN401 -- of an optional package
        self._tracer = tracer

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Attributes,
        begin_ns: int | None = None,
    ) -> Span:
        """Start a span now, or at an earlier Unix time in nanoseconds, and return it.

        parent: context that it belongs to; None begins a new trace, if there is a tracer.
        """
        if self._tracer is None:
            return Span(parent)
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        within = Context()
        if parent is not None:
            within = TraceContextTextMapPropagator().extract(parent.headers(), within)
        span = self._tracer.start_span(
            name, context=within, attributes=dict(attributes), start_time=begin_ns
        )
        return Span(of_span(span), span)


NO_SPANS: Final = Spans()


def attributes_of(fields: Mapping[str, object]) -> Attributes:
    """Return the fields of an event that a span can have: texts, numbers and truth values."""
    return {k: value for k, value in fields.items() if isinstance(value, str | int | float | bool)}


def spans_of(service: str, environment: Mapping[str, str] = os.environ) -> Spans:
    """Return the factory of this process's spans; without OpenTelemetry's configuration its spans
    are not collected.

    service: name that collected spans bear, unless `OTEL_SERVICE_NAME` gives one. It may set
    OpenTelemetry's global tracer provider.
    """
    if is_disabled(environment):
        return NO_SPANS
    wanted = any(environment.get(name) for name in ENDPOINTS)
    if not wanted and "opentelemetry.trace" not in sys.modules:
        return NO_SPANS
    try:
        from opentelemetry import trace

        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            if not wanted:
                return NO_SPANS
            trace.set_tracer_provider(_provider(service))
        return Spans(trace.get_tracer("rose"))
    except ImportError as error:
        _log.warning(
            "%s is not installed: no spans are sent; install rose-rollout[otel]", error.name
        )
        return NO_SPANS


def _provider(service: str) -> Any:  # noqa: ANN401 -- of an optional package
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource_of(service))
    provider.add_span_processor(BatchSpanProcessor(limited(OTLPSpanExporter())))
    return provider
