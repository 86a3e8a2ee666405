"""MetricsServer: `GET /metrics` of a process with an event loop, on a port of its own."""

import asyncio
from collections.abc import Iterator
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from rose.process.http_port import HttpPort
from rose.security.certificates import CertificateFiles


def damaged_files_family(count: int) -> Metric:
    """Return the Prometheus counter of chunks and manifests that a weight store found damaged or
    missing on its disk.
    """
    return CounterMetricFamily(
        "rose_weights_damaged_files",
        "Chunks and manifests that this process found damaged or missing on its own disk.",
        value=count,
    )


def certificate_families(validity_s: tuple[float, float]) -> Iterator[Metric]:
    """Yield two Prometheus gauges: the Unix times at which the process's certificate begins and
    ceases to be valid.
    """
    begin_s, end_s = validity_s
    yield GaugeMetricFamily(
        "rose_certificate_not_before_timestamp_seconds",
        "When the process's own certificate begins.",
        value=begin_s,
    )
    yield GaugeMetricFamily(
        "rose_certificate_not_after_timestamp_seconds",
        "When the process's own certificate is over.",
        value=end_s,
    )


class Metrics(Protocol):
    """Prometheus metrics of a process."""

    registry: CollectorRegistry

    def look(self) -> None:
        """Update the values that a scrape shows; the server calls it on the process's event loop
        before each answer.
        """
        ...


class MetricsServer:
    """HTTP server of `GET /metrics` alone; with certificates over TLS, for callers with or without
    one.
    """

    def __init__(
        self, metrics: Metrics, host: str, port: int, certificates: CertificateFiles | None = None
    ) -> None:
        self._metrics = metrics
        self._host, self._port = host, port
        self._certificates = certificates
        self._listening: HttpPort | None = None
        self._order = asyncio.Lock()

    async def start(self) -> None:
        """Bind the metrics port and begin to answer. Raises ConfigError if it cannot be bound."""
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        files = self._certificates
        tls = files.server_context(everybody=True) if files else None
        port = HttpPort(app, self._host, self._port, tls)
        do = "give another --metrics-port"
        await port.start(f"metrics port {self._port} cannot be served: {{}}; {do}")
        self._listening = port

    async def close(self) -> None:
        """Stop answering scrapes, and release the port."""
        if self._listening is not None:
            await self._listening.close()
            self._listening = None

    async def _answer(self, request: web.Request) -> web.Response:
        del request
        # One page at a time: a caller cannot make this process busier by asking twice.
        async with self._order:
            self._metrics.look()
            text = await asyncio.to_thread(generate_latest, self._metrics.registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
