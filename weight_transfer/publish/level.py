"""Choice of the level at which a version is encoded: the one that crosses the link first.

`quicker_level` picks it for a link by encoding a sample, since speed and size both depend on which
weights changed.

`LinkMeter` measures how fast readers take what a publisher sends; the clock is handed in.

A reader asks for its next chunk when it has one, several at once: so a burst, from its first
request on to its last answer, lasts as long as the link needs for it. Short bursts fit into the
kernel's buffers and say nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal, TypeAlias

import numpy as np

from weight_transfer import TensorBits
from weight_transfer.format.delta_codec import Level, encode_payload

AUTO: Final = "auto"
LevelChoice: TypeAlias = Literal["auto", "fast", "compact"]
SAMPLE_BYTES = 8 << 20
_WARM_UP_BYTES = 1 << 16
_MOST_LOOKED_AT = 16
BURST_BYTES = 8 << 20
PAUSE_S = 0.25
"""Seconds without a reply being sent after which a peer's next request begins a burst."""
FRESH_S = 3_600.0
MOST_PEERS = 256


def quicker_level(
    old: TensorBits,
    new: TensorBits,
    link_bytes_s: float,
    threads: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Level:
    """Return the codec level with which a tensor's update would cross a link first, by a sample.

    Encoding runs while earlier chunks are sent, so the slower of encoding (on `threads` threads)
    and sending counts. Level.FAST when both levels are equal.
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


def level_for(
    choice: LevelChoice,
    link_bytes_s: float | None,
    old: Mapping[str, TensorBits],
    new: Mapping[str, TensorBits],
    clock: Callable[[], float] = time.perf_counter,
) -> Level:
    """Return the codec level for the step from `old` to `new`.

    `link_bytes_s` is the rate of readers. With `auto` both levels encode a sample of the largest
    changed tensor, and the level that is done first is returned; FAST while no rate was measured or
    nothing changed. Raises ValueError for an unknown choice.
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
    """Return (old, new) of the largest tensor whose first weights changed, None if none of 16
    did."""
    by_size = sorted(old, key=lambda name: -old[name].bits.nbytes)
    for name in by_size[:_MOST_LOOKED_AT]:
        count = SAMPLE_BYTES // old[name].bits.itemsize
        if not np.array_equal(old[name].bits[:count], new[name].bits[:count]):
            return old[name], new[name]
    return None


@dataclass(slots=True)
class _Peer:
    """State of a reader's burst. `open`: replies being sent.

    `bytes_per_s`: rate of the last long burst.
    """

    began_s: float
    ended_s: float
    open: int = 0
    size: int = 0
    bytes_per_s: float | None = None


class LinkMeter:
    """Meter of the rate at which readers take replies, for the MOST_PEERS most recent readers."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def began(self, peer: str, now_s: float) -> None:
        """Record that a reply to a peer starts; after a pause of PAUSE_S it begins a new burst."""
        known = self._peers.setdefault(peer, _Peer(now_s, now_s))
        self._peers.move_to_end(peer)
        if not known.open and now_s - known.ended_s > PAUSE_S:
            known.began_s, known.size = now_s, 0
        known.open += 1
        while len(self._peers) > MOST_PEERS:
            self._peers.popitem(last=False)

    def ended(self, peer: str, size: int, now_s: float) -> None:
        """Record that a reply to a peer has ended after `size` bytes; 0 for one that broke off."""
        known = self._peers.get(peer)
        if known is None or not known.open:
            return
        known.open -= 1
        known.size += size
        known.ended_s = now_s
        if known.size >= BURST_BYTES and now_s > known.began_s:
            known.bytes_per_s = known.size / (now_s - known.began_s)

    def bytes_per_s(self, now_s: float) -> float | None:
        """Return the median rate of peers that were served within the last hour, None without
        any."""
        fresh = (peer for peer in self._peers.values() if now_s - peer.ended_s <= FRESH_S)
        known = [peer.bytes_per_s for peer in fresh if peer.bytes_per_s is not None]
        return median(known) if known else None
