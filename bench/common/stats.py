"""Quantiles of measurements, and results compared with their raw records, field by field.

Bootstrap intervals are those of `rose.compare.bootstrap`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from bench.load.protocol import Request
from rose.compare.bootstrap import Estimate, PairedWindow, ratio_of_percentiles
from rose.errors import BAD_BYTES, RoseError
from slo import RequestLatency

T = TypeVar("T")
# Sums in another order, by another version of a library, may differ in the last digits.
RELATIVE_TOLERANCE = 1e-9
_ABSENT = "(absent)"
_SAMPLE = r"^{name}(?:\{{[^}}]*\}})? ([0-9.eE+]+)$"
METRICS: dict[str, Callable[[Request], float | None]] = {
    "ttft": lambda request: request.ttft_s,
    "tpot": lambda request: request.tpot_s,
}


def quantiles(values: Sequence[float], *shares: float) -> list[float | None]:
    """Return the quantile at each share of 0 to 1; None without values."""
    if not values:
        return [None] * len(shares)
    return [float(value) for value in np.quantile(np.asarray(values), shares)]


def rounded(values: Sequence[float], *shares: float, scale: float = 1.0) -> list[float]:
    """Return quantiles, times `scale`, to three digits; not a number without values."""
    found = quantiles(values, *shares)
    return [math.nan if value is None else round(scale * value, 3) for value in found]


def metric(text: str, names: Iterable[str]) -> float:
    """Return the sum over samples in Prometheus' text format; 0 without any."""
    one_of = "|".join(re.escape(name) for name in names)
    pattern = re.compile(_SAMPLE.format(name=f"(?:{one_of})"), re.MULTILINE)
    return sum(float(value) for value in pattern.findall(text))


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field whose reported value is not what the records give."""

    field: str
    reported: object
    recomputed: object

    def __str__(self) -> str:
        return f"{self.field}: reported {self.reported!r}, recomputed {self.recomputed!r}"


def _same_leaf(reported: object, recomputed: object) -> bool:
    if type(reported) is bool or type(recomputed) is bool:
        return reported is recomputed
    if isinstance(reported, int | float) and isinstance(recomputed, int | float):
        return math.isclose(reported, recomputed, rel_tol=RELATIVE_TOLERANCE)
    return reported == recomputed


def compare(reported: object, recomputed: object, field: str = "") -> Iterator[FieldDifference]:
    """Yield all differing fields of two JSON values, in order of their names."""
    if isinstance(reported, dict) and isinstance(recomputed, dict):
        for key in sorted(reported.keys() | recomputed.keys()):
            name = f"{field}.{key}" if field else key
            yield from compare(reported.get(key, _ABSENT), recomputed.get(key, _ABSENT), name)
    elif isinstance(reported, list) and isinstance(recomputed, list):
        if len(reported) != len(recomputed):
            yield FieldDifference(f"{field}.length", len(reported), len(recomputed))
        for index, pair in enumerate(zip(reported, recomputed, strict=False)):
            yield from compare(*pair, f"{field}[{index}]")
    elif not _same_leaf(reported, recomputed):
        yield FieldDifference(field, reported, recomputed)


def read_json(path: Path, kind: type[T], hint: str) -> T:
    """Return a run's file as `kind`. Raises RoseError, with `hint`, where it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise RoseError(f"{path}: cannot be read ({error.strerror}); {hint}") from error
    except BAD_BYTES as error:
        raise RoseError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Pair:
    """One arrival: in the arm, and alone."""

    arm: Request
    alone: Request

    @property
    def both_digests(self) -> bool:
        """True if the tokens of both answers are known."""
        return None not in (self.arm.output_digest, self.alone.output_digest)

    @property
    def mismatch(self) -> bool:
        """True if the answers differ in a token."""
        return self.both_digests and self.arm.output_digest != self.alone.output_digest


Window = list[Pair]


class Played(Protocol):
    """A stretch of time in which one arm had the host's load."""

    @property
    def block(self) -> int: ...

    @property
    def duration_s(self) -> float: ...


class RequestIndex:
    """Requests by block and offset."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._by_block: dict[int, dict[float, Request]] = defaultdict(dict)
        for request in requests:
            self._by_block[request.block][request.offset_s] = request

    def of(self, block: Played) -> list[Request]:
        """Return requests that arrived while the block lasted, in order of time."""
        found = self._by_block[block.block]
        return [found[at] for at in sorted(found) if at < block.duration_s]

    def windows(self, arm: Played, alone: Played, window_s: float) -> list[Window]:
        """Return arrivals that both blocks saw, grouped by time."""
        others = {request.offset_s: request for request in self.of(alone)}
        grouped: dict[int, Window] = defaultdict(list)
        for request in self.of(arm):
            if (other := others.get(request.offset_s)) is not None:
                grouped[int(request.offset_s / window_s)].append(Pair(request, other))
        return list(grouped.values())


def latency_s(request: Request, metric: str) -> float | None:
    """Return a latency: infinity for a failed request, None where none was measured."""
    return METRICS[metric](request) if request.status == "ok" else math.inf


def slo_latency(request: Request) -> RequestLatency:
    """Return latencies for counting attainment: a failed request meets no target."""
    ok = request.status == "ok" and request.ttft_s is not None
    return RequestLatency(
        request_id=request.request_id,
        ttft_s=request.ttft_s if ok and request.ttft_s is not None else math.inf,
        tpot_s=(request.tpot_s or 0.0) if ok else math.inf,
        e2e_s=request.e2e_s if request.e2e_s is not None else math.inf,
        prompt_tokens=request.prompt_tokens or 0,
        output_tokens=request.output_tokens,
    )


def paired_window(window: Window, metric: str) -> PairedWindow:
    """Return latencies of the pairs in which both sides have one."""
    both = [(latency_s(pair.arm, metric), latency_s(pair.alone, metric)) for pair in window]
    kept = [(above, below) for above, below in both if above is not None and below is not None]
    return PairedWindow([above for above, _ in kept], [below for _, below in kept])


def percentile_ratio(
    windows: Sequence[Window], metric: str, percent: float, seed: int
) -> Estimate | None:
    """Return percentile in the arm over the one alone; None when nothing can be compared."""
    found = [paired for window in windows if (paired := paired_window(window, metric)).above]
    return ratio_of_percentiles(found, percent, seed) if found else None
