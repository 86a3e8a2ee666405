"""Step times of a modelled engine: how long one step takes, by what is in it.

`StepTimes` is the interface that calibration fills. `ProfiledSteps` takes the straight line that
`rose profile` fits; `RooflineSteps` derives a step from a card's bandwidth and arithmetic.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from slo import StepProfile
from slo.step_time import StepSample, fit_profile


@dataclass(frozen=True, slots=True)
class StepWork:
    """Content of one step of continuous batching.

    prefill_tokens: prompt tokens computed in it, none of them cached. decode_sequences: sequences
    that get one token each. prefill_sequences: those that `prefill_tokens` belong to.
    context_tokens: KV tokens that all its sequences attend to.
    """

    prefill_tokens: int
    decode_sequences: int
    prefill_sequences: int = 0
    context_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return self.prefill_tokens + self.decode_sequences

    @property
    def sequences(self) -> int:
        """Sequences in it."""
        return self.decode_sequences + self.prefill_sequences


class StepTimes(Protocol):
    """Duration of steps of one engine (model, tensor parallel size, card)."""

    def seconds(self, work: StepWork) -> float:
        """Seconds that the step takes alone on its card; 0 without tokens."""
        ...


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
    """Step times by a profile, as `rose profile` measures and fits it."""

    profile: StepProfile

    def seconds(self, work: StepWork) -> float:
        """Return the profile's seconds."""
        return self.profile.seconds(work.tokens, work.sequences, work.context_tokens)


@dataclass(frozen=True, slots=True)
class RooflineSteps:
    """Step times by the roofline of a card: the larger of memory time and arithmetic time.

    weight_bytes: of all cards together that a step reads; kv_bytes_per_token likewise.
    bandwidth_bytes_s and flops_s: of all cards of the engine, as achieved, not as advertised.
    active_parameters: that one token is multiplied with (2 operations each). overhead_s: of a step,
    whatever is in it (launches, sampling, all-reduce). Raises ValueError for impossible figures.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    active_parameters: float
    bandwidth_bytes_s: float
    flops_s: float
    overhead_s: float = 0.002

    def __post_init__(self) -> None:
        for name in ("weight_bytes", "active_parameters", "bandwidth_bytes_s", "flops_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; give a figure above 0")
        for name in ("kv_bytes_per_token", "overhead_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; give 0 or more")

    def seconds(self, work: StepWork) -> float:
        """Roofline (Williams et al., 2009) of weights and KV read, and of products computed."""
        if work.tokens <= 0:
            return 0.0
        read = self.weight_bytes + self.kv_bytes_per_token * work.context_tokens
        memory_s = read / self.bandwidth_bytes_s
        compute_s = 2 * self.active_parameters * work.tokens / self.flops_s
        return self.overhead_s + max(memory_s, compute_s)


_TOKENS = (1, 8, 32, 128, 512, 2048)
_CONTEXTS = (0, 8_192, 65_536)


def profile_of(times: StepTimes) -> StepProfile:
    """The profile that `rose profile` would fit to such an engine: a gate predicts steps by it."""
    if isinstance(times, ProfiledSteps):
        return times.profile
    samples = []
    for tokens, context in product(_TOKENS, _CONTEXTS):
        sequences = min(tokens, 128)
        decode = StepWork(0, sequences, 0, context)
        prefill = StepWork(tokens, 0, 1, context)
        samples.append(StepSample(sequences, sequences, context, times.seconds(decode)))
        samples.append(StepSample(tokens, 1, context, times.seconds(prefill)))
    return fit_profile(samples)
