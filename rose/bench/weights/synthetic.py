"""Synthetic bf16 training steps like Adam's: small weights flip more often than large ones."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.format.tensors import TensorBits

WEIGHT_DEVIATION = 0.02
_SAMPLE = (256, 1024)


@dataclass(frozen=True, slots=True)
class Step:
    """One tensor before and after a step."""

    old: TensorBits
    new: TensorBits

    @property
    def changed(self) -> int:
        """Weights that differ."""
        return int((self.old.bits != self.new.bits).sum())

    @property
    def density(self) -> float:
        """The share of them."""
        return self.changed / self.old.bits.size


def bf16(values: NDArray[np.float32]) -> NDArray[np.unsignedinteger[Any]]:
    """Bits of float32 values, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def adam_step(rows: int, columns: int, rate: float, seed: int) -> Step:
    """Weights [rows, columns] of deviation 0.02, masters in float32, updates of about `rate`.

    An update is the rate times a normal variable cut at 3: Adam's is its first moment over the root
    of its second.
    """
    rng = np.random.default_rng(seed)
    size = rows * columns
    master = rng.standard_normal(size, np.float32) * np.float32(WEIGHT_DEVIATION)
    update = np.clip(rng.standard_normal(size, np.float32), -3, 3) * np.float32(rate)
    shape = (rows, columns)
    return Step(
        TensorBits("w", "bfloat16", shape, bf16(master)),
        TensorBits("w", "bfloat16", shape, bf16(master - update)),
    )


def rate_for(density: float, seed: int = 0) -> float:
    """The rate at which such a step changes this share of the weights (found by bisection)."""
    low, high = 1e-9, 1.0
    for _ in range(40):
        rate = (low * high) ** 0.5
        if adam_step(*_SAMPLE, rate, seed).density < density:
            low = rate
        else:
            high = rate
    return high
