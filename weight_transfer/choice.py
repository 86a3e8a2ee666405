"""Which level is done first on a link: tried on a sample, since both depend on what changed."""

from __future__ import annotations

import time
from collections.abc import Callable

from weight_transfer.codec import Level, encode_payload
from weight_transfer.tensors import TensorBits

SAMPLE_BYTES = 8 << 20
_WARM_UP_BYTES = 1 << 16


def quicker_level(
    old: TensorBits,
    new: TensorBits,
    link_bytes_s: float,
    threads: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Level:
    """The level with which this tensor's update has crossed the link first.

    Encoding goes on while earlier chunks are sent, so the slower of the two counts. FAST where they
    are as quick: it asks less of the receiver.
    """
    return min(Level, key=lambda level: _seconds(old, new, level, link_bytes_s, threads, clock))


def _seconds(
    old: TensorBits,
    new: TensorBits,
    level: Level,
    link_bytes_s: float,
    threads: int,
    clock: Callable[[], float],
) -> float:
    def encode(size: int) -> int:
        part = slice(0, size // old.bits.itemsize)
        return encode_payload(old.bits[part], new.bits[part], old.weight_class, level).size

    encode(_WARM_UP_BYTES)  # Compiling is paid once, not for each update.
    began_s = clock()
    sent = encode(SAMPLE_BYTES)
    return max((clock() - began_s) / threads, sent / link_bytes_s)
