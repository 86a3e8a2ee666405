"""Traffic of a serving cluster's users: generated bursts with a daily shape, or a recorded trace.

Requests are read lazily and in order, so that a week of traffic never lies in memory, and are known
before the run: every policy of a comparison is given the same ones.

Generated arrivals are a Poisson process whose rate changes between calm and bursts (a two-state
Markov-modulated process) and follows the hour of the day.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from rose.azure_trace import stream_trace
from rose.simulation.checked import CHECKED, NotNegative, Positive
from rose.simulation.workloads.amounts import Amount, LogNormal, Quantiles, whole

HOUR_S, DAY_S = 3_600.0, 86_400.0
MAX_GAP_S = HOUR_S
MAX_TOKENS = 1 << 20
_BISECTIONS = 60
_MAX_SPREAD = 2.0


@dataclass(frozen=True, slots=True)
class UserRequest:
    """User's request to the serving cluster: seconds after the beginning at which it arrives, and
    its lengths in tokens.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


class ServingWorkload(Protocol):
    """Protocol of users' traffic to a serving cluster."""

    def requests(self, seed: int) -> Iterator[UserRequest]:
        """Yield requests in order of arrival, the same for the same seed; it may never end."""
        ...


@checked_dataclass(frozen=True, slots=True, config=CHECKED)
class DailyShape:
    """Daily shape of a load, as multiples of the mean: `peak` at `peak_hour`, `valley` half a day
    apart.

    Between them it is valley + (peak − valley) × ((1 + cos) ÷ 2)^k, with k such that a day's mean
    is 1. weekend: factor of Saturday and Sunday; day 0 is a Monday. The mean of working days stays
    1. Raises ValueError for an impossible shape.
    """

    peak: float = 1.0
    valley: float = 1.0
    peak_hour: float = 14.0
    weekend: NotNegative = 1.0

    def __post_init__(self) -> None:
        flat = self.peak == self.valley == 1
        if not flat and not (0 <= self.valley < 1 < self.peak):
            raise ValueError(
                f"daily shape of peak {self.peak} and valley {self.valley}: their mean is 1, so one"
                " lies above and one, not negative, below"
            )

    @property
    def highest(self) -> float:
        """Largest multiple of the mean load that any moment of the week has."""
        return self.peak * max(1.0, self.weekend)

    def at(self, time_s: float) -> float:
        """Return the multiple of the mean load at `time_s` seconds after Monday 00:00."""
        day = int(time_s // DAY_S) % 7
        factor = self.weekend if day >= 5 else 1.0
        if self.peak == self.valley:
            return factor
        turn = math.cos(2 * math.pi * (time_s / HOUR_S - self.peak_hour) / 24)
        sharpness = _sharpness((1 - self.valley) / (self.peak - self.valley))
        wave = math.pow((1 + turn) / 2, sharpness)
        return factor * (self.valley + (self.peak - self.valley) * wave)


@cache
def _sharpness(mean: float) -> float:
    """Return the k for which ((1 + cos) ÷ 2)^k has this mean over a day: Γ(k + ½) ÷ (√π Γ(k +
    1)).
    """
    low, high = 0.0, 1e4
    for _ in range(_BISECTIONS):
        k = (low + high) / 2
        found = math.exp(math.lgamma(k + 0.5) - math.lgamma(k + 1)) / math.sqrt(math.pi)
        low, high = (k, high) if found > mean else (low, k)
    return low


@checked_dataclass(frozen=True, slots=True, config=CHECKED)
class Bursts:
    """Shape of bursts, which are `ratio` times as dense as calm phases, for `share` of the time,
    and `length_s` long on the average.

    spread: deviation of the logarithm of their densities; 0 makes all of them alike.
    """

    ratio: Annotated[float, Field(ge=1)] = 1.0
    share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    length_s: Positive = 10.0
    spread: Annotated[float, Field(ge=0, le=_MAX_SPREAD)] = 0.0

    @property
    def calm_factor(self) -> float:
        """Rate of calm phases as a multiple of the mean rate."""
        return 1 / (1 - self.share + self.share * self.ratio)


@dataclass(frozen=True, slots=True)
class BurstyTraffic:
    """Workload of endless generated requests, `rate_per_s` on the average, in calm phases and
    bursts.

    start_s: seconds of the week at which the run begins. Raises ValueError for an impossible rate.
    """

    rate_per_s: float
    prompt: Amount
    output: Amount
    bursts: Bursts = field(default_factory=Bursts)
    day: DailyShape = field(default_factory=DailyShape)
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.rate_per_s < math.inf and 0 <= self.start_s < math.inf):
            raise ValueError(f"rate_per_s is {self.rate_per_s} from {self.start_s} s on")

    def requests(self, seed: int) -> Iterator[UserRequest]:
        """Yield requests in order of arrival without end, the same for the same seed."""
        rng = random.Random(f"rose-traffic/{seed}")  # noqa: S311 - a load, not a secret
        lengths = random.Random(f"rose-lengths/{seed}")  # noqa: S311 - as above
        highest = self.day.highest
        if highest == 0:
            return
        for begin_s, end_s, rate_per_s in self._phases(rng):
            at_s = begin_s
            # Thinning (Lewis and Shedler, 1979): candidates at the day's highest rate.
            while (at_s := at_s + rng.expovariate(rate_per_s * highest)) < end_s:
                if rng.random() * highest < self.day.at(self.start_s + at_s):
                    yield UserRequest(
                        at_s, whole(self.prompt, lengths), whole(self.output, lengths)
                    )

    def _phases(self, rng: random.Random) -> Iterator[tuple[float, float, float]]:
        """Yield (begin_s, end_s, mean rate per second) of calm phases and bursts in turn, without
        end.
        """
        bursts = self.bursts
        calm_s = bursts.length_s * (1 - bursts.share) / bursts.share
        bursting, begin_s = rng.random() < bursts.share, 0.0
        while True:
            end_s = begin_s + rng.expovariate(1 / (bursts.length_s if bursting else calm_s))
            factor = bursts.calm_factor * (bursts.ratio if bursting else 1.0)
            if bursting and bursts.spread:
                # A log-normal factor whose mean is 1.
                factor *= rng.lognormvariate(-(bursts.spread**2) / 2, bursts.spread)
            yield begin_s, end_s, self.rate_per_s * factor
            begin_s, bursting = end_s, not bursting


@checked_dataclass(frozen=True, slots=True, config=CHECKED)
class TraceTraffic:
    """Workload of recorded requests in a file in the Azure format, read while they are played.

    speed: factor by which requests arrive denser than recorded. repeat: play the trace again and
    again, without end. max_gap_s: longest time without requests. Prompts and answers longer than
    MAX_TOKENS are cut, as a gateway's limit would.
    """

    path: Path
    speed: Positive = 1.0
    repeat: bool = False
    max_gap_s: float = MAX_GAP_S

    def requests(self, seed: int) -> Iterator[UserRequest]:
        """Yield a file's requests in order of arrival, the same for every seed; with `repeat`
        without end.

        Raises RoseError, with file, line and key, for a file that is no such trace.
        """
        del seed
        base_s = 0.0
        while True:
            count, last_s = 0, 0.0
            for traced in stream_trace(self.path, self.max_gap_s, least_tokens=1):
                count, last_s = count + 1, traced.offset_s
                yield UserRequest(
                    base_s + traced.offset_s / self.speed,
                    min(MAX_TOKENS, traced.prompt_tokens),
                    min(MAX_TOKENS, traced.output_tokens),
                )
            if not self.repeat:
                return
            # Leave a mean gap before the repeated trace; 1 s if all its requests are at one moment.
            base_s += (last_s + (last_s / count or 1.0)) / self.speed


# Azure LLM inference trace 2023, code: its quantiles, and bursts as runs of windows of 2 s with
# more than half of the mean rate.
AZURE_CODE_2023 = BurstyTraffic(
    rate_per_s=2.57,
    prompt=Quantiles(
        ((0.0, 3), (0.05, 75), (0.1, 147), (0.25, 578), (0.5, 1_469), (0.75, 2_745),
         (0.9, 5_194), (0.95, 7_315), (0.99, 7_436), (1.0, 7_437))
    ),
    output=Quantiles(
        ((0.0, 6), (0.05, 6.5), (0.1, 7), (0.25, 9), (0.5, 13), (0.75, 24), (0.9, 55), (0.95, 90),
         (0.99, 252), (1.0, 1_899))
    ),
    bursts=Bursts(ratio=942, share=0.289, length_s=12.2, spread=0.44),
)  # fmt: skip
# Azure LLM inference trace 2023, conversation: medians as published with Splitwise (ISCA 2024).
AZURE_CONVERSATION_2023 = BurstyTraffic(
    rate_per_s=5.4,
    prompt=LogNormal(1_020, 0.5, least=2, most=14_050),
    output=LogNormal(129, 1.0, least=7, most=1_000),
    bursts=Bursts(1.5, 0.3, 60.0),
)
# Peak, mean and valley of a week of the same services, after DynamoLLM (HPCA 2025).
CODE_DAY = DailyShape(peak=2.6, valley=2.6 / 34.6, weekend=0.4)
CONVERSATION_DAY = DailyShape(peak=1.7, valley=1.7 / 3.3, weekend=0.8)
