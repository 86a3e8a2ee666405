"""How many guests a job may lease: grows by one, halves when hosts take them back.

Hosts share their load: where one takes its guest back, others are about to. As in TCP (Chiu and
Jain 1989), additive increase and multiplicative decrease let all jobs find the level without
anybody telling it. Nothing that is held is given back for it; only growth waits.
"""

import math

GROW_S = 5.0
# Revocations this close together are one event.
EVENT_S = 5.0


class Allowance:
    """Unlimited until the first revocation. Times are monotonic seconds, handed in."""

    def __init__(self, grow_s: float = GROW_S, event_s: float = EVENT_S) -> None:
        self._grow_s = grow_s
        self._event_s = event_s
        self._limit = math.inf
        self._changed_s = -math.inf
        self._halved_s = -math.inf

    def limit(self, now_s: float) -> float:
        """Guests that may be held at `now_s`, at least 1."""
        if math.isinf(self._limit):
            return self._limit
        steps = math.floor((now_s - self._changed_s) / self._grow_s)
        if steps > 0:
            self._limit += steps
            self._changed_s += steps * self._grow_s
        return self._limit

    def revoked(self, held: int, now_s: float) -> None:
        """A host took a guest back; `held` is what the job held before."""
        if now_s < self._halved_s + self._event_s:
            return
        self._limit = max(1.0, min(self.limit(now_s), float(held)) / 2)
        self._changed_s = self._halved_s = now_s
