"""How long one engine's steps took when it was profiled, as four coefficients."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from slo.errors import ProfileError
from slo.nnls import nnls

LAYOUT = 1
_KIND = "rose.step_profile"


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step: tokens computed, sequences in it, tokens of context they attend to."""

    tokens: int
    sequences: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Seconds = base + per_token × tokens + per_sequence × sequences + per_context × context.

    No coefficient is negative, so a step is never predicted faster when work is added.
    `samples` and `fit_error` (mean |predicted − measured| ÷ measured) say where it comes from; both
    are 0 for a guess. Raises ProfileError for coefficients that cannot be.
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
        """Duration of a step; 0 without tokens."""
        if tokens <= 0:
            return 0.0
        return (
            self.base_s
            + self.per_token_s * tokens
            + self.per_sequence_s * sequences
            + self.per_context_token_s * context_tokens
        )

    def to_json(self) -> str:
        """One JSON object with the layout's version."""
        return json.dumps({"kind": _KIND, "layout": LAYOUT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`; raises ProfileError for any other text or layout."""
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
    """The profile closest to `samples` in relative error (squared), by non-negative least squares.

    Relative, because a millisecond is nothing to a long prefill and a whole decode step to another.
    Raises ProfileError for fewer than two sizes of step, or a time that is not positive.
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
