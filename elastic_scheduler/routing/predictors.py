"""Predictors of the router: cached prefixes, output length and decode rate.

`PrefixAffinity` remembers which replica caches a trajectory's prefix, `SharedPrefixes` which ones
cache the first tokens of a prompt whose caller names no trajectory.

`LengthPredictor` predicts output lengths. A token budget is a limit, not a forecast: most turns end
far below it. The most specific history that has enough samples decides: the trajectory's last
turns, then the prompt's other samples, then the job's quantile.

`RateMeter` measures a replica's decode rate from tokens as they arrive.
"""

import math
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

MAX_KEPT_CHARS = 64
TRAJECTORIES_KEPT = 131_072
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
BUSY_TAU_S = 1.0
# A host's bursts last tenths of a second: a guest that was slow a moment ago is likely free again.
IDLE_TAU_S = 0.3
BLOCK_TOKENS = 64
_BLOCK_BYTES = 4 * BLOCK_TOKENS
# A shorter prompt is computed as fast as it is looked for.
LEAST_BLOCKS = 2
# A longer prompt is known by its beginning.
MOST_BLOCKS = 1_024
LAST_BLOCKS = 4
PREFIXES_KEPT = 65_536
HOLDERS_KEPT = 4


def kept_name(name: str) -> str:
    """Return the name, or a hash of 32 characters for a name of more than 64."""
    if len(name) <= MAX_KEPT_CHARS:
        return name
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached prefix: `replica` has the KV of `tokens` tokens, made under policy `version`."""

    replica: str
    tokens: int
    version: int


class PrefixAffinity:
    """The replica that last ran each trajectory's turn; the least recent ones are dropped."""

    def __init__(self, capacity: int = TRAJECTORIES_KEPT) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; keep at least one trajectory")
        self._capacity = capacity
        self._held: OrderedDict[str, Prefix] = OrderedDict()

    def note(self, session: str, prefix: Prefix) -> None:
        """Record the replica and prefix on which the trajectory's latest turn ended."""
        name = kept_name(session)
        self._held[name] = prefix
        self._held.move_to_end(name)
        if len(self._held) > self._capacity:
            self._held.popitem(last=False)

    def find(self, session: str) -> Prefix | None:
        """Return a trajectory's last prefix, None if unknown; its replica may have a new version
        since.
        """
        return self._held.get(kept_name(session))

    def forget(self, session: str) -> None:
        """Delete the prefix of a trajectory that is over."""
        self._held.pop(kept_name(session), None)

    def __len__(self) -> int:
        return len(self._held)


class WorkingSet:
    """Contexts in one replica's KV memory: of live turns, of trajectories between two turns, and of
    trajectories that stayed away for longer than others do.

    All are cached until newer tokens need their place, those that stayed away first.
    """

    __slots__ = ("_away", "_resting", "away_tokens", "live_tokens", "resting_tokens")

    def __init__(self) -> None:
        # Tokens and the time since which they are cached, by trajectory, the oldest first.
        self._resting: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._away: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self.live_tokens = 0
        self.resting_tokens = 0
        self.away_tokens = 0

    def __contains__(self, session: str) -> bool:
        """Return True if the trajectory's prefix is cached."""
        name = kept_name(session)
        return name in self._resting or name in self._away

    def begin(self, session: str, tokens: int) -> float | None:
        """Add a live turn of so many tokens; return the time since which its prefix was cached,
        None without one.
        """
        self.live_tokens += tokens
        return self.drop(session)

    def end(self, tokens: int, session: str, kept: int, now_s: float) -> None:
        """Remove a live turn of so many tokens; `kept`: those that stay cached for its session."""
        self.live_tokens -= tokens
        if kept:
            self.drop(session)
            self._resting[kept_name(session)] = kept, now_s
            self.resting_tokens += kept

    def drop(self, session: str) -> float | None:
        """Remove a trajectory's prefix; return the time since which it was cached, None without."""
        name = kept_name(session)
        tokens, since_s = self._resting.pop(name, (0, None))
        self.resting_tokens -= tokens
        if since_s is None:
            tokens, since_s = self._away.pop(name, (0, None))
            self.away_tokens -= tokens
        return since_s

    def clear(self) -> None:
        """Remove all prefixes, as a replica does that changes its version."""
        self._resting.clear()
        self._away.clear()
        self.resting_tokens = self.away_tokens = 0

    def trim(self, kv_tokens: int) -> None:
        """Remove the prefixes that newer tokens displaced. kv_tokens: the replica's KV memory."""
        while self.live_tokens + self.resting_tokens + self.away_tokens > kv_tokens:
            if self._away:
                self.away_tokens -= self._away.popitem(last=False)[1][0]
            elif self._resting:
                self.resting_tokens -= self._resting.popitem(last=False)[1][0]
            else:
                break

    def fits(self, tokens: int, kv_tokens: int, oldest_s: float) -> bool:
        """Return True if so many tokens more displace no trajectory that is about to return.

        kv_tokens: the replica's, 0 if unknown. oldest_s: a trajectory whose prefix was cached
        before stays away. A replica without turns, or of unknown size, takes any.
        """
        while self._resting:
            name, (kept, since_s) = next(iter(self._resting.items()))
            if since_s >= oldest_s:
                break
            self._away[name] = self._resting.pop(name)
            self.resting_tokens -= kept
            self.away_tokens += kept
        takes_any = not (kv_tokens and self.live_tokens)
        return takes_any or self.live_tokens + self.resting_tokens + tokens <= kv_tokens


class QuantileWindow:
    """Window of the newest `size` integers, for quantiles."""

    __slots__ = ("_order", "_size", "_sorted")

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, value: int) -> None:
        """Add a value, and drop the oldest one if the window is full."""
        if len(self._order) >= self._size:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(value)
        insort(self._sorted, value)

    def quantile(self, q: float) -> int:
        """Return the value that about a share `q` of the window lies below; 0 if empty."""
        if not self._sorted:
            return 0
        return self._sorted[min(len(self._sorted) - 1, int(q * len(self._sorted)))]

    def __len__(self) -> int:
        return len(self._sorted)


class LengthPredictor:
    """Predictor of a turn's output length in tokens from the lengths of finished turns.

    Memory is bounded: the oldest histories are dropped.
    """

    def __init__(self, names_kept: int = NAMES_KEPT) -> None:
        self._names_kept = names_kept
        self._jobs: OrderedDict[str, QuantileWindow] = OrderedDict()
        # (samples, weighted mean) by ("s", session) or ("g", group, job).
        self._means: OrderedDict[tuple[str, ...], tuple[int, float]] = OrderedDict()

    def observe(self, job: str, session: str, group: str, tokens: int) -> None:
        """Record the output length, in tokens, of a finished turn."""
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
        """Delete the lengths of a trajectory that is over."""
        self._means.pop(_of_session(session), None)

    def __len__(self) -> int:
        """Return the number of trajectories and groups with a mean length."""
        return len(self._means)

    def expected(self, job: str, session: str, group: str, budget_tokens: int) -> int:
        """Return the likely output tokens of a turn, from 1 to its budget.

        The trajectory's mean is used, else its group's, else the job's 70% quantile, else the
        budget.
        """
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
        """Return True if such a turn is among the longest tenth of its job's; False if few are
        known.
        """
        window = self._jobs.get(job)
        if window is None or len(window) < ENOUGH_OF_JOB:
            return False
        return expected_tokens >= window.quantile(LONG_QUANTILE) > window.quantile(0.5)


def _of_session(session: str) -> tuple[str, ...]:
    return ("s", kept_name(session))


def _of_group(group: str, job: str) -> tuple[str, ...]:
    return ("g", kept_name(group), kept_name(job))


class RateMeter:
    """Exponentially weighted tokens per second of a replica, while it has turns.

    A gated guest sends nothing while its host is busy, so its rate falls within `BUSY_TAU_S`.
    Without turns the rate drifts back to the offered one, so that a replica that was slow once is
    tried again.
    """

    __slots__ = ("_busy", "_offered_tok_s", "_pending", "_rate_tok_s", "_since_s")

    def __init__(self, offered_tok_s: float, now_s: float) -> None:
        self._offered_tok_s = offered_tok_s
        self._rate_tok_s = offered_tok_s
        self._since_s = now_s
        self._pending = 0
        self._busy = False

    def set_offered(self, offered_tok_s: float) -> None:
        """Set the rate that the node offers, to which an idle replica's rate drifts."""
        self._offered_tok_s = offered_tok_s

    def add(self, tokens: int) -> None:
        """Count tokens that arrived since the rate was last read."""
        self._pending += tokens

    def set_busy(self, busy: bool, now_s: float) -> None:
        """Record that the replica has turns, or none, from now on."""
        self.tok_s(now_s)
        self._busy = busy

    def tok_s(self, now_s: float) -> float:
        """Return the rate at `now_s` in tokens per second; silence after a token lowers it."""
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


def prefix_keys(token_ids: Sequence[int], salt: str) -> tuple[int, ...]:
    """Return a hash key for each prefix of whole 64-token blocks; () for fewer than 2 blocks.

    Equal tokens under another salt have other keys.
    """
    blocks = min(len(token_ids) // BLOCK_TOKENS, MOST_BLOCKS)
    if blocks < LEAST_BLOCKS:
        return ()
    data = array("I", token_ids[: blocks * BLOCK_TOKENS]).tobytes()
    key, keys = hash(salt), []
    for start in range(0, len(data), _BLOCK_BYTES):
        key = hash((key, data[start : start + _BLOCK_BYTES]))
        keys.append(key)
    return tuple(keys)


class SharedPrefix(NamedTuple):
    """Length in tokens of a known prefix, and the replicas that cache it, the latest first."""

    tokens: int
    holders: tuple[Prefix, ...]


NOWHERE = SharedPrefix(0, ())


class SharedPrefixes:
    """Newest prompts' prefixes and the replicas that cache them; each takes about 200 bytes.

    A trajectory's next prompt begins with its last one. So of each turn some of its prefixes are
    remembered as hashes, and a new prompt is looked up by its own, the longest first:

        prompt    |--64--|--64--|--64--|--64--|--…        a key for each block: of all tokens so far
        noted     1, 2, 4, 8, … blocks and the last four  so that one which diverges is found too
        found     the longest that is noted, if it is at least half of the prompt

    A key says which tokens, in 64 bits: a collision costs a turn a prefill, never a wrong token.
    """

    def __init__(self, kept: int = PREFIXES_KEPT) -> None:
        self._kept = kept
        self._holders: OrderedDict[int, tuple[Prefix, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of remembered prefixes."""
        return len(self._holders)

    def find(self, keys: Sequence[int]) -> SharedPrefix:
        """Return the longest known prefix of at least half of the prompt, `NOWHERE` if none is
        known.
        """
        for blocks in range(len(keys), max(LEAST_BLOCKS, len(keys) // 2) - 1, -1):
            holders = self._holders.get(keys[blocks - 1])
            if holders is not None:
                return SharedPrefix(blocks * BLOCK_TOKENS, holders)
        return NOWHERE

    def note(self, keys: Sequence[int], replica: str, version: int) -> None:
        """Record that a replica ran a turn with this prompt under a policy version."""
        blocks = len(keys)
        noted = {*range(max(LEAST_BLOCKS, blocks - LAST_BLOCKS + 1), blocks + 1)}
        length = LEAST_BLOCKS
        while length < blocks:
            noted.add(length)
            length *= 2
        for count in noted:
            key = keys[count - 1]
            held = Prefix(replica, count * BLOCK_TOKENS, version)
            others = [each for each in self._holders.get(key, ()) if each.replica != replica]
            self._holders[key] = (held, *others[: HOLDERS_KEPT - 1])
            self._holders.move_to_end(key)
        while len(self._holders) > self._kept:
            self._holders.popitem(last=False)
