"""Latency targets of a model, presets of them by name, and how many requests met them."""

import math
import operator
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from difflib import get_close_matches
from typing import NamedTuple

from slo.errors import TargetError, UnknownPresetError


@dataclass(frozen=True, slots=True)
class SloSpec:
    """Latency targets that the `percentile` (in (0, 1]) of the requests to `model` must meet.

    `ttft_s`: time to first token; `tpot_s`: mean time per output token after the first; `itl_s`:
    each gap between two tokens, None for no target; `e2e_s`: arrival to last token, None for no
    target. Raises TargetError for a target that is not a positive finite time, and for two targets
    of which the tighter one makes the other meaningless.
    """

    model: str
    ttft_s: float
    tpot_s: float
    percentile: float = 0.99
    itl_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise TargetError(
                    f"{name} of {self.model!r} is {value}; give a positive time in seconds"
                )
        if not 0 < self.percentile <= 1:
            raise TargetError(
                f"percentile of {self.model!r} is {self.percentile}; give a fraction in (0, 1]"
            )
        # The first token is part of the whole, and no gap is longer than the longest one.
        self._refuse_below("e2e_s", "ttft_s")
        self._refuse_below("itl_s", "tpot_s")

    def _refuse_below(self, tight: str, loose: str) -> None:
        tight_s, loose_s = getattr(self, tight), getattr(self, loose)
        if tight_s is not None and tight_s < loose_s:
            raise TargetError(
                f"{tight} of {self.model!r} is {tight_s}, below {loose} of {loose_s}, which then "
                f"says nothing; raise {tight} or lower {loose}"
            )

    @property
    def ttft_ns(self) -> int:
        """TTFT target in nanoseconds."""
        return round(self.ttft_s * 1e9)

    @property
    def tpot_ns(self) -> int:
        """TPOT target in nanoseconds."""
        return round(self.tpot_s * 1e9)


# MLPerf Inference (server, interactive), all at p99, and the two models of the ROSE paper.
PRESETS: dict[str, SloSpec] = {
    spec.model: spec
    for spec in (
        SloSpec("llama-2-70b-server", 2.0, 0.200),
        SloSpec("llama-2-70b-interactive", 0.450, 0.040),
        SloSpec("llama-3.1-8b-server", 2.0, 0.100),
        SloSpec("llama-3.1-8b-interactive", 0.500, 0.030),
        SloSpec("llama-3.1-405b-server", 6.0, 0.175),
        SloSpec("llama-3.1-405b-interactive", 4.5, 0.080),
        SloSpec("deepseek-r1-server", 2.0, 0.080),
        SloSpec("deepseek-r1-interactive", 1.5, 0.015),
        SloSpec("gpt-oss-120b-server", 3.0, 0.080),
        SloSpec("gpt-oss-120b-interactive", 2.0, 0.020),
        SloSpec("rose-7b", 0.500, 0.150),
        SloSpec("rose-32b", 1.0, 0.450),
    )
}


def preset(name: str, model: str | None = None) -> SloSpec:
    """Return the targets of the preset `name`.

    model: replaces the model's name in them, if given. Raises UnknownPresetError with the nearest
    names, or with all when none is near.
    """
    try:
        spec = PRESETS[name]
    except KeyError:
        near = get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5) or sorted(PRESETS)
        raise UnknownPresetError(
            f"no SLO preset {name!r}; choose one of {', '.join(near)}"
        ) from None
    return spec if model is None else replace(spec, model=model)


class Met(NamedTuple):
    """Flags of the targets that one request met; a target that is not set counts as met."""

    ttft: bool
    tpot: bool
    itl: bool
    e2e: bool


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """Measured latencies of a finished request; `tpot_s` is 0 with fewer than two tokens.

    `itl_max_s` is the longest gap between two tokens, None where gaps were not measured.
    """

    request_id: str
    ttft_s: float
    tpot_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    itl_max_s: float | None = None

    def met(self, spec: SloSpec) -> Met:
        """Return which targets the request met, each for itself.

        Raises ValueError for an ITL target without measured gaps.
        """
        if spec.itl_s is not None and self.itl_max_s is None:
            raise ValueError(
                f"request {self.request_id!r} has no itl_max_s, but {spec.model!r} has an ITL "
                "target; measure token gaps or drop itl_s"
            )
        return Met(
            ttft=self.ttft_s <= spec.ttft_s,
            tpot=self.tpot_s <= spec.tpot_s,
            itl=spec.itl_s is None or self.itl_max_s is None or self.itl_max_s <= spec.itl_s,
            e2e=spec.e2e_s is None or self.e2e_s <= spec.e2e_s,
        )

    def meets(self, spec: SloSpec) -> bool:
        """Return True if the request meets every target. Raises as `met` does."""
        return all(self.met(spec))


@dataclass(frozen=True, slots=True)
class Attainment:
    """Counts of requests that met targets, in all and by target; `good` ones met every target.

    Add two to count both sets.
    """

    requests: int = 0
    good: int = 0
    ttft_met: int = 0
    tpot_met: int = 0
    itl_met: int = 0
    e2e_met: int = 0

    @property
    def bad(self) -> int:
        """Number of requests that missed at least one target."""
        return self.requests - self.good

    @property
    def fraction(self) -> float:
        """Share of good requests; 1 without requests, since none was missed."""
        return self.good / self.requests if self.requests else 1.0

    def __add__(self, other: "Attainment") -> "Attainment":
        return Attainment(*map(operator.add, astuple(self), astuple(other)))


def attainment(latencies: Iterable[RequestLatency], spec: SloSpec) -> Attainment:
    """Return the counts of requests that met each target of `spec`.

    Raises as `RequestLatency.met` does.
    """
    met = [latency.met(spec) for latency in latencies]
    return Attainment(len(met), sum(map(all, met)), *map(sum, zip(*met, strict=True)))


def goodput_rps(latencies: Iterable[RequestLatency], spec: SloSpec, window_s: float) -> float:
    """Return the requests per second that met every target (DistServe, OSDI 2024).

    window_s: time over which they were collected. Raises ValueError unless it is positive.
    """
    if window_s <= 0:
        raise ValueError(
            f"window_s is {window_s}; give the seconds the requests were collected over"
        )
    return attainment(latencies, spec).good / window_s
