"""A small monotone model of how long one engine step takes."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds = max(floor, scale × (base + per_token × tokens + per_sequence × sequences)).

    The coefficients come from an offline profile and are not negative, so the prediction never
    falls when work is added. `scale` follows the measured ÷ profiled ratio (EWMA, weight `alpha`).
    The floor reacts at once to a slow step and fades by `fade` with each later one: after a stall
    the model must not promise short steps until it has seen some again.
    """

    base_s: float
    per_token_s: float
    per_sequence_s: float = 0.0
    scale: float = 1.0
    alpha: float = 0.1
    fade: float = 0.8
    floor_s: float = 0.0
    floor_tokens: int = 1

    def __post_init__(self) -> None:
        times = (self.base_s, self.per_token_s, self.per_sequence_s, self.floor_s)
        if any(not math.isfinite(value) or value < 0 for value in times):
            raise ValueError(
                f"step model times are {times}; give finite seconds that are not negative"
            )
        if self.base_s + self.per_token_s <= 0 or self.scale <= 0:
            raise ValueError("a step takes time: base_s + per_token_s and scale must be positive")
        if not (0 < self.alpha <= 1 and 0 <= self.fade < 1 and self.floor_tokens >= 1):
            raise ValueError("alpha must lie in (0, 1], fade in [0, 1), floor_tokens at least 1")

    def seconds(self, tokens: int, sequences: int) -> float:
        """Predicted duration of a step; 0 without tokens."""
        if tokens <= 0:
            return 0.0
        profiled = self.base_s + self.per_token_s * tokens + self.per_sequence_s * sequences
        # Below the slow step's size the floor shrinks in proportion: the model stays monotone.
        floor = self.floor_s * min(1.0, tokens / self.floor_tokens)
        return max(self.scale * profiled, floor)

    def observed(self, tokens: int, sequences: int, measured_s: float) -> "StepModel":
        """The model after a step of that size took `measured_s`; empty steps teach nothing."""
        if tokens <= 0 or not math.isfinite(measured_s) or measured_s <= 0:
            return self
        profiled = self.base_s + self.per_token_s * tokens + self.per_sequence_s * sequences
        ratio = measured_s / profiled
        scale = self.scale + self.alpha * (ratio - self.scale)
        faded = self.floor_s * self.fade
        if measured_s >= faded:
            return replace(self, scale=scale, floor_s=measured_s, floor_tokens=tokens)
        return replace(self, scale=scale, floor_s=faded)

    def largest_budget(self, available_s: float, max_tokens: int, max_sequences: int) -> int:
        """Most tokens (0..`max_tokens`) whose predicted step fits `available_s`.

        Counts each token as a sequence of its own up to `max_sequences`: the slowest spending.
        """
        if self.seconds(max_tokens, min(max_tokens, max_sequences)) <= available_s:
            return max(0, max_tokens)
        fits, too_many = 0, max_tokens
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.seconds(middle, min(middle, max_sequences)) <= available_s:
                fits = middle
            else:
                too_many = middle
        return fits
