"""Says that a limit bites when it begins to, and when it is over; nothing for each time between.

quiet ── bites ──► said once ── nothing for `QUIET_S` ──► said how often, quiet again
"""

from collections.abc import Callable
from dataclasses import dataclass

QUIET_S = 10.0


@dataclass(slots=True)
class _Bout:
    times: int
    last_s: float


class LimitLog:
    """The limits of one gateway by the names of their options; `clock` gives monotonic seconds.

    `say` is called as `say(event, limit=…, times=…)`.
    """

    def __init__(self, say: Callable[..., None], clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._bouts: dict[str, _Bout] = {}

    def bites(self, limit: str, times: int = 1) -> None:
        """Something was refused or closed for a limit's sake."""
        bout = self._bouts.get(limit)
        if bout is None:
            self._bouts[limit] = _Bout(times, self._clock())
            self._say("limit_reached", limit=limit, times=times)
            return
        bout.times += times
        bout.last_s = self._clock()

    def sweep(self) -> None:
        """Say which limits bite no longer."""
        now_s = self._clock()
        for limit, bout in list(self._bouts.items()):
            if now_s - bout.last_s > QUIET_S:
                del self._bouts[limit]
                self._say("limit_over", limit=limit, times=bout.times)
