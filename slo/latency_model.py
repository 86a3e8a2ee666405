"""How long an engine's next step will take: profiled offline, corrected online, floored."""

import math
from dataclasses import dataclass, replace

from slo.step_profile import StepProfile

RECENT_STEPS = 16
MAX_SHORTFALL = 0.25


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds = scale × profile, and not below the reactive floor while that is up.

    * `scale` follows measured ÷ profiled (EWMA of weight `alpha`) within 1/`max_correction` to
      `max_correction`: one stall cannot teach it nonsense.
    * `error` is how far predictions are off lately, |measured − predicted| ÷ the larger (EWMA).
    * `shortfall` is by how much of the measured time predictions were too short: it rises at once
      and fades by `fade` with each step. Above MAX_SHORTFALL the profile is not to be trusted and
      the floor is up: the longest of the last RECENT_STEPS steps (their 0.95 quantile), for smaller
      steps in proportion to the profile. The model must not promise short steps after a stall until
      it has seen some again.

    All parts grow with tokens, sequences and context, so the prediction does.
    Raises ValueError for parameters that cannot be.
    """

    profile: StepProfile
    scale: float = 1.0
    max_correction: float = 4.0
    alpha: float = 0.1
    fade: float = 0.8
    error: float = 0.0
    shortfall: float = 0.0
    recent: tuple[tuple[float, float], ...] = ()
    """(measured, profiled) seconds of the last steps, oldest first."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_correction) and self.max_correction >= 1):
            raise ValueError(f"max_correction is {self.max_correction}; it must be at least 1")
        if not 1 / self.max_correction <= self.scale <= self.max_correction:
            raise ValueError(
                f"scale is {self.scale}; with max_correction {self.max_correction} it must lie in "
                f"[{1 / self.max_correction}, {self.max_correction}]"
            )
        if not (0 < self.alpha <= 1 and 0 <= self.fade < 1):
            raise ValueError("alpha must lie in (0, 1], fade in [0, 1)")

    @property
    def floored(self) -> bool:
        """Whether the reactive floor is up."""
        return self.shortfall > MAX_SHORTFALL and bool(self.recent)

    def seconds(self, tokens: int, sequences: int, context_tokens: int = 0) -> float:
        """Predicted duration of a step; 0 without tokens."""
        profiled_s = self.profile.seconds(tokens, sequences, context_tokens)
        predicted_s = self.scale * profiled_s
        if not self.floored:
            return predicted_s
        longest_s, its_profiled_s = max(self.recent)
        return max(predicted_s, longest_s * min(1.0, profiled_s / its_profiled_s))

    def observed(
        self, tokens: int, sequences: int, measured_s: float, context_tokens: int = 0
    ) -> "StepModel":
        """The model after a step of that size took `measured_s`; empty steps teach nothing."""
        profiled_s = self.profile.seconds(tokens, sequences, context_tokens)
        if profiled_s <= 0 or not math.isfinite(measured_s) or measured_s <= 0:
            return self
        ratio = measured_s / profiled_s
        bounded = min(max(ratio, 1 / self.max_correction), self.max_correction)
        predicted_s = self.scale * profiled_s
        off = abs(measured_s - predicted_s) / max(measured_s, predicted_s)
        short = max(0.0, 1 - predicted_s / measured_s)
        return replace(
            self,
            scale=self.scale + self.alpha * (bounded - self.scale),
            error=self.error + self.alpha * (off - self.error),
            shortfall=max(short, self.shortfall * self.fade),
            recent=(*self.recent[1 - RECENT_STEPS :], (measured_s, profiled_s)),
        )

    def largest_budget(
        self, available_s: float, max_tokens: int, max_sequences: int, context_tokens: int = 0
    ) -> int:
        """Most tokens (0..`max_tokens`) whose predicted step fits `available_s`.

        Counts each token as a sequence of its own up to `max_sequences`: the slowest spending.
        """

        def fits(tokens: int) -> bool:
            sequences = min(tokens, max_sequences)
            return self.seconds(tokens, sequences, context_tokens) <= available_s

        if fits(max_tokens):
            return max(0, max_tokens)
        enough, too_many = 0, max_tokens
        while too_many - enough > 1:
            middle = (enough + too_many) // 2
            if fits(middle):
                enough = middle
            else:
                too_many = middle
        return enough
