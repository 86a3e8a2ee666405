"""Silence of a peer that sends regularly, counted only while this process listened.

A pause of this process says nothing about the peer: its messages wait to be read.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
# Looks at the clock within the limit; a gap of PAUSE_LOOKS of them was a pause of this process.
LOOKS = 10
PAUSE_LOOKS = 2


class Silence:
    """Count of the seconds since a peer's last message in which this process was listening."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self.look_s = limit_s / LOOKS
        self._limit_s = limit_s
        self._clock = clock
        self._looked_s = self._clock()
        self._doubtful_until_s = self._before_pause_s = self._looked_s
        self.heard()

    def heard(self) -> None:
        """Record a message of the peer: its silence begins anew.

        One that is read just after a pause of this process may have waited for its end: it counts
        as old as the pause.
        """
        now_s = self._looked()
        self._silent_s = 0.0
        self._heard_s = self._before_pause_s if now_s < self._doubtful_until_s else now_s

    def look(self) -> None:
        """Add the time since the last call to the silence; a gap longer than PAUSE_LOOKS looks was
        a pause of this process and counts as that many.

        Call it every `look_s` seconds.
        """
        before_s = self._looked_s
        self._silent_s += min(self._looked() - before_s, PAUSE_LOOKS * self.look_s)

    def _looked(self) -> float:
        """Return the present time, and note a pause since the last call."""
        before_s, self._looked_s = self._looked_s, self._clock()
        if self._looked_s - before_s > PAUSE_LOOKS * self.look_s:
            self._before_pause_s = before_s
            self._doubtful_until_s = self._looked_s + PAUSE_LOOKS * self.look_s
        return self._looked_s

    @property
    def too_long(self) -> bool:
        """True if the peer was silent for `limit_s` seconds in which this process was listening."""
        return self._silent_s >= self._limit_s

    @property
    def outdated(self) -> bool:
        """True if `limit_s` seconds have passed since the peer's last message, whether this process
        listened or not.
        """
        return self._looked_s - self._heard_s >= self._limit_s


async def read_unless_silent(
    read: Awaitable[T],
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    expected: Callable[[], bool] = lambda: True,
    look: Callable[[], None] = lambda: None,
) -> T:
    """Return the result of a read. Cancel it and raise TimeoutError after `limit_s` seconds of
    silence.

    expected: True while a message is due; silence counts only then. look: called every `limit_s /
    LOOKS` and before the return; an error that it raises ends the read.
    """
    silence, reading = Silence(limit_s, clock), asyncio.ensure_future(read)
    try:
        while True:
            look()
            if reading.done():
                return reading.result()
            silence.look()
            if not expected():
                silence.heard()
            if silence.too_long:
                raise TimeoutError
            await asyncio.wait({reading}, timeout=silence.look_s)
    finally:
        reading.cancel()
