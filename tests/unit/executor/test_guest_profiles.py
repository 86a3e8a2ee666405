"""What a guest's gate knows before its first step comes from files, or from nowhere."""

from pathlib import Path

import pytest

from executor import ExecutorError
from executor.engine_settings import EngineSettings
from executor.guest.gate_client import FIRST_MODEL, gate_limits, step_model
from executor.step_decision import GateLimits
from slo import StepProfile

PROFILE = StepProfile(0.004, 1.25e-5, 2e-5, 1e-8, samples=40, fit_error=0.05)


def settings(**environ: str) -> EngineSettings:
    return EngineSettings.from_environ(
        {"ROSE_ROLE": "guest", "ROSE_CONTROL_PAGE": "page", **environ}
    )


def test_without_profiles_a_guest_guesses() -> None:
    assert step_model(settings()) is FIRST_MODEL
    assert gate_limits(settings()) == GateLimits()


def test_profiles_of_guest_and_host_reach_the_gate(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.to_json())
    profiled = settings(ROSE_STEP_PROFILE=str(path), ROSE_HOST_STEP_PROFILE=str(path))
    assert step_model(profiled).profile == PROFILE
    assert gate_limits(profiled).host_prefill_ns_per_token == 12_500


@pytest.mark.parametrize("text", [None, "", "{}", '{"kind": "rose.step_profile", "layout": 9}'])
def test_a_profile_that_cannot_be_used_ends_the_start_in_one_line(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    for variable, read in (
        ("ROSE_STEP_PROFILE", step_model),
        ("ROSE_HOST_STEP_PROFILE", gate_limits),
    ):
        with pytest.raises(ExecutorError, match=variable) as error:
            read(settings(**{variable: str(path)}))
        assert "\n" not in str(error.value)
