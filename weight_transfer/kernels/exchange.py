"""Exchanging weights where they are: old values for new ones, and back.

stage   while serving: what is exchanged is brought to the weights' memory; nothing is written
run     under the engine's pause: compare with the old, write the new, read back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from weight_transfer.tensors import Bits

RangeT = TypeVar("RangeT")
Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Change(Generic[RangeT]):
    """At distinct `places` i64[n] of `target` the weights `old` [n] become `new` [n]."""

    target: RangeT
    places: Int64s
    old: Bits
    new: Bits


class Exchange(Protocol):
    """Changes that are where their targets are."""

    def run(self, *, back: bool = False) -> Int64s:
        """Write all new values, or all old ones `back`; running it again is harmless.

        Returns i64[changes, 2]: 0 when all that was overwritten was what it should have been, 0
        when all of it reads as it was written. Bits say more than sums of them.
        """


def check_places(changes: Sequence[Change[RangeT]], sizes: Sequence[int]) -> None:
    """Raise IndexError for a place outside of its target, which has so many weights."""
    for change, size in zip(changes, sizes, strict=True):
        places = change.places
        if places.size and (int(places.min()) < 0 or int(places.max()) >= size):
            raise IndexError(f"a change lies outside its {size} weights; stage the update again")
