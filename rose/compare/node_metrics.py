"""Readings of a node's `/metrics`: what its hosts' requests experienced between two of them.

A node of several hosts has series of each (label `host`), with targets and so bounds of their own:
one of them is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from rose.errors import ConfigError, RoseError

TTFT, TPOT = "rose_host_ttft_seconds", "rose_host_tpot_seconds"
REQUESTS = "rose_host_requests_total"
TOKENS = "rose_guest_tokens_total"


class CountersRestartedError(RoseError):
    """Error: a counter decreased or buckets changed between two readings, so the node's daemon or
    targets changed.
    """


@dataclass(frozen=True, slots=True)
class HostLatencies:
    """Histogram of a host's latencies. buckets: number of requests up to each bound in seconds, the
    last one infinite.

    sum_s: sum of all latencies in seconds. count: number of them.
    """

    buckets: Mapping[float, float]
    sum_s: float
    count: float


@dataclass(frozen=True, slots=True)
class HostReading:
    """Counters of one host's requests since its daemon's start, or between two readings of its
    node's /metrics.

    ttft, tpot: histograms. met, missed: requests within their targets, and not. tokens: sampled by
    the node's guests.
    """

    ttft: HostLatencies
    tpot: HostLatencies
    met: float
    missed: float
    tokens: float

    @property
    def requests(self) -> float:
        """Number of requests that were compared with their targets."""
        return self.met + self.missed


# Labels and value of each sample, by its name.
Series = Mapping[str, list[tuple[Mapping[str, str], float]]]


def reading_of(text: str, host: str = "") -> HostReading:
    """Return a host's counters from the text of a node's /metrics. Raises ConfigError.

    host: its name, or "" for the only host of the node.
    """
    found = _series(text)
    missing = [name for name in (f"{TTFT}_count", f"{TPOT}_count", REQUESTS) if name not in found]
    if missing:
        raise ConfigError(
            f"the page has no {missing[0]}; give the /metrics of a node that has a host"
        )
    there = sorted({labels.get("host", "") for labels, _ in found[REQUESTS]})
    if not host and len(there) > 1:
        raise ConfigError(f"the node has several hosts; give --host, one of {', '.join(there)}")
    if host and host not in there:
        raise ConfigError(f"the page has no host {host!r}; it has {', '.join(filter(None, there))}")
    mine = {
        name: [each for each in series if not host or each[0].get("host") == host]
        for name, series in found.items()
    }
    return HostReading(
        _latencies(mine, TTFT),
        _latencies(mine, TPOT),
        _total(mine, REQUESTS, targets="met"),
        _total(mine, REQUESTS, targets="missed"),
        # The counter of guests' tokens has no label of a host.
        _total(found, TOKENS),
    )


def _series(text: str) -> Series:
    wanted = {TTFT, TPOT, REQUESTS.removesuffix("_total"), TOKENS.removesuffix("_total")}
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples if family.name in wanted else ():
                found.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    except (ValueError, KeyError) as error:
        raise ConfigError(f"what came is no page of metrics ({error!s:.80})") from error
    return found


def _total(found: Series, name: str, **wanted: str) -> float:
    """Return the sum of the samples of this name that have these labels, 0 without any."""
    return sum(
        (value for labels, value in found.get(name, []) if wanted.items() <= labels.items()), 0.0
    )


def _latencies(found: Series, name: str) -> HostLatencies:
    buckets: dict[float, float] = {}
    for labels, value in found.get(f"{name}_bucket", []):
        bound_s = float(labels["le"])
        buckets[bound_s] = buckets.get(bound_s, 0.0) + value
    return HostLatencies(
        dict(sorted(buckets.items())), _total(found, f"{name}_sum"), _total(found, f"{name}_count")
    )


def between(earlier: HostReading, later: HostReading) -> HostReading:
    """Return the increase of a host's counters from one reading to a later one.

    Raises CountersRestartedError.
    """
    return HostReading(
        _difference(earlier.ttft, later.ttft),
        _difference(earlier.tpot, later.tpot),
        _grown(earlier.met, later.met),
        _grown(earlier.missed, later.missed),
        # A restarted guest counts from 0: only its tokens since then are known.
        later.tokens - earlier.tokens if later.tokens >= earlier.tokens else later.tokens,
    )


def _difference(earlier: HostLatencies, later: HostLatencies) -> HostLatencies:
    if earlier.buckets.keys() != later.buckets.keys():
        raise CountersRestartedError("the host's targets were changed in between")
    buckets = {at: _grown(earlier.buckets[at], count) for at, count in later.buckets.items()}
    return HostLatencies(
        buckets, _grown(earlier.sum_s, later.sum_s), _grown(earlier.count, later.count)
    )


def _grown(earlier: float, later: float) -> float:
    if later < earlier:
        raise CountersRestartedError("the node's daemon was started anew in between")
    return later - earlier
