"""Metrics of an engine, read from its `/metrics` text: vLLM and SGLang, whichever version.

This is the fallback for hosts without the plugin. Two histograms cannot say which requests met both
targets, and their buckets miss usual targets; where the host plugin runs, its per-request records
are used instead. Fetching the text is the caller's.

`ENGINES` lists each quantity's names, newest first. vLLM: `vllm/v1/metrics/loggers.py`. Until
0.10 its `time_per_output_token_seconds` held the gaps between tokens, not each request's mean; 0.11
renamed it to `inter_token_latency_seconds`, and the per-request mean came as
`request_time_per_output_token_seconds`. SGLang: `sglang/srt/observability/metrics_collector.py`,
before that `sglang/srt/metrics/collector.py`; its gaps were `time_per_output_token_seconds` until
0.4.2, and it has no per-request mean yet.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from slo.errors import ScrapeError
from slo.histogram import Histogram

HISTOGRAMS: Final = ("ttft", "tpot", "itl", "e2e")
STARTED: Final = "process_start_time_seconds"

ENGINES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "vllm": {
        "ttft": ("vllm:time_to_first_token_seconds",),
        "tpot": ("vllm:request_time_per_output_token_seconds",),
        "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "e2e": ("vllm:e2e_request_latency_seconds",),
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    },
    "sglang": {
        "ttft": ("sglang:time_to_first_token_seconds",),
        "tpot": ("sglang:request_time_per_output_token_seconds",),
        "itl": ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        "e2e": ("sglang:e2e_request_latency_seconds",),
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_usage": ("sglang:token_usage",),
    },
}
"""Metric names of each quantity in each engine's versions, newest first."""

QUANTITIES: Final[Mapping[str, tuple[str, str]]] = {
    name: (engine, quantity)
    for engine, quantities in ENGINES.items()
    for quantity, names in quantities.items()
    for name in names
}
"""Engine and quantity of every known metric name."""


Labels = frozenset[tuple[str, str]]

_LINE_NAME = re.compile(r"(?:# (?:TYPE|HELP) )?([A-Za-z_:][\w:]*)")
_PARTS = ("_bucket", "_count", "_sum", "")
# SGLang may export each rank of one engine; data-parallel ranks are engines of their own.
_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")


@dataclass(slots=True)
class Series:
    """All samples of one metric: of a gauge by label set, of a histogram by label set and bound."""

    values: dict[Labels, float] = field(default_factory=dict)
    buckets: dict[Labels, dict[float, float]] = field(default_factory=lambda: defaultdict(dict))
    sums: dict[Labels, float] = field(default_factory=dict)

    def histogram(self) -> Histogram | None:
        """Return the sum over engines, at the bounds that all have; None without buckets.

        Raises ValueError for counts that fall or lack their last bucket.
        """
        # Ranks of one engine repeat its requests: the rank that counted most stands for all.
        ranks: dict[Labels, tuple[float, float, dict[float, float]]] = {}
        for labels, by_bound in self.buckets.items():
            rank = max(by_bound.values()), self.sums.get(labels, 0.0), by_bound
            engine = _without(dict(labels), *_RANKS)
            ranks[engine] = max(rank, ranks.get(engine, rank), key=lambda each: each[:2])
        if not ranks:
            return None
        held = [by_bound for _, _, by_bound in ranks.values()]
        common = set.intersection(*map(set, held))
        if float("inf") not in common:
            raise ValueError("a histogram without +Inf bucket")
        bounds = sorted(common)
        totals = [sum(by_bound[bound] for by_bound in held) for bound in bounds]
        if not all(map(math.isfinite, totals)):
            raise ValueError(f"bucket counts {totals} are not finite")
        return Histogram(
            tuple(bounds[:-1]), tuple(map(int, totals)), sum(r[1] for r in ranks.values())
        )


def known_series(text: str, model: str | None) -> dict[str, Series]:
    """Return the samples of known metrics in Prometheus text, by metric name.

    model: count only samples of this model, where the engine labels models; None counts all. Raises
    ScrapeError for text that is no Prometheus exposition.
    """
    # Imported here: only who scrapes needs it, and vLLM sets it up before its own first import.
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, Series] = defaultdict(Series)
    try:
        for family in text_string_to_metric_families(_known_lines(text)):
            for sample in family.samples:
                if model is None or sample.labels.get("model_name", model) == model:
                    _add(found, sample.name, sample.labels, float(sample.value))
    except (ValueError, KeyError) as error:
        raise ScrapeError(f"not Prometheus text: {error}; check the /metrics address") from None
    return dict(found)


def _known_lines(text: str) -> str:
    # An engine exports thousands of lines and the parser is slow: it gets the few that matter.
    return "".join(_spelt(line) + "\n" for line in text.splitlines() if _base(line) is not None)


def _spelt(line: str) -> str:
    # Routers in front of engines turn the colon into an underscore.
    return re.sub(r"^(# (?:TYPE|HELP) )?(vllm|sglang)_", r"\1\2:", line)


def _base(line: str) -> str | None:
    match = _LINE_NAME.match(_spelt(line))
    if match is None:
        return None
    names = (match[1].removesuffix(part) for part in _PARTS if match[1].endswith(part))
    return next((name for name in names if name in QUANTITIES or name == STARTED), None)


def _add(found: dict[str, Series], name: str, labels: Mapping[str, str], value: float) -> None:
    base = _base(name)
    if base is None:
        return
    series, part = found[base], name.removeprefix(base)
    key = _without(labels, "le")
    if part == "_bucket":
        series.buckets[key][float(labels["le"])] = value
    elif part == "_sum":
        series.sums[key] = value
    elif part == "":
        series.values[key] = value


def _without(labels: Mapping[str, str], *names: str) -> Labels:
    return frozenset((name, value) for name, value in labels.items() if name not in names)


@dataclass(frozen=True, slots=True)
class Scrape:
    """Metrics of one engine in one scrape; a field is None if the engine does not export it yet.

    Histograms are in seconds, over all requests since the engine started, or since the earlier
    scrape in what `since` returns. `tpot` is each request's mean time per output token, `itl` each
    gap between tokens. `running`, `waiting` are requests now; `kv_usage` lies in [0, 1], that of
    the fullest engine. `names`: the metric that each quantity came from. `started_s`: Unix time at
    which the process started.
    """

    engine: str
    ttft: Histogram | None = None
    tpot: Histogram | None = None
    itl: Histogram | None = None
    e2e: Histogram | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    started_s: float | None = None
    restarted: bool = False
    names: Mapping[str, str] | None = None

    def since(self, earlier: "Scrape") -> "Scrape":
        """Return this scrape with histograms of the requests after `earlier` only.

        With `restarted` if the engine started in between: then it counts from zero again, and all
        that it has counted is new. Raises ScrapeError when `earlier` is another engine's.
        """
        if self.engine != earlier.engine:
            raise ScrapeError(
                f"scrapes of {earlier.engine} and {self.engine}; compare two of one engine"
            )
        fresh: dict[str, Any] = {}
        for name in HISTOGRAMS:
            then, now = getattr(earlier, name), getattr(self, name)
            first = then is None or not then.count
            fresh[name] = now if first or now is None else now.since(then)
            # One counter that fell is enough: another may have outgrown its former self already.
            if fresh[name] is None and not first:
                return replace(self, restarted=True)
        if self.started_s != earlier.started_s:
            return replace(self, restarted=True)
        return replace(self, **fresh)


def parse_scrape(text: str, model: str | None = None) -> Scrape:
    """Return the metrics in a Prometheus text of vLLM or SGLang.

    model: count only samples of this model; None counts all. Raises ScrapeError when the text is of
    neither engine or of both, or has nothing of that model.
    """
    found = known_series(text, model)
    engines = {QUANTITIES[name][0] for name in found if name in QUANTITIES}
    served = sorted(set(re.findall(r'model_name="([^"]*)"', _known_lines(text))))
    if not engines and served:
        raise ScrapeError(f"no metrics of model {model!r}; the engine has {', '.join(served)}")
    if len(engines) != 1:
        both = " and ".join(sorted(engines)) or "no known engine"
        raise ScrapeError(
            f"metrics of {both}; give the /metrics of one vLLM, or of one SGLang started with "
            "--enable-metrics"
        )
    (engine,) = engines
    names = {
        quantity: next((name for name in known if name in found), None)
        for quantity, known in ENGINES[engine].items()
    }
    held = {quantity: found[name] for quantity, name in names.items() if name is not None}
    histograms: dict[str, Any] = {name: _histogram(name, held) for name in HISTOGRAMS}
    return Scrape(
        engine,
        **histograms,
        running=_requests(held.get("running")),
        waiting=_requests(held.get("waiting")),
        kv_usage=_fullest(held.get("kv_usage")),
        started_s=_fullest(found.get(STARTED)),
        names={quantity: name for quantity, name in names.items() if name is not None},
    )


def _histogram(quantity: str, held: Mapping[str, Series]) -> Histogram | None:
    if quantity not in held:
        return None
    try:
        return held[quantity].histogram()
    except ValueError as error:
        raise ScrapeError(f"{quantity} of this engine: {error}; scrape it again") from None


def _requests(series: Series | None) -> int | None:
    if series is None:
        return None
    # SGLang splits queues by priority beside their total, whose priority is empty.
    totals = {k: v for k, v in series.values.items() if not dict(k).get("priority")}
    engines: dict[Labels, float] = {}
    for labels, value in (totals or series.values).items():
        # Ranks of one engine repeat the same number.
        engine = _without(dict(labels), *_RANKS)
        engines[engine] = max(value, engines.get(engine, value))
    finite = [value for value in engines.values() if math.isfinite(value)]
    return int(sum(finite)) if finite else None


def _fullest(series: Series | None) -> float | None:
    finite = [] if series is None else [v for v in series.values.values() if math.isfinite(v)]
    return max(finite, default=None)
