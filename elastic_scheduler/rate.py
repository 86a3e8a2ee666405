"""How fast a replica really decodes: measured from tokens as they arrive."""

import math

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
