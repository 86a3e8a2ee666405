"""The level at which a version is encoded: the one with which it has crossed the link first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias

import numpy as np

from weight_transfer import TensorBits
from weight_transfer.files.diff import SAMPLE_BYTES, quicker_level
from weight_transfer.format.codec import Level

AUTO: Final = "auto"
LevelChoice: TypeAlias = Literal["auto", "fast", "compact"]
_MOST_LOOKED_AT = 16


def level_for(
    choice: LevelChoice,
    link_bytes_s: float | None,
    old: Mapping[str, TensorBits],
    new: Mapping[str, TensorBits],
    clock: Callable[[], float] = time.perf_counter,
) -> Level:
    """Return the level for the step from `old` to `new`; `link_bytes_s` is what readers take.

    With `auto` both levels encode a sample of the largest tensor that changed, and the slower of
    encoding and sending decides. FAST while no link was measured. ValueError for no choice.
    """
    if choice != AUTO:
        return Level(choice)
    if link_bytes_s is None:
        return Level.FAST
    sample = _sample(old, new)
    if sample is None:
        return Level.FAST
    return quicker_level(*sample, link_bytes_s, 1, clock)


def _sample(
    old: Mapping[str, TensorBits], new: Mapping[str, TensorBits]
) -> tuple[TensorBits, TensorBits] | None:
    """The largest tensor whose first weights changed, among the largest ones."""
    by_size = sorted(old, key=lambda name: -old[name].bits.nbytes)
    for name in by_size[:_MOST_LOOKED_AT]:
        count = SAMPLE_BYTES // old[name].bits.itemsize
        if not np.array_equal(old[name].bits[:count], new[name].bits[:count]):
            return old[name], new[name]
    return None
