"""One engine's `/metrics`, whichever engine and version: the fallback for hosts without the plugin.

Two histograms cannot say which requests met both targets, and their buckets miss usual targets;
where the host plugin runs, its per-request records are used instead. Fetching is the caller's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from slo.engine_metrics import ENGINES, GAUGES, HISTOGRAMS, QUANTITIES, STARTED
from slo.errors import ScrapeError
from slo.exposition import Series, known_series, merged_ranks, models
from slo.histogram import Histogram

# SGLang may export each rank of one engine; data-parallel ranks are engines of their own.
_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")


@dataclass(frozen=True, slots=True)
class Scrape:
    """What an engine said; None for what it does not export, or not before its first request.

    Histograms are in seconds, over all requests since the engine started, or since the earlier
    scrape in what `since` returns. `tpot` is each request's mean time per output token, `itl` each
    gap between tokens. `running`, `waiting` are requests now; `kv_usage` lies in [0, 1], that of
    the fullest engine. `names` says which metric each came from; `started_s` is the Unix time the
    process started at.
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
        """What happened after `earlier`, with `restarted` when the engine was started in between.

        A restarted engine counts from zero again: all that it has counted is new. Raises
        ScrapeError when `earlier` is another engine's.
        """
        if self.engine != earlier.engine:
            raise ScrapeError(
                f"scrapes of {earlier.engine} and {self.engine}; compare two of one engine"
            )
        fresh: dict[str, Histogram | None] = {}
        for name in HISTOGRAMS:
            then, now = getattr(earlier, name), getattr(self, name)
            first = then is None or not then.count
            fresh[name] = now if first or now is None else now.since(then)
            # One counter that fell is enough: another may have outgrown its former self already.
            if fresh[name] is None and not first:
                return replace(self, restarted=True)
        if self.started_s != earlier.started_s:
            return replace(self, restarted=True)
        return replace(
            self, ttft=fresh["ttft"], tpot=fresh["tpot"], itl=fresh["itl"], e2e=fresh["e2e"]
        )


def parse_scrape(text: str, model: str | None = None) -> Scrape:
    """Read a Prometheus text exposition of vLLM or SGLang, of `model` alone where one is given.

    Raises ScrapeError when it is of neither or of both, or has nothing of that model.
    """
    found = known_series(text, model)
    engines = {QUANTITIES[name][0] for name in found if name in QUANTITIES}
    if not engines and (served := models(text)):
        raise ScrapeError(f"no metrics of model {model!r}; the engine has {', '.join(served)}")
    if len(engines) != 1:
        both = " and ".join(sorted(engines)) or "no known engine"
        raise ScrapeError(
            f"metrics of {both}; give the /metrics of one vLLM, or of one SGLang started with "
            "--enable-metrics"
        )
    (engine,) = (names for names in ENGINES if names.engine in engines)
    names = {
        quantity: next((name for name in engine.of(quantity) if name in found), None)
        for quantity in (*HISTOGRAMS, *GAUGES)
    }
    held = {quantity: found[name] for quantity, name in names.items() if name is not None}
    return Scrape(
        engine.engine,
        ttft=_histogram("ttft", held),
        tpot=_histogram("tpot", held),
        itl=_histogram("itl", held),
        e2e=_histogram("e2e", held),
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
    finite = [v for v in merged_ranks(totals or series.values, _RANKS) if math.isfinite(v)]
    return int(sum(finite)) if finite else None


def _fullest(series: Series | None) -> float | None:
    finite = [] if series is None else [v for v in series.values.values() if math.isfinite(v)]
    return max(finite, default=None)
