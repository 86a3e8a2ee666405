"""Choice of the peer to fetch from: by hashing of names, and by each peer's scores. No IO.

`order` is rendezvous hashing: which member of a cluster takes which object over the slow link.
Every member computes the same order from the names alone. Without one of them the order of the
others stays: objects that a dead member had not finished fall to the next one, and nothing else
moves.

`Route` lists the peers that a node asks for an object, and which objects it may ask of each:

    before   members before this one in the object's order: they fetch it when asked
    holders  the next after it: they give what they have, or what comes to them from the origin
    origin   last

A member that was away asks the holders, so that objects which crossed the slow link meanwhile do
not cross it again. A member that takes an object from a holder gives nothing of it to others, so no
circle can form.

`PeerScores` ranks peers by failures, corrupt chunks and throughput: bad ones are asked later.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import blake3

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
CORRUPT_PAUSE_S = 300.0
# Slower than the origin by more is worth asking it.
SLOW_SHARE = 0.1
# Less says nothing of a rate: buffers on the way take it at once.
LEAST_SAMPLE_BYTES = 1 << 18
_MOST_SAMPLES = 16
_MOST_SOURCES = 4_096


@dataclass(slots=True)
class _Record:
    strikes: int = 0
    until_s: float = 0.0
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))


class PeerScores:
    """Scores of all sources of one receiver; the clock is handed in."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def ordered(self, sources: Sequence[str], now_s: float) -> list[str]:
        """The same sources; avoided ones come last, the one that is avoided least long first."""
        until = {source: self._of(source).until_s for source in sources}
        good = [source for source in sources if until[source] <= now_s]
        return good + sorted((s for s in sources if until[s] > now_s), key=lambda s: until[s])

    def served(self, source: str, size: int, seconds: float, now_s: float) -> None:
        """Record a source that sent `size` bytes in `seconds` until now."""
        record = self._of(source)
        record.strikes = 0
        if size >= LEAST_SAMPLE_BYTES:
            record.samples.append((now_s, size / max(seconds, 1e-6)))

    def failed(self, source: str, now_s: float) -> None:
        """Record a source that refused, went silent or broke off."""
        record = self._of(source)
        record.until_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**record.strikes)
        record.strikes += 1

    def corrupt(self, source: str, now_s: float) -> None:
        """Record a source that sent other bytes than the requested ones."""
        record = self._of(source)
        record.until_s = now_s + CORRUPT_PAUSE_S
        record.strikes += 1

    def dawdles(self, source: str, rate: float, origin: str, since_s: float) -> bool:
        """Return True if the origin was so much faster since `since_s` that asking it pays.

        Only what the origin sent meanwhile counts: a chunk's share of the slow link depends on how
        many share it. A neighbour's speed counts for nothing: it may have had the chunk that this
        source waits for.
        """
        meanwhile = [rate for at_s, rate in self._of(origin).samples if at_s > since_s]
        return source != origin and bool(meanwhile) and rate < SLOW_SHARE * min(meanwhile)

    def _of(self, source: str) -> _Record:
        if source not in self._records and len(self._records) >= _MOST_SOURCES:
            del self._records[next(iter(self._records))]
        return self._records.setdefault(source, _Record())


def order(members: Iterable[str], name: str) -> list[str]:
    """Members by how much `name` is theirs, the first one most; each member once."""
    return sorted(set(members), key=lambda member: _weight(member, name), reverse=True)


def _weight(member: str, name: str) -> bytes:
    digest: bytes = blake3.blake3(f"{member}\0{name}".encode()).digest()
    return digest


# Members that took over while this one was away are next in the order.
MOST_HOLDERS = 2


@dataclass(frozen=True, slots=True)
class Route:
    """Route of an object: the addresses to ask for it, each once."""

    before: tuple[str, ...]
    holders: tuple[str, ...]
    origin: str

    @property
    def sources(self) -> tuple[str, ...]:
        """All of them, in the order in which they are asked."""
        return (*self.before, *self.holders, self.origin)

    @classmethod
    def of(cls, name: str, me: str, members: Iterable[str], origin: str) -> "Route":
        """Return the route of an object; `me` is empty for a node that relays nothing."""
        if not me:
            return cls(tuple(order(members, name)), (), origin)
        everyone = order({*members, me}, name)
        at = everyone.index(me)
        after = everyone[at + 1 : at + 1 + MOST_HOLDERS]
        return cls(tuple(everyone[:at]), tuple(after), origin)
