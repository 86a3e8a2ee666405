"""How one range of weights became another: what of it is coded, wherever the weights are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from weight_transfer.tensors import Bits, WeightClass

Bytes: TypeAlias = NDArray[np.uint8]
CLASSES = 256


class Difference(Protocol):
    """The changes of one range, in host memory as far as they are asked for."""

    @property
    def count(self) -> int:
        """Changed weights."""

    @property
    def growth(self) -> int:
        """What the digest of the tensor grows by, mod 2^64."""

    @property
    def gaps(self) -> NDArray[np.uint32]:
        """Distance of each changed weight to the one before, less one."""

    @property
    def codes(self) -> Bits:
        """Zigzag coded ulp delta of each."""

    def class_counts(self, kind: WeightClass) -> NDArray[np.int64]:
        """Changed weights of each class, i64[CLASSES]."""

    def by_class(
        self, kind: WeightClass, ends: Bytes, present: Bytes, starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], Bits]:
        """Return (rank gaps, codes), sorted by class, see `kernels.classes`.

        `ends` u8: lowest, first, last, highest class; those that lie between two of a side are one.
        `present` u8[k]: classes that hold all changes then, ascending; `starts`: where each begins,
        may be used up.
        """


@dataclass(frozen=True, slots=True)
class Marks:
    """The changes of a crowded range: a bit for each weight, codes, growth of the digest."""

    bitmap: Bytes
    codes: Bits
    growth: int
