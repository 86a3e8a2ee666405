"""Distributions of token counts and times: by a table of quantiles, or log-normal.

Each is sampled with a generator that the caller seeds, and has a mean, which the fluid model
uses.
"""

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol


class Amount(Protocol):
    """Protocol of a distribution of amounts above 0, such as tokens, seconds or turns."""

    @property
    def mean(self) -> float:
        """Expected value of an amount."""
        ...

    def sample(self, rng: random.Random) -> float:
        """Return one random amount, drawn with the caller's generator."""
        ...


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Distribution given by its quantiles: pairs (fraction, amount) from fraction 0 to 1, with
    rising amounts.

    Between two of them the logarithm is uniform, so that a published table of percentiles is
    sampled without a guess at its shape. Raises ValueError for a table that is not such.
    """

    table: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        fractions = [fraction for fraction, _ in self.table]
        amounts = [amount for _, amount in self.table]
        whole = len(self.table) > 1 and (fractions[0], fractions[-1]) == (0, 1)
        rising = sorted(set(fractions)) == fractions and sorted(amounts) == amounts
        if not (whole and rising and amounts[0] > 0 and amounts[-1] < math.inf):
            raise ValueError("quantiles: give fractions from 0 to 1, and finite amounts that rise")

    @property
    def mean(self) -> float:
        """Expected value of an amount: the sum over all pieces of (b − a) ÷ ln(b ÷ a), each
        weighted by its share.
        """
        total = 0.0
        for (p, a), (q, b) in zip(self.table, self.table[1:], strict=False):
            total += (q - p) * ((b - a) / math.log(b / a) if b > a else a)
        return total

    def sample(self, rng: random.Random) -> float:
        """Return one random amount, by the inverse of the distribution."""
        u = rng.random()
        at = bisect_right(self.table, u, key=lambda point: point[0])
        (p, a), (q, b) = self.table[at - 1], self.table[at]
        return float(a * math.exp(math.log(b / a) * (u - p) / (q - p)))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution around `median`, whose logarithm has the deviation `sigma`, cut to
    least..most.

    Token counts of prompts, answers and tools have such tails. Raises ValueError for impossible
    figures.
    """

    median: float
    sigma: float
    least: float = 1.0
    most: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.median <= self.most or math.isinf(self.median):
            raise ValueError(f"median is {self.median}; give {self.least:g} to {self.most:g}")
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma is {self.sigma}; give 0 or more")

    @property
    def mean(self) -> float:
        """Expected value with both cuts: what lies beyond a cut counts as the cut."""
        if self.sigma == 0:
            return self.median
        low, high = self._z(self.least), self._z(self.most)
        middle = self.median * math.exp(self.sigma**2 / 2)
        inside = _normal(high - self.sigma) - _normal(low - self.sigma)
        above = 0.0 if math.isinf(self.most) else self.most * (1 - _normal(high))
        return self.least * _normal(low) + middle * inside + above

    def sample(self, rng: random.Random) -> float:
        """Return one random amount."""
        drawn = self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))
        return min(self.most, max(self.least, drawn))

    def _z(self, amount: float) -> float:
        if amount <= 0 or math.isinf(amount):
            return -math.inf if amount <= 0 else math.inf
        return math.log(amount / self.median) / self.sigma


def _normal(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def whole(amount: Amount, rng: random.Random) -> int:
    """Return one random amount rounded to a whole number, at least 1."""
    return max(1, round(amount.sample(rng)))
