"""Usage of deployments over time, from metrics that vLLM and SGLang export of themselves.

A deployment is all engines whose metrics have the same labels, by default model and namespace.
Usage comes from a Prometheus that has scraped them, or from their `/metrics`, read for a while.
"""

import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, NamedTuple

from rose.azure_trace import stream_trace
from rose.direct_http import open_directly
from rose.errors import ConfigError, UnavailableError
from slo.engine_metrics import ENGINES

TIMEOUT_S: Final = 60.0
# Prometheus answers with 11,000 points a series at most.
MOST_POINTS: Final = 10_000
LEAST_STEP_S: Final = 60.0
TRACE_STEP_S: Final = 10.0
MOST_ANSWER_BYTES: Final = 256 << 20
COUNTERS: Final = {
    "requests": ("vllm:request_success_total", "sglang:num_requests_total"),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "output_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
}
RUNNING: Final = tuple(name for engine in ENGINES.values() for name in engine["running"])
TTFT: Final = tuple(name for engine in ENGINES.values() for name in engine["ttft"])
TPOT: Final = tuple(
    name for engine in ENGINES.values() for kind in ("tpot", "itl") for name in engine[kind]
)
# Labels by which engines are one deployment.
BY: Final = "namespace,model_name"
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class UsageStep:
    """A step of a deployment's history.

    engines: that were scraped. idle: share of their samples in which no request ran. requests,
    prompt_tokens, output_tokens: of all of them, a second.
    """

    at_s: float
    engines: float
    idle: float
    requests: float
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class DeploymentUsage:
    """History of one deployment, in steps of `step_s`; `span_s` is the time that was asked for.

    ttft_p99_s, tpot_p99_s: of its users over the whole span; None where the engines have none.
    trace: file of its very requests, where the history is one and no engine was sampled.
    """

    name: str
    model: str
    step_s: float
    span_s: float
    moments: tuple[UsageStep, ...]
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    trace: Path | None = None

    @property
    def covered(self) -> float:
        """Share of the span of which there are samples."""
        return min(1.0, len(self.moments) * self.step_s / self.span_s)

    @property
    def engines(self) -> float:
        """Mean number of engines while there were any."""
        return sum(each.engines for each in self.moments) / max(1, len(self.moments))

    @property
    def idle(self) -> float:
        """Share of the engines' time in which no request ran."""
        return idle_share(self.moments)


def idle_share(moments: Sequence[UsageStep]) -> float:
    """Return the share of the engines' time in which no request ran, 0 without any engine."""
    engines = sum(each.engines for each in moments)
    return sum(each.engines * each.idle for each in moments) / engines if engines else 0.0


class PrometheusHistory:
    """Prometheus HTTP API at `url`, read-only. Raises ConfigError for an address that is none."""

    def __init__(
        self, url: str, by: Sequence[str], token: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"--prometheus {url}: give http://HOST:PORT or https://HOST:PORT")
        self._url, self._by, self._token = url.rstrip("/"), tuple(by), token
        self._timeout_s = timeout_s

    def usages(self, days: float, now_s: float) -> list[DeploymentUsage]:
        """Return the usage of every deployment in the last `days`.

        Raises UnavailableError if Prometheus does not answer, ConfigError if it has no metrics.
        """
        span_s = days * 86_400
        step_s = max(LEAST_STEP_S, math.ceil(span_s / MOST_POINTS))

        def ranged(query: str) -> dict[Labels, dict[float, float]]:
            return self.range(query, now_s - span_s, now_s, step_s)

        def latest(query: str) -> dict[Labels, dict[float, float]]:
            return self._ask("query", query=query, time=f"{now_s:.3f}")

        def series(
            names: Iterable[str], query: str, ask: Callable[..., Any] = ranged, w_s: float = step_s
        ) -> dict[Labels, dict[float, float]]:
            found: dict[Labels, dict[float, float]] = {}
            for name in names:
                asked = query.format(name=name, by=",".join(self._by), w=f"{w_s:g}s")
                for labels, values in ask(asked).items():
                    if values:
                        found.setdefault(labels, values)
            return found

        engines = series(RUNNING, "count by ({by}) (count_over_time({name}[{w}]))")
        if not engines:
            raise ConfigError(
                f"{self._url} has no series of vLLM ({RUNNING[0]}) or SGLang ({RUNNING[1]}) in the"
                f" last {days:g} days; name the Prometheus that scrapes your engines, or give"
                " --metrics http://HOST:PORT/metrics of them"
            )
        idle = series(RUNNING, "avg by ({by}) (avg_over_time(({name} == bool 0)[{w}:10s]))")
        rates = [series(names, "sum by ({by}) (rate({name}[{w}]))") for names in COUNTERS.values()]
        quantile = "histogram_quantile(0.99, sum by (le,{by}) (increase({name}_bucket[{w}])))"
        ttft, tpot = (
            {labels: max(points.values()) for labels, points in found.items()}
            for found in (series(names, quantile, latest, span_s) for names in (TTFT, TPOT))
        )
        return [
            DeploymentUsage(
                " ".join(value for _, value in labels if value) or "all engines",
                dict(labels).get("model_name", ""),
                step_s,
                span_s,
                tuple(
                    UsageStep(
                        at_s,
                        count,
                        idle[labels][at_s],
                        *(rate.get(labels, {}).get(at_s, 0.0) for rate in rates),
                    )
                    for at_s, count in sorted(points.items())
                    if at_s in idle.get(labels, {})
                ),
                ttft.get(labels),
                tpot.get(labels),
            )
            for labels, points in sorted(engines.items())
        ]

    def range(
        self, query: str, start_s: float, end_s: float, step_s: float
    ) -> dict[Labels, dict[float, float]]:
        """Return finite values by time, of each series that a query has between two times.

        Raises UnavailableError.
        """
        return self._ask(
            "query_range", query=query, start=f"{start_s:.3f}", end=f"{end_s:.3f}", step=f"{step_s}"
        )

    def _labels(self, row: Mapping[str, Any]) -> Labels:
        return tuple((name, row["metric"].get(name, "")) for name in self._by)

    def _ask(self, what: str, **query: str) -> dict[Labels, dict[float, float]]:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        body = urllib.parse.urlencode(query).encode()
        request = urllib.request.Request(f"{self._url}/api/v1/{what}", body, headers)  # noqa: S310
        try:
            with open_directly(request, self._timeout_s) as reply:
                said = json.loads(reply.read(MOST_ANSWER_BYTES))
            return {
                self._labels(row): {
                    float(at_s): float(value)
                    for at_s, value in row.get("values", [row.get("value")])
                    if math.isfinite(float(value))
                }
                for row in said["data"]["result"]
            }
        except urllib.error.HTTPError as error:
            why = error.read(500).decode("utf-8", "replace").strip()
            raise UnavailableError(f"{self._url}: HTTP {error.code}: {why}") from error
        except (OSError, HTTPException) as error:
            raise UnavailableError(
                f"{self._url} does not answer ({error}); is it Prometheus's address?"
            ) from error
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            raise UnavailableError(
                f"{self._url} does not answer as Prometheus does; is it its address?"
            ) from error


class _Reading(NamedTuple):
    """Reading of an engine's metrics: its model, requests that run, and counts as `COUNTERS`."""

    model: str
    running: float
    counts: list[float]


def watched_usages(
    urls: Sequence[str],
    for_s: float,
    every_s: float,
    read: Callable[[str], str],
    sleep: Callable[[float], None] = time.sleep,
) -> list[DeploymentUsage]:
    """Return the usage of the engines at these `/metrics`, read each `every_s` for `for_s` seconds.

    `read` returns the text at an address. Raises what it raises, and ConfigError for a text without
    metrics of an engine.
    """
    start_s, looks = time.time(), max(2, math.ceil(for_s / every_s) + 1)
    readings: dict[str, list[_Reading]] = {url: [] for url in urls}
    for look in range(looks):
        if look:
            sleep(every_s)
        for url, known in readings.items():
            known.append(_reading(url, read(url)))
    span_s = (looks - 1) * every_s
    together: dict[str, list[list[_Reading]]] = defaultdict(list)
    for known in readings.values():
        together[known[-1].model].append(known)
    found = []
    for model, engines in sorted(together.items()):
        rates = [
            sum(max(0.0, each[-1].counts[n] - each[0].counts[n]) for each in engines) / span_s
            for n in range(len(COUNTERS))
        ]
        moments = tuple(
            UsageStep(
                start_s + look * every_s,
                len(engines),
                sum(each[look].running == 0 for each in engines) / len(engines),
                *rates,
            )
            for look in range(looks)
        )
        found.append(DeploymentUsage(model, model, every_s, span_s, moments))
    return found


def _reading(url: str, text: str) -> _Reading:
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = defaultdict(float)
    model = ""
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] += sample.value
                if sample.name in RUNNING:
                    model = sample.labels.get("model_name", model)
    except ValueError as error:
        raise ConfigError(f"{url}: not Prometheus text: {error}") from error
    running = [sums[name] for name in RUNNING if name in sums]
    if not running:
        raise ConfigError(f"{url} has no metrics of vLLM or SGLang; give an engine's /metrics")
    counts = [sum(sums.get(name, 0.0) for name in names) for names in COUNTERS.values()]
    return _Reading(model, sum(running), counts)


def trace_usage(path: Path, engines: float) -> DeploymentUsage:
    """Return the usage that a trace of requests is, served by so many engines.

    Engines count as idle in a step in which no request came, until they are simulated.
    Raises RoseError, with file and line, for a file that is no trace.
    """
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for traced in stream_trace(path):
        step = counts[int(traced.offset_s // TRACE_STEP_S)]
        for n, add in enumerate((1, traced.prompt_tokens, traced.output_tokens)):
            step[n] += add
    moments = tuple(
        UsageStep(
            step * TRACE_STEP_S,
            engines,
            float(step not in counts),
            *(each / TRACE_STEP_S for each in counts.get(step, (0, 0, 0))),
        )
        for step in range(max(counts) + 1)
    )
    return DeploymentUsage(
        path.name, "", TRACE_STEP_S, len(moments) * TRACE_STEP_S, moments, trace=path
    )
