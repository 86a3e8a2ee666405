"""OpenTelemetry's spans, kept in memory."""

from typing import Any

import pytest

from rose.tracing import Spans


def otel() -> tuple[Spans, Any, Any]:
    """Return spans that are collected, their tracer, and the exporter that holds ended ones."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("rose")
    return Spans(tracer), tracer, exporter
