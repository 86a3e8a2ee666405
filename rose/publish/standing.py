"""How well each source has served: who fails, lies or dawdles is asked later. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
CORRUPT_PAUSE_S = 300.0
# Slower than the origin by more is worth asking it.
SLOW_SHARE = 0.1
_WEIGHT = 0.3


@dataclass(slots=True)
class _Record:
    rate: float = 0.0
    strikes: int = 0
    until_s: float = 0.0


class Standing:
    """Of all sources of one receiver; the clock is handed in."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def ordered(self, sources: Sequence[str], now_s: float) -> list[str]:
        """The same sources; those that are avoided now come last, the first to be free first."""
        until = {source: self._of(source).until_s for source in sources}
        good = [source for source in sources if until[source] <= now_s]
        return good + sorted((s for s in sources if until[s] > now_s), key=lambda s: until[s])

    def served(self, source: str, size: int, seconds: float) -> None:
        """It sent so many bytes in that time."""
        record = self._of(source)
        rate = size / max(seconds, 1e-6)
        record.rate = rate if not record.rate else record.rate + _WEIGHT * (rate - record.rate)
        record.strikes = 0

    def failed(self, source: str, now_s: float) -> None:
        """It refused, went silent or broke off."""
        record = self._of(source)
        record.until_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**record.strikes)
        record.strikes += 1

    def corrupt(self, source: str, now_s: float) -> None:
        """What it sent is not what was asked for."""
        record = self._of(source)
        record.until_s = now_s + CORRUPT_PAUSE_S
        record.strikes += 1

    def dawdles(self, source: str, rate: float, origin: str) -> bool:
        """Whether the origin is known to be so much faster that asking it pays.

        Neighbours' speed says nothing: they may have had the chunk, this source waits for it.
        """
        return source != origin and rate < SLOW_SHARE * self._of(origin).rate

    def _of(self, source: str) -> _Record:
        return self._records.setdefault(source, _Record())
