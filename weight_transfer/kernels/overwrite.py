"""Overwriting live weights, and what can be read there afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class Written:
    """Sums of the digest, mod 2^64, over what was there and over what was read back.

    `wrong`: weights that do not read as they were written.
    """

    lost: int
    gained: int
    wrong: int

    @property
    def growth(self) -> int:
        """What the digest grows by, mod 2^64."""
        return (self.gained - self.lost) % _MODULUS


class Overwrite(Protocol):
    """Absolute values for places in one target, which lie where the target does."""

    def run(self) -> Written:
        """Overwrite and read back; running it again is harmless."""


def check_places(places: NDArray[np.int64], size: int) -> None:
    """Raise IndexError for a place outside a target of `size` weights."""
    if places.size and (int(places.min()) < 0 or int(places.max()) >= size):
        raise IndexError(f"a change lies outside its {size} weights; stage the update again")
