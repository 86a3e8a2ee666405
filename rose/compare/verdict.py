"""Verdict of a comparison: what lending changed, with intervals over pairs of blocks.

Attainment and means are exact counts and sums; percentiles are read off the node's buckets, between
whose bounds they are interpolated, and decide nothing. With too few requests or pairs there is no
verdict but the number that is missing: intervals over little data look too good.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

import numpy as np

from rose.compare.bootstrap import Estimate, Floats, estimate_of_sums, ratio, ratio_of_ratios
from rose.compare.node_metrics import HostLatencies, HostReading

MIN_PAIRS = 6
MIN_REQUESTS = 1_000
MIN_REQUESTS_FOR_P99 = 10_000
PERCENTS = (50, 90, 99)


class Verdict(StrEnum):
    """Verdict on a limit. OPEN: the data does not decide. SHOWN: the value has no limit."""

    HOLDS = "holds"
    FAILS = "FAILS"
    OPEN = "inconclusive"
    SHOWN = "-"


@dataclass(frozen=True, slots=True)
class ComparisonLimits:
    """Limits of a comparison.

    max_loss: of the share of requests within both targets. max_ratio: of mean latencies, on over
    off.
    """

    max_loss: float = 0.001
    max_ratio: float = 1.05


@dataclass(frozen=True, slots=True)
class PairRead:
    """Readings of one pair of neighbouring blocks: with lending on, and with it off."""

    on: HostReading
    off: HostReading


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of a comparison: the value in each arm, and their difference (shares) or ratio on
    over off (latencies).
    """

    name: str
    on: float | None
    off: float | None
    estimate: Estimate | None
    limit: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows of a comparison. missing: what a verdict still needs, in words; "" if nothing."""

    findings: tuple[Finding, ...]
    requests_on: int
    requests_off: int
    guest_tokens: int
    missing: str

    @property
    def verdict(self) -> Verdict:
        """Verdict on all limits together: FAILS if one fails, else OPEN if one is open or data is
        missing, else HOLDS.
        """
        found = {finding.verdict for finding in self.findings}
        if self.missing:
            return Verdict.OPEN
        return next((v for v in (Verdict.FAILS, Verdict.OPEN) if v in found), Verdict.HOLDS)


def compared(pairs: Sequence[PairRead], limits: ComparisonLimits, seed: int) -> Comparison:
    """Return the comparison that the measured pairs of blocks give.

    seed: of the intervals' resampling.
    """
    on = sum(pair.on.requests for pair in pairs)
    off = sum(pair.off.requests for pair in pairs)
    tokens = sum(pair.on.tokens for pair in pairs)
    missing = lacking(len(pairs), on, off, tokens)
    findings = _findings(pairs, limits, seed, missing) if on and off else ()
    return Comparison(tuple(findings), int(on), int(off), int(tokens), missing)


def lacking(pairs: int, on: float, off: float, tokens: float) -> str:
    """Return what is missing for a verdict, in words; "" if nothing is. on, off: requests in each
    arm.

    tokens: sampled by guests.
    """
    fewest = min(on, off)
    if fewest < MIN_REQUESTS:
        a_pair = fewest / pairs if pairs else 0.0
        more = math.ceil(MIN_REQUESTS / a_pair) if a_pair else 0
        hint = f": at this rate --pairs {more}" if more else ""
        return f"{MIN_REQUESTS - int(fewest)} more requests in each arm{hint}"
    if pairs < MIN_PAIRS:
        return f"{MIN_PAIRS - pairs} more pairs of blocks that were measured whole"
    if not tokens:
        return "a guest that worked: it sampled no token in any block in which it might"
    return ""


def _findings(
    pairs: Sequence[PairRead], limits: ComparisonLimits, seed: int, missing: str
) -> list[Finding]:
    found = [_attainment(pairs, limits, seed), *_means(pairs, limits, seed)]
    if missing:
        found = [replace(each, estimate=None, verdict=Verdict.OPEN) for each in found]
    return [*found, *_percentiles(pairs, seed, enough=not missing)]


def _attainment(pairs: Sequence[PairRead], limits: ComparisonLimits, seed: int) -> Finding:
    rows = [(p.on.met, p.on.requests, p.off.met, p.off.requests) for p in pairs]
    return _of_rows(
        "requests within both targets",
        rows,
        estimate_of_sums([rows], lambda sums: ratio(sums[0]) - ratio(sums[0][..., 2:]), seed),
        f">= {-limits.max_loss:g}",
        lambda value: value >= -limits.max_loss,
    )


def _means(pairs: Sequence[PairRead], limits: ComparisonLimits, seed: int) -> Iterator[Finding]:
    for name in ("ttft", "tpot"):
        arms = [(_of(pair.on, name), _of(pair.off, name)) for pair in pairs]
        rows = [(on.sum_s, on.count, off.sum_s, off.count) for on, off in arms]
        yield _of_rows(
            f"{name.upper()} mean",
            rows,
            _known(estimate_of_sums([rows], ratio_of_ratios, seed)),
            f"<= {limits.max_ratio:g}",
            lambda value: value <= limits.max_ratio,
        )


def _of_rows(
    name: str,
    rows: Sequence[Sequence[float]],
    estimate: Estimate | None,
    limit: str,
    meets: Callable[[float], bool],
) -> Finding:
    """Return the finding of rows (amount on, count on, amount off, count off), whose values are
    amount over count.
    """
    on, on_count, off, off_count = (sum(column) for column in zip(*rows, strict=True))
    return Finding(
        name,
        on / on_count if on_count else None,
        off / off_count if off_count else None,
        estimate,
        limit,
        _judged(estimate, meets),
    )


def _percentiles(pairs: Sequence[PairRead], seed: int, *, enough: bool) -> list[Finding]:
    found = []
    for name in ("ttft", "tpot"):
        bounds = np.array(list(_of(pairs[0].on, name).buckets))
        rows = [
            [*_of(pair.on, name).buckets.values(), *_of(pair.off, name).buckets.values()]
            for pair in pairs
        ]
        sums: Floats = np.array(rows, dtype=np.float64).sum(axis=0)
        fewest = min(sums[len(bounds) - 1], sums[-1])
        for percent in PERCENTS:
            on, off = _arms(sums, bounds, percent)
            told = enough and (percent < 99 or fewest >= MIN_REQUESTS_FOR_P99)
            estimate = None
            if told:
                ratio = partial(_ratio_of_percentiles, bounds=bounds, percent=percent)
                estimate = _known(estimate_of_sums([rows], ratio, seed))
            found.append(
                Finding(
                    f"{name.upper()} p{percent} (buckets)",
                    _finite(float(on)),
                    _finite(float(off)),
                    estimate,
                    "" if told or percent < 99 else f"needs {MIN_REQUESTS_FOR_P99} requests",
                    Verdict.SHOWN,
                )
            )
    return found


def _ratio_of_percentiles(sums: Sequence[Floats], bounds: Floats, percent: float) -> Floats:
    on, off = _arms(sums[0], bounds, percent)
    ratio: Floats = on / off
    return ratio


def _arms(sums: Floats, bounds: Floats, percent: float) -> tuple[Floats, Floats]:
    width = len(bounds)
    return (
        _percentile(sums[..., :width], bounds, percent),
        _percentile(sums[..., width:], bounds, percent),
    )


def _percentile(counts: Floats, bounds: Floats, percent: float) -> Floats:
    """Return the percentile of cumulative counts [..., bounds], interpolated between bounds; NaN
    beyond the last finite bound.
    """
    rank = counts[..., -1:] * percent / 100
    at = np.argmax(counts >= rank, axis=-1)
    low_s = np.concatenate(([0.0], bounds[:-1]))[at]
    below = np.concatenate((np.zeros_like(counts[..., :1]), counts[..., :-1]), axis=-1)
    before = np.take_along_axis(below, at[..., None], axis=-1)[..., 0]
    inside = np.take_along_axis(counts, at[..., None], axis=-1)[..., 0] - before
    high_s = bounds[at]
    share = np.divide(rank[..., 0] - before, inside, out=np.zeros_like(before), where=inside > 0)
    with np.errstate(invalid="ignore"):
        value: Floats = np.where(np.isfinite(high_s), low_s + share * (high_s - low_s), np.nan)
    return value


def _of(reading: HostReading, name: str) -> HostLatencies:
    return reading.ttft if name == "ttft" else reading.tpot


def _known(estimate: Estimate) -> Estimate | None:
    return None if math.isnan(estimate.value) else estimate


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _judged(estimate: Estimate | None, meets: Callable[[float], bool]) -> Verdict:
    """Return HOLDS if both ends of the interval meet the limit, FAILS if neither does, OPEN
    otherwise or without an interval.
    """
    if estimate is None or estimate.ci95 is None:
        return Verdict.OPEN
    ends = [meets(end) for end in estimate.ci95]
    if all(ends):
        return Verdict.HOLDS
    return Verdict.OPEN if any(ends) else Verdict.FAILS
