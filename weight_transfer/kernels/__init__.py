"""Kernels over every weight: compiled loops, by numba on the CPU and by Triton on a GPU.

They know arrays of unsigned integers and nothing of chunks or formats. All run without the GIL, so
that threads work on chunks side by side; none of them allocates more than its caller handed in,
beyond some KiB. Backends are imported on first use: compilers are slow to import.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from weight_transfer.errors import TensorFormatError
from weight_transfer.format.tensors import Bits
from weight_transfer.kernels.backend import Processor
from weight_transfer.kernels.triton.device_bits import DeviceBits

Flat: TypeAlias = Bits | DeviceBits
"""Flat weights, wherever they are."""


def processor_of(*ranges: Flat) -> Processor[Any]:
    """Return the processor that works where all `ranges` are; TensorFormatError for several."""
    places = {"the host" if isinstance(bits, np.ndarray) else bits.place for bits in ranges}
    if len(places) > 1:
        raise TensorFormatError(
            f"weights to be compared are on {' and '.join(sorted(places))}; put both on one"
        )
    if isinstance(ranges[0], np.ndarray):
        from weight_transfer.kernels.cpu.backend import CPU

        return CPU
    from weight_transfer.kernels.triton.backend import DEVICE

    return DEVICE
