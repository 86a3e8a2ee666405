"""Arrivals of host requests: seeded bursts, or a rescaled trace in the Azure format.

Pure and seeded: the same segment gives the same arrivals each time it is replayed, which lets two
arms of an experiment be compared request by request.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rose.azure_trace import TracedRequest
from rose.errors import RoseError

MOST_RATE_PER_S = 1_000.0


@dataclass(frozen=True, slots=True)
class LoadShape:
    """A two-state Markov-modulated Poisson load: calm, and bursts `burst_ratio` times as dense.

    Bursts last `burst_s` on average and take `burst_share` of the time. A block that outlasts its
    segment hears it again, so `segment_s` is about as long as a block.
    """

    mean_rate_per_s: float = 4.0
    burst_ratio: float = 6.0
    burst_share: float = 0.2
    burst_s: float = 1.5
    segment_s: float = 15.0
    min_prompt_tokens: int = 8
    max_prompt_tokens: int = 96
    min_output_tokens: int = 4
    max_output_tokens: int = 16

    def __post_init__(self) -> None:
        if not (0 < self.mean_rate_per_s <= MOST_RATE_PER_S and 0 < self.segment_s <= 3_600):
            raise RoseError("a load needs a rate of 0 to 1000 per second and segments up to 1 h")
        if not (self.burst_ratio >= 1 and 0 < self.burst_share < 1 and self.burst_s > 0):
            raise RoseError("bursts need ratio >= 1, a share between 0 and 1, and a duration")
        if not 1 <= self.min_prompt_tokens <= self.max_prompt_tokens:
            raise RoseError("prompt lengths must be 1 <= min <= max")
        if not 1 <= self.min_output_tokens <= self.max_output_tokens:
            raise RoseError("output lengths must be 1 <= min <= max")

    @property
    def calm_rate_per_s(self) -> float:
        """Rate outside bursts that makes the mean rate come out."""
        return self.mean_rate_per_s / (1 - self.burst_share + self.burst_share * self.burst_ratio)

    @property
    def typical_tokens(self) -> tuple[int, int]:
        """(prompt, output) of the middle request."""
        return (
            _middle(self.min_prompt_tokens, self.max_prompt_tokens),
            _middle(self.min_output_tokens, self.max_output_tokens),
        )

    def without_bursts(self) -> "LoadShape":
        """Return the same mean load as a plain Poisson process."""
        return replace(self, burst_ratio=1.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One host request; `offset_s` counts from the start of its segment."""

    offset_s: float
    prompt_tokens: int
    output_tokens: int


def _middle(low: int, high: int) -> int:
    return round(math.sqrt(low * high))


def _phases(shape: LoadShape, rng: random.Random) -> Iterator[tuple[float, float]]:
    """Yield (end_s, rate_per_s) of each calm or bursty phase until the segment is full."""
    calm_s = shape.burst_s * (1 - shape.burst_share) / shape.burst_share
    bursting = rng.random() < shape.burst_share
    end_s = 0.0
    while end_s < shape.segment_s:
        end_s += rng.expovariate(1 / (shape.burst_s if bursting else calm_s))
        rate_per_s = shape.calm_rate_per_s * (shape.burst_ratio if bursting else 1)
        yield min(end_s, shape.segment_s), rate_per_s
        bursting = not bursting


def _skewed_length(rng: random.Random, low: int, high: int) -> int:
    """Return a length between low and high: log-normal around their geometric mean."""
    center = (math.log(low) + math.log(high)) / 2
    spread = (math.log(high) - math.log(low)) / 4
    return min(high, max(low, round(rng.lognormvariate(center, spread))))


def generate_segment(shape: LoadShape, seed: int, segment: int) -> tuple[Arrival, ...]:
    """Return segment number `segment` of the bursty load, in order of time."""
    rng = random.Random(f"rose-load/{seed}/{segment}")  # noqa: S311 - a load, not a secret
    arrivals: list[Arrival] = []
    start_s = 0.0
    for end_s, rate_per_s in _phases(shape, rng):
        # Poisson arrivals have no memory, so each phase may start its clock afresh.
        offset_s = start_s + rng.expovariate(rate_per_s)
        while offset_s < end_s:
            prompt = _skewed_length(rng, shape.min_prompt_tokens, shape.max_prompt_tokens)
            output = _skewed_length(rng, shape.min_output_tokens, shape.max_output_tokens)
            arrivals.append(Arrival(round(offset_s, 6), prompt, output))
            offset_s += rng.expovariate(rate_per_s)
        start_s = end_s
    return tuple(arrivals)


def _percentile_95(values: Sequence[int]) -> int:
    return max(1, sorted(values)[min(len(values) - 1, int(0.95 * len(values)))])


def rescale_trace(trace: Sequence[TracedRequest], shape: LoadShape) -> tuple[Arrival, ...]:
    """Return the trace at the shape's mean rate, its lengths brought to what the host serves.

    Time is stretched evenly, so bursts keep their shape. Lengths shrink in proportion, such that
    the trace's 95th percentile becomes the longest allowed; the rest is clipped.
    """
    if len(trace) < 2 or trace[-1].offset_s <= 0:
        raise RoseError("a trace needs two requests at different times")
    stretch = len(trace) / trace[-1].offset_s / shape.mean_rate_per_s
    prompt_scale = shape.max_prompt_tokens / _percentile_95([t.prompt_tokens for t in trace])
    output_scale = shape.max_output_tokens / _percentile_95([t.output_tokens for t in trace])

    def clip(tokens: float, low: int, high: int) -> int:
        return min(high, max(low, round(tokens)))

    return tuple(
        Arrival(
            round(request.offset_s * stretch, 6),
            clip(
                request.prompt_tokens * prompt_scale,
                shape.min_prompt_tokens,
                shape.max_prompt_tokens,
            ),
            clip(
                request.output_tokens * output_scale,
                shape.min_output_tokens,
                shape.max_output_tokens,
            ),
        )
        for request in trace
    )


def trace_segment(
    rescaled: Sequence[Arrival], segment_s: float, segment: int
) -> tuple[Arrival, ...]:
    """Return window number `segment` of a rescaled trace; windows past its end start over."""
    windows = max(1, int(rescaled[-1].offset_s / segment_s))
    start_s = (segment % windows) * segment_s
    first = bisect_left(rescaled, start_s, key=lambda arrival: arrival.offset_s)
    last = bisect_left(rescaled, start_s + segment_s, key=lambda arrival: arrival.offset_s)
    return tuple(
        Arrival(round(a.offset_s - start_s, 6), a.prompt_tokens, a.output_tokens)
        for a in rescaled[first:last]
    )
