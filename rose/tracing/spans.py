"""Spans of OpenTelemetry, where it is installed and configured; nothing otherwise.

Configured: the program has a tracer provider already (`opentelemetry-instrument rose gateway …`),
or the environment names a collector (`OTEL_EXPORTER_OTLP_ENDPOINT`), which gets them over OTLP.
Without either no module of OpenTelemetry is imported, and a span is the context that it was given.
"""

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Final, Protocol

from rose.tracing.context import TraceContext, of_span

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
DISABLED: Final = "OTEL_SDK_DISABLED"
Attributes = Mapping[str, str | int | float | bool]

_log = logging.getLogger(__name__)


class Span(Protocol):
    """One piece of work; `context` is what those who work for it are told."""

    @property
    def context(self) -> TraceContext | None:
        """The trace, with this piece as the parent; None where there is no trace."""
        ...

    def end(self, attributes: Attributes, error: str = "") -> None:
        """End the span; a non-empty `error` marks it failed."""
        ...


class Spans(Protocol):
    """Begins spans."""

    def begin(self, name: str, parent: TraceContext | None, attributes: Attributes) -> Span:
        """A span begins now, within the parent's trace, or in one of its own."""
        ...


class _HandedOn:
    """No span: the caller's context as it came."""

    __slots__ = ("context",)

    def __init__(self, context: TraceContext | None) -> None:
        self.context = context

    def end(self, attributes: Attributes, error: str = "") -> None:
        """Nobody collects it."""


_NOTHING = _HandedOn(None)


class _NoSpans:
    def begin(self, name: str, parent: TraceContext | None, attributes: Attributes) -> Span:
        return _NOTHING if parent is None else _HandedOn(parent)


NO_SPANS: Final[Spans] = _NoSpans()


class OtelSpans:
    """Spans of a tracer."""

    def __init__(self, tracer: Any) -> None:  # noqa: ANN401 -- of an optional package
        self._tracer = tracer

    def begin(self, name: str, parent: TraceContext | None, attributes: Attributes) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        within = Context()
        if parent is not None:
            within = TraceContextTextMapPropagator().extract(parent.headers(), within)
        return _OtelSpan(self._tracer.start_span(name, context=within, attributes=dict(attributes)))


class _OtelSpan:
    __slots__ = ("_span", "context")

    def __init__(self, span: Any) -> None:  # noqa: ANN401 -- of an optional package
        self._span = span
        self.context = of_span(span)

    def end(self, attributes: Attributes, error: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


def spans_of(service: str, environment: Mapping[str, str] = os.environ) -> Spans:
    """The spans of a process; service: what it is called, unless `OTEL_SERVICE_NAME` says it."""
    if environment.get(DISABLED, "").lower() == "true":
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
        return OtelSpans(trace.get_tracer("rose"))
    except ImportError as error:
        _log.warning(
            "%s is not installed: no spans are sent; install opentelemetry-sdk and"
            " opentelemetry-exporter-otlp-proto-http",
            error.name,
        )
        return NO_SPANS


def _provider(service: str) -> Any:  # noqa: ANN401 -- of an optional package
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # The environment's service name takes precedence.
    named = os.environ.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(resource=Resource.create({"service.name": named}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
