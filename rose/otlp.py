"""Logs and metrics over OTLP, beside the spans of `rose.tracing`, where the environment asks.

    OTEL_LOGS_EXPORTER=otlp     log, events, audit and usage records ──► batches ──┐
    OTEL_METRICS_EXPORTER=otlp  Prometheus registry, once a minute ────────────────┴► collector

The collector is that of OpenTelemetry's variables, `OTEL_EXPORTER_OTLP_ENDPOINT` and its kind, over
HTTP. Threads export, from a bounded queue and one export at a time: no process waits for a
collector. Without the variables no module of OpenTelemetry is imported.
"""

import asyncio
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

from typing_extensions import override

from rose.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import Metric

DISABLED: Final = "OTEL_SDK_DISABLED"
INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL"
# Wait for the event loop whose figures are exported; while it is busy none are.
LOOK_S: Final = 5.0
# Loggers of an export itself: their records are not exported, or each would bring the next.
OWN_LOGGERS: Final = ("opentelemetry", "requests", "urllib3")
T = TypeVar("T")
_log = logging.getLogger(__name__)


def is_disabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the environment turns OpenTelemetry off."""
    return environment.get(DISABLED, "").lower() == "true"


def is_asked(signal: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the environment asks for this signal, `LOGS` or `METRICS`, over OTLP, and the
    exporter is installed.
    """
    exporters = environment.get(f"OTEL_{signal}_EXPORTER", "").lower().split(",")
    if is_disabled(environment) or "otlp" not in map(str.strip, exporters):
        return False
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401
    except ImportError as error:
        what = "%s is not installed: no %s are sent; install rose-rollout[otel]"
        _log.warning(what, error.name, signal.lower())
        return False
    return True


def resource_of(service: str) -> Any:  # noqa: ANN401 -- of an optional package
    """Return OpenTelemetry's resource of this process; names in the environment take precedence."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    # Cumulative metrics of two processes must not look like those of one.
    instance = f"{socket.gethostname()}:{os.getpid()}"
    own = Resource.create({"service.name": service, "service.instance.id": instance})
    return own.merge(OTELResourceDetector().detect())


def limited(exporter: T) -> T:
    """Return an exporter of OpenTelemetry that logs one line a minute at most."""
    from rose.process.http_port import FewRecords

    logging.getLogger(type(exporter).__module__).addFilter(FewRecords(most=1))
    return exporter


def log_handler(component: str) -> "tuple[logging.Handler, Callable[[], object]] | None":
    """Return the handler that exports log records, and the function that flushes it, which blocks.

    None if the environment does not ask for logs. component: name of the process.
    """
    if not is_asked("LOGS"):
        return None
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.sdk._logs import LoggerProvider, LoggingHandler
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    class Handler(LoggingHandler):
        @override
        def flush(self) -> None:
            """Do nothing: the SDK's handler would start a thread as the interpreter ends."""

    # At its own exit hook the SDK would wait for a dead collector.
    provider = LoggerProvider(resource_of(f"rose-{component}"), shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(limited(OTLPLogExporter())))
    return Handler(logger_provider=provider), provider.force_flush


def export_metrics(
    service: str, look: Callable[[], T], collect: "Callable[[T], Iterable[Metric]]"
) -> None:
    """Export Prometheus metrics until the process ends, if the environment asks for it.

    look: takes figures on the running event loop, which calls this. collect: returns the metrics of
    these figures, in a thread. Raises ConfigError for a wrong interval in the environment.
    """
    if not is_asked("METRICS"):
        return
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import export as sdk
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    loop, resource, since_ns = asyncio.get_running_loop(), resource_of(service), time.time_ns()
    exporter, scope, pause_s = limited(OTLPMetricExporter()), InstrumentationScope("rose"), _pause()

    def export() -> None:
        looked: Future[T] = Future()
        loop.call_soon_threadsafe(lambda: looked.set_result(look()))
        metrics = list(converted(collect(looked.result(LOOK_S)), since_ns))
        scopes = [sdk.ScopeMetrics(scope, metrics, "")]
        exporter.export(sdk.MetricsData([sdk.ResourceMetrics(resource, scopes, "")]))

    def run() -> None:
        while not loop.is_closed():
            time.sleep(pause_s)
            try:
                export()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next time may do
                _log.debug("no metrics were exported this time: %r", error)

    threading.Thread(target=run, name="rose-otlp", daemon=True).start()


def _pause() -> float:
    """Return the seconds between two exports of metrics. Raises ConfigError."""
    given = os.environ.get(INTERVAL) or "60000"
    if not re.fullmatch("[1-9][0-9]{0,7}", given):
        raise ConfigError(f"{INTERVAL}={given!r:.40}: give milliseconds, 99999999 at most")
    return int(given) / 1_000


def converted(families: "Iterable[Metric]", since_ns: int) -> Iterator[Any]:
    """Yield Prometheus metrics as OpenTelemetry's, cumulative, with their names and labels.

    since_ns: Unix time at which the counts began.
    """
    from opentelemetry.sdk.metrics import export as sdk

    now_ns, cumulative = time.time_ns(), sdk.AggregationTemporality.CUMULATIVE
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        points = [
            sdk.NumberDataPoint(sample.labels, since_ns, now_ns, sample.value)
            for sample in family.samples
            if sample.name == name
        ]
        data: sdk.Histogram | sdk.Sum | sdk.Gauge = sdk.Gauge(points)
        if family.type == "histogram":
            data = sdk.Histogram(list(_histograms(family, since_ns, now_ns)), cumulative)
        elif family.type == "counter":
            data = sdk.Sum(points, cumulative, is_monotonic=True)
        yield sdk.Metric(name, family.documentation, "", data)


def _histograms(family: "Metric", since_ns: int, now_ns: int) -> Iterator[Any]:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    found: dict[tuple[tuple[str, str], ...], tuple[dict[float, float], dict[str, float]]] = {}
    for sample in family.samples:
        labels = dict(sample.labels)
        bound = labels.pop("le", None)
        buckets, others = found.setdefault(tuple(labels.items()), ({}, {}))
        if bound is None:
            others[sample.name.removeprefix(family.name)] = sample.value
        else:
            buckets[float(bound)] = sample.value
    for key, (buckets, others) in found.items():
        bounds = sorted(buckets)
        counts = [int(buckets[bound]) for bound in bounds]
        yield HistogramDataPoint(
            dict(key),
            since_ns,
            now_ns,
            count=counts[-1],
            sum=others["_sum"],
            # Prometheus adds the buckets below up, OpenTelemetry does not.
            bucket_counts=[more - less for less, more in pairwise([0, *counts])],
            explicit_bounds=bounds[:-1],
            min=None,  # type: ignore[arg-type]  # unknown, and optional on the wire
            max=None,  # type: ignore[arg-type]
        )
