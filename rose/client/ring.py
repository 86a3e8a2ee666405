"""Which gateway a session talks to: the same one as long as it answers, so prefixes stay known.

Rendezvous hashing: every process computes the same order from addresses and session alone, and
the sessions of a dead gateway spread over all others.
"""

from collections.abc import Sequence
from hashlib import blake2b

REST_S = 2.0


class GatewayRing:
    """Addresses of all gateways and which of them failed lately. Times are monotonic seconds."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)
        self._resting_until_s: dict[str, float] = {}

    def order(self, key: str, now_s: float) -> list[str]:
        """All gateways in the order in which `key` should try them; those that rest come last."""
        if len(self._urls) == 1:
            return [*self._urls]
        by_weight = sorted(self._urls, key=lambda url: _weight(url, key), reverse=True)
        return sorted(by_weight, key=lambda url: self._resting_until_s.get(url, 0.0) > now_s)

    def failed(self, url: str, now_s: float) -> None:
        """A gateway did not answer: for `REST_S` the others are tried first."""
        self._resting_until_s[url] = now_s + REST_S

    def answered(self, url: str) -> None:
        """A gateway answered: it is as good as any."""
        self._resting_until_s.pop(url, None)


def _weight(url: str, key: str) -> bytes:
    return blake2b(f"{url}\0{key}".encode(), digest_size=8).digest()
