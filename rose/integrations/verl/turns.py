"""One turn in verl's words and in ROSE's: sampling parameters there, tokens and steps back."""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from rose.client import Sampling
from rose.client.types import Turn
from rose.errors import RefusedError

# What changes nothing, and comes with every request.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (None, 1),
    "stop": (None, (), [], ""),
    "bad_words": (None, (), []),
    "logit_bias": (None, {}),
    "prompt_logprobs": (None, 0, False),
}
# Logprobs of the sampled tokens always come, and text is never asked for.
NOT_ASKED: Final = frozenset({"logprobs", "detokenize", "skip_special_tokens"})
T = TypeVar("T")
# Turns that last so many updates are few.
REMEMBERED = 256
COMPLETED, ABORTED = "completed", "aborted"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Limits of one turn, in tokens, as verl's rollout configuration has them."""

    prompt: int
    response: int
    model: int | None

    def budget(self, prompt_tokens: int, asked: int | None) -> int:
        """Tokens that the turn may have. Raises `RefusedError` where none is left."""
        left = self.prompt + self.response - prompt_tokens
        most = max(1, min(self.response, left) if asked is None else asked)
        room = most if self.model is None else self.model - prompt_tokens
        if room < 1:
            raise RefusedError(
                f"a prompt of {prompt_tokens} tokens leaves none of {self.model} to generate; raise"
                " actor_rollout_ref.rollout.max_model_len or shorten the prompts"
            )
        return min(most, room)


def sampling_of(params: Mapping[str, Any], lengths: Lengths, prompt_tokens: int) -> Sampling:
    """Translate sampling parameters. Raises `RefusedError` that names what cannot be had."""
    given = dict(params)
    asked = [given.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
    budget = lengths.budget(prompt_tokens, next((n for n in asked if n is not None), None))
    top_k = given.pop("top_k", None)
    sampling = Sampling(
        temperature=_or(given.pop("temperature", None), 1.0),
        top_p=_or(given.pop("top_p", None), 1.0),
        top_k=max(0, _or(top_k, 0)),
        max_tokens=budget,
        min_tokens=_or(given.pop("min_tokens", None), 0),
        stop_token_ids=_ids(given.pop("stop_token_ids", None)),
        allowed_token_ids=_ids(given.pop("allowed_token_ids", None)),
        seed=given.pop("seed", None),
        min_p=_or(given.pop("min_p", None), 0.0),
        repetition_penalty=_or(given.pop("repetition_penalty", None), 1.0),
        frequency_penalty=_or(given.pop("frequency_penalty", None), 0.0),
        presence_penalty=_or(given.pop("presence_penalty", None), 0.0),
        ignore_eos=_or(given.pop("ignore_eos", None), False),
    )
    for name, value in given.items():
        if name not in NOT_ASKED and value not in NEUTRAL.get(name, (None,)):
            raise RefusedError(
                f"ROSE does not sample with {name}={value!r:.60}; leave it out of the rollout's"
                " sampling parameters"
            )
    return sampling


@dataclass(slots=True)
class PolicySteps:
    """Which of verl's global steps each published version is; versions go on where a run resumes.

    lag: so many versions may a turn be behind the newest when it starts.
    """

    lag: int
    _versions: deque[int] = field(default_factory=partial(deque, maxlen=REMEMBERED))
    _steps: deque[int] = field(default_factory=partial(deque, maxlen=REMEMBERED))
    _first: int = 0

    def told(self, version: int, step: int) -> None:
        """A version was published after this step; each is newer than the one before."""
        self._first = self._first or version
        self._versions.append(version)
        self._steps.append(step)

    @property
    def least(self) -> int | None:
        """The oldest version that may still sample, None before the first one.

        None of an earlier run: its steps are not this run's.
        """
        if not self._versions:
            return None
        return max(self._first, self._versions[-1] - self.lag)

    def step_of(self, version: int) -> int:
        """The step after which it was published; what is not known counts as the one before."""
        at = bisect_right(self._versions, version)
        return self._steps[max(0, at - 1)] if self._steps else 0

    def fields(self, versions: list[int]) -> dict[str, int]:
        """What verl reads of an answer, whose tokens are of these versions."""
        steps = [self.step_of(version) for version in versions] or [*self._steps][-1:] or [0]
        return {
            "global_steps": min(steps),
            "min_global_steps": min(steps),
            "max_global_steps": max(steps),
        }


def output_of(turn: Turn, steps: PolicySteps) -> dict[str, Any]:
    """Fields of verl's `TokenOutput`."""
    versions = [span[0] for span in (*turn.versions, *turn.oldest_versions)]
    return {
        "token_ids": list(turn.token_ids),
        "log_probs": list(turn.logprobs),
        "stop_reason": COMPLETED,
        # Each segment but the first was taken up by another replica.
        "num_preempted": max(0, len(turn.segments) - 1),
        "extra_fields": steps.fields(versions),
    }


def aborted_output(
    tokens: list[int], logprobs: list[float], versions: list[int], steps: PolicySteps
) -> dict[str, Any]:
    """The same of a turn that was ended in the middle."""
    return {
        "token_ids": tokens,
        "log_probs": logprobs,
        "stop_reason": ABORTED,
        "num_preempted": 0,
        "extra_fields": steps.fields(versions),
    }


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _ids(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if not value else tuple(value)
