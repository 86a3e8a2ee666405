"""What a guest's gate knows before its first step: profiles of its own steps and of its host's.

A file that was named and cannot be used ends the engine's start. With a guess in its place the gate
would lend other slack than the operator measured, and nobody would notice.
"""

import math
from pathlib import Path
from typing import Final

from executor.errors import ExecutorError
from executor.gate import GateLimits
from executor.vllm.settings import EngineSettings
from slo import ProfileError, StepModel, StepProfile

# A first guess: measured steps correct it within a few, and further than they may a profile.
FIRST_MODEL: Final = StepModel(
    StepProfile(base_s=0.005, per_token_s=20e-6, per_sequence_s=10e-6), max_correction=32.0
)


def step_model(settings: EngineSettings) -> StepModel:
    """The guest's own steps, FIRST_MODEL without a profile. Raises ExecutorError."""
    if not settings.step_profile:
        return FIRST_MODEL
    return StepModel(_read("ROSE_STEP_PROFILE", settings.step_profile))


def gate_limits(settings: EngineSettings) -> GateLimits:
    """Limits that know what the host's queue costs, where its steps were profiled.

    Raises ExecutorError.
    """
    if not settings.host_step_profile:
        return GateLimits()
    profile = _read("ROSE_HOST_STEP_PROFILE", settings.host_step_profile)
    return GateLimits(host_prefill_ns_per_token=math.ceil(profile.per_token_s * 1e9))


def _read(variable: str, path: str) -> StepProfile:
    try:
        return StepProfile.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ExecutorError(f"{variable} {path} cannot be read: {error.strerror}") from None
    except (ProfileError, UnicodeDecodeError) as error:
        raise ExecutorError(f"{variable} {path}: {error}") from None
