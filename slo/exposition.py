"""Prometheus text to the series of known names: the parsing half of a scrape."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slo.engine_metrics import QUANTITIES, STARTED
from slo.errors import ScrapeError
from slo.histogram import Histogram

Labels = frozenset[tuple[str, str]]

_LINE_NAME = re.compile(r"(?:# (?:TYPE|HELP) )?([A-Za-z_:][\w:]*)")
_PARTS = ("_bucket", "_count", "_sum", "")


@dataclass(slots=True)
class Series:
    """All samples of one name: of a gauge by label set, of a histogram by label set and bound."""

    values: dict[Labels, float] = field(default_factory=dict)
    buckets: dict[Labels, dict[float, float]] = field(default_factory=lambda: defaultdict(dict))
    sums: dict[Labels, float] = field(default_factory=dict)

    def histogram(self) -> Histogram | None:
        """Sum over label sets, at the bounds that all have; None without buckets.

        Raises ValueError for counts that fall or lack their last bucket.
        """
        if not self.buckets:
            return None
        common = set.intersection(*(set(by_bound) for by_bound in self.buckets.values()))
        if float("inf") not in common:
            raise ValueError("a histogram without +Inf bucket")
        bounds = sorted(common)
        totals = [sum(held[bound] for held in self.buckets.values()) for bound in bounds]
        if not all(map(math.isfinite, totals)):
            raise ValueError(f"bucket counts {totals} are not finite")
        return Histogram(tuple(bounds[:-1]), tuple(map(int, totals)), sum(self.sums.values()))


def known_series(text: str, model: str | None) -> dict[str, Series]:
    """Samples of known names, of `model` alone where one is given and the engine labels models.

    Raises ScrapeError for text that is no Prometheus exposition.
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


def models(text: str) -> list[str]:
    """Names of the models that known metrics carry."""
    return sorted(set(re.findall(r'model_name="([^"]*)"', _known_lines(text))))


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


def merged_ranks(values: Mapping[Labels, float], ranks: Iterable[str]) -> list[float]:
    """One value for each label set without `ranks`: ranks of one engine repeat the same number."""
    merged: dict[Labels, float] = {}
    for labels, value in values.items():
        key = _without(dict(labels), *ranks)
        merged[key] = max(value, merged.get(key, value))
    return list(merged.values())
