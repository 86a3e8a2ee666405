"""One turn in verl's terms and in ROSE's: sampling parameters in, tokens and steps out."""

import io
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from rose.client import Sampling
from rose.client.types import Turn
from rose.contract.replica import sampling_of
from rose.errors import RefusedError

# Sampling fields of verl that are accepted at these values, which change nothing.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (None, 1),
    "stop": (None, (), [], ""),
    "bad_words": (None, (), []),
    "logit_bias": (None, {}),
    "prompt_logprobs": (None, 0, False),
}
# Logprobs of the sampled tokens always come, and text is never requested.
NOT_ASKED: Final = frozenset({"logprobs", "detokenize", "skip_special_tokens"})
# Sampling fields that a turn's request may have; verl's trainer reads no logprobs of prompts, nor
# of tokens that were not sampled.
SAMPLED: Final = frozenset(Sampling.__struct_fields__) - {
    "logprobs",
    "prompt_logprobs",
    "routed_experts_prompt_start",
    "structured_outputs",
}
# Number of versions to remember: few turns last for more updates.
REMEMBERED = 256
COMPLETED, ABORTED = "completed", "aborted"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token limits of a turn from verl's rollout configuration: of the prompt, the response, and
    the model's context (None for no limit).
    """

    prompt: int
    response: int
    model: int | None

    def budget(self, prompt_tokens: int, asked: int | None) -> int:
        """Return the number of tokens that a turn may generate; `asked` is the request's own limit.
        Raises RefusedError if the model's context is full.
        """
        left = self.prompt + self.response - prompt_tokens
        most = max(1, min(self.response, left) if asked is None else asked)
        room = most if self.model is None else self.model - prompt_tokens
        if room < 1:
            raise RefusedError(
                f"a prompt of {prompt_tokens} tokens leaves none of {self.model} to generate; raise"
                " actor_rollout_ref.rollout.max_model_len or shorten the prompts"
            )
        return min(most, room)


def turn_sampling(params: Mapping[str, Any], lengths: Lengths, prompt_tokens: int) -> Sampling:
    """Return ROSE's sampling parameters for those of verl. Raises RefusedError, which names an
    unsupported one.
    """
    given = dict(params)
    asked = [given.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
    budget = lengths.budget(prompt_tokens, next((n for n in asked if n is not None), None))
    fields = {name: given.pop(name, None) for name in SAMPLED}
    fields["max_tokens"] = budget
    fields["top_k"] = max(0, fields["top_k"] or 0)
    for name in ("stop_token_ids", "allowed_token_ids"):
        fields[name] = tuple(fields[name]) if fields[name] else None
    for name, value in given.items():
        if name not in NOT_ASKED and value not in NEUTRAL.get(name, (None,)):
            raise RefusedError(
                f"ROSE does not sample with {name}={value!r:.60}; leave it out of the rollout's"
                " sampling parameters"
            )
    return sampling_of(fields)


def image_files(images: Sequence[Any]) -> list[bytes]:
    """Return images of PIL as files of PNG. Raises RefusedError for anything else."""
    files = []
    for image in images:
        if not hasattr(image, "save"):
            raise RefusedError(
                f"image_data: {type(image).__name__} is not an image of PIL; have the data set's"
                " process_vision_info load it"
            )
        file = io.BytesIO()
        # Without loss: the replica sees the trainer's pixels. The level costs time, and few bytes.
        image.save(file, "PNG", compress_level=1)
        files.append(file.getvalue())
    return files


@dataclass(slots=True)
class PolicySteps:
    """Map from published policy versions to verl's global steps; versions keep growing when a run
    resumes.

    lag: number of versions that a turn may be behind the newest when it starts.
    """

    lag: int
    _versions: deque[int] = field(default_factory=partial(deque, maxlen=REMEMBERED))
    _steps: deque[int] = field(default_factory=partial(deque, maxlen=REMEMBERED))
    _first: int = 0

    def told(self, version: int, step: int) -> None:
        """Record that `version`, newer than all before, was published after verl's global step
        `step`.
        """
        self._first = self._first or version
        self._versions.append(version)
        self._steps.append(step)

    @property
    def least(self) -> int | None:
        """Oldest version that may sample a new turn, None before the first was published.

        It is never one of an earlier run, whose steps are not this run's.
        """
        if not self._versions:
            return None
        return max(self._first, self._versions[-1] - self.lag)

    def step_of(self, version: int) -> int:
        """Return the global step after which `version` was published; that of the next older known
        version for an unknown one; 0 if none is known.
        """
        at = bisect_right(self._versions, version)
        return self._steps[max(0, at - 1)] if self._steps else 0

    def fields(self, versions: list[int]) -> dict[str, int]:
        """Return verl's fields `global_steps`, `min_global_steps` and `max_global_steps` of an
        answer whose tokens were sampled by these versions.
        """
        steps = [self.step_of(version) for version in versions] or [*self._steps][-1:] or [0]
        return {
            "global_steps": min(steps),
            "min_global_steps": min(steps),
            "max_global_steps": max(steps),
        }


def output_of(turn: Turn, steps: PolicySteps) -> dict[str, Any]:
    """Return the fields of verl's TokenOutput, as a dict, for a completed turn."""
    versions = [span[0] for span in (*turn.versions, *turn.oldest_versions)]
    return {
        "token_ids": list(turn.token_ids),
        "log_probs": list(turn.logprobs),
        "routed_experts": turn.routed_experts,
        "stop_reason": COMPLETED,
        # Each segment but the first was taken up by another replica.
        "num_preempted": max(0, len(turn.segments) - 1),
        "extra_fields": steps.fields(versions),
    }


def aborted_output(
    tokens: list[int], logprobs: list[float], versions: list[int], steps: PolicySteps
) -> dict[str, Any]:
    """Return the fields of verl's TokenOutput, as a dict, for a turn that was aborted with these
    tokens.
    """
    return {
        "token_ids": tokens,
        "log_probs": logprobs,
        "stop_reason": ABORTED,
        "num_preempted": 0,
        "extra_fields": steps.fields(versions),
    }
