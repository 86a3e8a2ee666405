"""Predictors of the router: prefix affinity, output length and decode rate.

`PrefixAffinity` remembers which replica caches a trajectory's prefix.

`LengthPredictor` predicts output lengths. A token budget is a limit, not a forecast: most turns end
far below it. The most specific history that has enough samples decides: the trajectory's last
turns, then the prompt's other samples, then the job's quantile.

`RateMeter` measures a replica's decode rate from tokens as they arrive.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass

from elastic_scheduler.names import kept_name

TRAJECTORIES_KEPT = 131_072


@dataclass(frozen=True, slots=True)
class Prefix:
    """`tokens` of a trajectory are cached by `replica`, made under policy `version`."""

    replica: str
    tokens: int
    version: int


class PrefixAffinity:
    """The last holder of each trajectory; those not seen for longest are forgotten first."""

    def __init__(self, capacity: int = TRAJECTORIES_KEPT) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; keep at least one trajectory")
        self._capacity = capacity
        self._held: OrderedDict[str, Prefix] = OrderedDict()

    def note(self, session: str, prefix: Prefix) -> None:
        """The trajectory's latest turn ended on a replica."""
        name = kept_name(session)
        self._held[name] = prefix
        self._held.move_to_end(name)
        if len(self._held) > self._capacity:
            self._held.popitem(last=False)

    def find(self, session: str) -> Prefix | None:
        """What is known of a trajectory; its holder may have changed versions since."""
        return self._held.get(kept_name(session))

    def forget(self, session: str) -> None:
        """The trajectory is over."""
        self._held.pop(kept_name(session), None)

    def __len__(self) -> int:
        return len(self._held)


JOB_SAMPLES = 512
JOBS_KEPT = 64
NAMES_KEPT = 131_072
# Below this many samples a quantile says little: the budget stands in.
ENOUGH_OF_JOB = 32
ENOUGH_OF_GROUP = 3
EXPECTED_QUANTILE = 0.7
LONG_QUANTILE = 0.9
# Weight of the newest turn: lengths of one trajectory or prompt go together, but not closely.
NEWEST_SHARE = 0.5


class QuantileWindow:
    """Quantiles of the newest `size` integers."""

    __slots__ = ("_order", "_size", "_sorted")

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, value: int) -> None:
        """Take a value; the oldest one leaves a full window."""
        if len(self._order) >= self._size:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(value)
        insort(self._sorted, value)

    def quantile(self, q: float) -> int:
        """The smallest value that a share `q` of the window does not exceed; 0 of nothing."""
        if not self._sorted:
            return 0
        return self._sorted[min(len(self._sorted) - 1, int(q * len(self._sorted)))]

    def __len__(self) -> int:
        return len(self._sorted)


class LengthPredictor:
    """Output lengths seen, in tokens; memory is bounded, what is oldest is forgotten."""

    def __init__(self, names_kept: int = NAMES_KEPT) -> None:
        self._names_kept = names_kept
        self._jobs: OrderedDict[str, QuantileWindow] = OrderedDict()
        # By ("s", session) or ("g", group, job): (samples, weighted mean).
        self._means: OrderedDict[tuple[str, ...], tuple[int, float]] = OrderedDict()

    def observe(self, job: str, session: str, group: str, tokens: int) -> None:
        """A turn was finished with `tokens` of output."""
        window = self._jobs.get(job)
        if window is None:
            window = self._jobs[job] = QuantileWindow(JOB_SAMPLES)
            if len(self._jobs) > JOBS_KEPT:
                self._jobs.popitem(last=False)
        window.add(tokens)
        for key in (_of_session(session), _of_group(group, job)):
            if key[1]:
                count, mean = self._means.get(key, (0, float(tokens)))
                mean += NEWEST_SHARE * (tokens - mean)
                self._means[key] = (count + 1, mean)
                self._means.move_to_end(key)
        while len(self._means) > self._names_kept:
            self._means.popitem(last=False)

    def forget(self, session: str) -> None:
        """The trajectory is over."""
        self._means.pop(_of_session(session), None)

    def __len__(self) -> int:
        """Trajectories and groups with a mean."""
        return len(self._means)

    def expected(self, job: str, session: str, group: str, budget_tokens: int) -> int:
        """Tokens that a turn will likely make: from 1 to its budget."""
        count, mean = self._means.get(_of_session(session), (0, 0.0)) if session else (0, 0.0)
        if not count and group:
            count, mean = self._means.get(_of_group(group, job), (0, 0.0))
            if count < ENOUGH_OF_GROUP:
                count = 0
        window = self._jobs.get(job)
        if not count and (window is None or len(window) < ENOUGH_OF_JOB):
            return budget_tokens
        if not count and window is not None:
            mean = window.quantile(EXPECTED_QUANTILE)
        return max(1, min(budget_tokens, round(mean)))

    def is_long(self, job: str, expected_tokens: int) -> bool:
        """Whether a turn of that length is among the longest tenth of its job's."""
        window = self._jobs.get(job)
        if window is None or len(window) < ENOUGH_OF_JOB:
            return False
        return expected_tokens >= window.quantile(LONG_QUANTILE) > window.quantile(0.5)


def _of_session(session: str) -> tuple[str, ...]:
    return ("s", kept_name(session))


def _of_group(group: str, job: str) -> tuple[str, ...]:
    return ("g", kept_name(group), kept_name(job))


BUSY_TAU_S = 1.0
# A host's bursts last tenths of a second: a guest that was slow a moment ago is likely free again.
IDLE_TAU_S = 0.3


class RateMeter:
    """Exponentially weighted tokens per second, over the time in which the replica has turns.

    A gated guest sends nothing while its host is busy, so its rate falls within `BUSY_TAU_S`.
    Without turns there is nothing to measure: the rate drifts back to the offered one, so that a
    replica that was slow once is tried again.
    """

    __slots__ = ("_busy", "_offered_tok_s", "_pending", "_rate_tok_s", "_since_s")

    def __init__(self, offered_tok_s: float, now_s: float) -> None:
        self._offered_tok_s = offered_tok_s
        self._rate_tok_s = offered_tok_s
        self._since_s = now_s
        self._pending = 0
        self._busy = False

    def set_offered(self, offered_tok_s: float) -> None:
        """Take the node's newer figure as what an idle replica is expected to do."""
        self._offered_tok_s = offered_tok_s

    def add(self, tokens: int) -> None:
        """Count tokens that arrived since the last reading."""
        self._pending += tokens

    def set_busy(self, busy: bool, now_s: float) -> None:
        """Whether the replica has turns from now on."""
        self.tok_s(now_s)
        self._busy = busy

    def tok_s(self, now_s: float) -> float:
        """The rate at `now_s`; silence since the last token counts against it."""
        elapsed_s = now_s - self._since_s
        if elapsed_s <= 0:
            return self._rate_tok_s
        if self._busy:
            target, tau_s = self._pending / elapsed_s, BUSY_TAU_S
        else:
            target, tau_s = self._offered_tok_s, IDLE_TAU_S
        self._rate_tok_s += (target - self._rate_tok_s) * -math.expm1(-elapsed_s / tau_s)
        self._since_s = now_s
        self._pending = 0
        return self._rate_tok_s
