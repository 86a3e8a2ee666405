"""Step-time model: predicts the duration of an engine's next step.

`StepProfile` is fitted offline, from profiled steps, by least squares with coefficients that are
not negative. `StepModel` corrects its predictions online and keeps them above a reactive floor.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from typing import Any, Self

from slo.errors import ProfileError

# Columns closer to each other than this depend on each other.
_SINGULAR = 3e-6
# Columns whose fits are closer than this explain equally much: the first wins, in caller's order.
_TIE = 1e-9


def nnls(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return the x ≥ 0 that minimises Σ(row · x − target)².

    Solves by least squares for every set of columns and keeps the best solution without a negative
    entry. The optimum is among them: on the columns it uses it is the plain least squares solution
    (Lawson & Hanson, 1974, ch. 23). Exact, and quick up to about six columns.
    """
    # Imported here: an engine predicts steps and fits no profile.
    import numpy as np

    table, target = np.array(rows, float), np.array(targets, float)
    # Columns of one length, or a context of thousands would drown a base of milliseconds.
    norms = np.linalg.norm(table, axis=0)
    norms[norms == 0] = 1.0
    table /= norms
    pull = table.T @ target
    best, best_gain = np.zeros(len(norms)), 0.0
    for size in range(1, len(norms) + 1):
        for columns in map(list, combinations(range(len(norms)), size)):
            solution, _, rank, _ = np.linalg.lstsq(table[:, columns], target, rcond=_SINGULAR)
            # ‖target‖² − ‖residual‖² of a least squares solution is its dot product with the pull.
            gain = float(solution @ pull[columns])
            better = gain > best_gain + _TIE * (target @ target)
            if better and rank == size and solution.min() >= 0:
                best_gain, best = gain, np.zeros(len(norms))
                best[columns] = solution / norms[columns]
    return [float(x) for x in best]


LAYOUT = 1
_KIND = "rose.step_profile"


@dataclass(frozen=True, slots=True)
class StepSample:
    """Measured step of an engine: its tokens, sequences, attended context tokens, and seconds."""

    tokens: int
    sequences: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Step-time formula, fitted to measurements; one step takes, in seconds:

    base + per_token × tokens + per_sequence × sequences + per_context_token × context tokens. No
    coefficient is negative, so a step is never predicted faster when work is added. `samples` and
    `fit_error` (mean |predicted − measured| ÷ measured) say where it comes from; both are 0 for a
    guess. Raises ProfileError for coefficients that cannot be.
    """

    base_s: float
    per_token_s: float
    per_sequence_s: float = 0.0
    per_context_token_s: float = 0.0
    samples: int = 0
    fit_error: float = 0.0

    def __post_init__(self) -> None:
        times = (self.base_s, self.per_token_s, self.per_sequence_s, self.per_context_token_s)
        if any(not math.isfinite(value) or value < 0 for value in times):
            raise ProfileError(
                f"step profile times are {times}; give finite seconds that are not negative"
            )
        if self.base_s + self.per_token_s <= 0:
            raise ProfileError("a step takes time: base_s + per_token_s must be positive")

    def seconds(self, tokens: int, sequences: int, context_tokens: int = 0) -> float:
        """Return the predicted seconds of a step of this size; 0 without tokens."""
        if tokens <= 0:
            return 0.0
        return (
            self.base_s
            + self.per_token_s * tokens
            + self.per_sequence_s * sequences
            + self.per_context_token_s * context_tokens
        )

    def to_json(self) -> str:
        """Return the profile as one JSON object, with the version of its layout."""
        return json.dumps({"kind": _KIND, "layout": LAYOUT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the profile in the text of `to_json`. Raises ProfileError for any other."""
        try:
            saved = json.loads(text)
        except ValueError as error:
            raise ProfileError(f"not a step profile: {error}; profile the replica again") from None
        if not isinstance(saved, dict) or saved.get("kind") != _KIND:
            raise ProfileError(f"not a step profile: no kind {_KIND!r}; profile the replica again")
        if saved.get("layout") != LAYOUT:
            raise ProfileError(
                f"step profile of layout {saved.get('layout')!r}, this is layout {LAYOUT}; "
                "profile the replica again"
            )
        values: dict[str, Any] = {field.name: saved.get(field.name) for field in fields(cls)}
        wrong = [name for name, value in values.items() if type(value) not in (int, float)]
        if wrong:
            raise ProfileError(
                f"step profile without numbers for {', '.join(wrong)}; profile the replica again"
            )
        return cls(**values)


def fit_profile(samples: Iterable[StepSample]) -> StepProfile:
    """Return the profile closest to `samples` in squared relative error.

    Fitted by non-negative least squares; relative, because a millisecond is nothing to a long
    prefill and a whole decode step to another. Raises ProfileError for fewer than two sizes of
    step, or a time that is not positive.
    """
    taken = list(samples)
    for sample in taken:
        if not (math.isfinite(sample.seconds) and sample.seconds > 0 and sample.tokens > 0):
            raise ProfileError(f"{sample} cannot be; a step has tokens and takes time")
    if len({sample.tokens for sample in taken}) < 2:
        raise ProfileError(
            f"{len(taken)} samples of fewer than two sizes; profile steps of several sizes"
        )
    rows = [[x / s.seconds for x in (1.0, s.tokens, s.sequences, s.context_tokens)] for s in taken]
    coefficients = nnls(rows, [1.0] * len(rows))
    if coefficients[0] + coefficients[1] <= 0:
        # All time went to sequences or context; without those the same steps still take time.
        coefficients = [*nnls([row[:2] for row in rows], [1.0] * len(rows)), 0.0, 0.0]
    base_s, per_token_s, per_sequence_s, per_context_s = coefficients
    fitted = StepProfile(base_s, per_token_s, per_sequence_s, per_context_s)
    errors = [
        abs(fitted.seconds(s.tokens, s.sequences, s.context_tokens) - s.seconds) / s.seconds
        for s in taken
    ]
    return replace(fitted, samples=len(taken), fit_error=sum(errors) / len(errors))


RECENT_STEPS = 16
MAX_SHORTFALL = 0.25


@dataclass(frozen=True, slots=True)
class StepModel:
    """Step-time prediction that measured steps correct: scale × profile, above a reactive floor.

    * `scale` follows measured ÷ profiled (EWMA of weight `alpha`) within 1/`max_correction` to
      `max_correction`: one stall cannot teach it nonsense.
    * `error` is the recent prediction error, |measured − predicted| ÷ the larger (EWMA).
    * `shortfall` is the share of the measured time by which predictions were too short: it rises at
      once and fades by `fade` with each step. Above MAX_SHORTFALL the profile is not to be trusted
      and the floor is up: the longest of the last RECENT_STEPS steps, for smaller steps in
      proportion to the profile. The model must not promise short steps after a stall until it has
      seen some again.

    All parts grow with tokens, sequences and context, so the prediction does. Raises ValueError for
    parameters that cannot be.
    """

    profile: StepProfile
    scale: float = 1.0
    max_correction: float = 4.0
    alpha: float = 0.1
    fade: float = 0.8
    error: float = 0.0
    shortfall: float = 0.0
    recent: tuple[tuple[float, float], ...] = ()
    """(measured, profiled) seconds of the last RECENT_STEPS steps, oldest first."""

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
        """True while recent predictions were too short, so that the reactive floor holds."""
        return self.shortfall > MAX_SHORTFALL and bool(self.recent)

    def seconds(self, tokens: int, sequences: int, context_tokens: int = 0) -> float:
        """Return the predicted seconds of a step of this size; 0 without tokens."""
        profiled_s = self.profile.seconds(tokens, sequences, context_tokens)
        predicted_s = self.scale * profiled_s
        if not self.floored:
            return predicted_s
        longest_s, its_profiled_s = max(self.recent)
        return max(predicted_s, longest_s * min(1.0, profiled_s / its_profiled_s))

    def observed(
        self, tokens: int, sequences: int, measured_s: float, context_tokens: int = 0
    ) -> "StepModel":
        """Return the model corrected by a step of that size which took `measured_s`.

        A step without tokens, or an invalid time, returns this model unchanged.
        """
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
        """Return the most tokens (0..`max_tokens`) whose predicted step fits `available_s`.

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
