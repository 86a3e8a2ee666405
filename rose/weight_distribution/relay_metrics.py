"""Prometheus metrics of a relay: versions, bytes fetched and served, replies, readers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.metrics_server import certificate_families, damaged_files_family
from rose.security.certificates import CertificateFiles
from weight_transfer.fetch.limits import Asked, ChunkSource, ReplyKind, Traffic

Versions = Callable[[], Mapping[str, tuple[int, int]]]
"""Function that returns (number of known versions, newest version) by job."""


class RelayMetrics(Collector):
    """Prometheus collector of one relay: bytes served and fetched, replies, readers, versions.

    `look` takes the values that belong to the relay's event loop; `collect` yields all metrics.
    """

    def __init__(
        self,
        traffic: Traffic,
        versions: Versions,
        certificates: CertificateFiles | None = None,
        damaged_files: Callable[[], int] = lambda: 0,
    ) -> None:
        self._traffic = traffic
        self._versions = versions
        self._certificates = certificates
        self._damaged_files = damaged_files
        self._known: Mapping[str, tuple[int, int]] = {}
        self._readers = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def look(self) -> None:
        """Take the current numbers of versions and readers for the next scrape, on the relay's
        event loop."""
        self._known, self._readers = self._versions(), self._traffic.readers()

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, so that registering the collector does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        traffic = self._traffic
        yield CounterMetricFamily(
            "rose_relay_served_bytes",
            "Bytes of chunks that readers took.",
            value=traffic.served_bytes,
        )
        fetched = CounterMetricFamily(
            "rose_relay_fetched_bytes",
            "Bytes of chunks that came, by who sent them.",
            labels=["source"],
        )
        for source in ChunkSource:
            fetched.add_metric([source.value], traffic.fetched_bytes[source])
        yield fetched
        answers = CounterMetricFamily(
            "rose_relay_answers",
            "Answers to readers, by what was asked and how it was answered.",
            labels=["asked", "answer"],
        )
        for asked, answer in product(Asked, ReplyKind):
            count = traffic.answers[asked, answer]
            answers.add_metric([asked.value, answer.value], count)
        yield answers
        yield CounterMetricFamily(
            "rose_relay_failed_fetches",
            "Chunks that no source gave, though each was asked several times.",
            value=traffic.failed_fetches,
        )
        yield CounterMetricFamily(
            "rose_relay_rejected_chunks",
            "Chunks that came with other bytes than their digest says, and were fetched again.",
            value=traffic.rejected_chunks,
        )
        yield damaged_files_family(self._damaged_files())
        yield GaugeMetricFamily(
            "rose_relay_readers",
            "Addresses that asked for something in the last minute.",
            value=self._readers,
        )
        yield from _of_versions(self._known)
        if self._certificates is not None:
            yield from certificate_families(self._certificates.validity_s)


def _of_versions(known: Mapping[str, tuple[int, int]]) -> Iterator[Metric]:
    held = GaugeMetricFamily(
        "rose_relay_held_versions", "Versions of a job that the relay knows.", labels=["job"]
    )
    newest = GaugeMetricFamily(
        "rose_relay_newest_version", "The newest version of a job that it knows.", labels=["job"]
    )
    for job, (count, version) in known.items():
        held.add_metric([job], count)
        newest.add_metric([job], version)
    yield held
    yield newest
