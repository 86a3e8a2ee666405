"""A profile is fitted without negative coefficients, and survives being saved."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo import ProfileError, StepProfile, StepSample, fit_profile
from slo.step_time import nnls

coefficients = st.tuples(
    st.floats(1e-3, 0.05), st.floats(1e-6, 1e-3), st.floats(0, 1e-3), st.floats(0, 1e-6)
)
SIZES = [
    (tokens, sequences, context)
    for tokens in (1, 16, 128, 512)
    for sequences in (1, 8, 32)
    for context in (0, 1_000, 20_000)
]


@given(coefficients)
def test_a_fit_finds_the_coefficients_that_made_the_samples(
    truth: tuple[float, float, float, float],
) -> None:
    made = StepProfile(*truth)
    fitted = fit_profile(StepSample(*size, made.seconds(*size)) for size in SIZES)
    for size in SIZES:
        assert fitted.seconds(*size) == pytest.approx(made.seconds(*size), rel=1e-3)
    assert fitted.fit_error < 1e-3
    assert fitted.samples == len(SIZES)


@given(st.lists(st.floats(1e-4, 10), min_size=len(SIZES), max_size=len(SIZES)))
def test_whatever_was_measured_more_work_never_takes_less(seconds: list[float]) -> None:
    fitted = fit_profile(StepSample(*size, s) for size, s in zip(SIZES, seconds, strict=True))
    assert fitted.seconds(100, 8, 500) <= fitted.seconds(101, 9, 501)


@given(st.integers(0, 10**6))
def test_no_direction_improves_on_a_non_negative_solution(seed: int) -> None:
    draw = random.Random(seed)
    rows = [[draw.uniform(-1, 1) for _ in range(4)] for _ in range(12)]
    targets = [draw.uniform(-1, 1) for _ in rows]
    found = nnls(rows, targets)
    for j, x in enumerate(found):
        residuals = [
            sum(a * b for a, b in zip(row, found, strict=True)) - target
            for row, target in zip(rows, targets, strict=True)
        ]
        slope = sum(row[j] * r for row, r in zip(rows, residuals, strict=True))
        # The optimality conditions: flat where x is free, rising where x is held at zero.
        assert x >= 0
        assert slope >= -1e-3
        assert x == 0 or abs(slope) < 1e-6


def test_steps_of_one_token_a_sequence_are_put_down_to_the_token() -> None:
    fitted = fit_profile(StepSample(n, n, 0, 0.005 + 1e-4 * n) for n in (1, 8, 64))
    assert (fitted.per_token_s, fitted.per_sequence_s) == (pytest.approx(1e-4), 0.0)


def test_time_that_only_context_explains_still_makes_a_profile() -> None:
    fitted = fit_profile(StepSample(n, 1, 1000 * n, 1e-3 * n) for n in (1, 8, 64))
    assert fitted.seconds(8, 1, 8000) == pytest.approx(8e-3, rel=1e-6)
    only_sequences = fit_profile(StepSample(n, 65 - n, 0, 65e-3 - 1e-3 * n) for n in (1, 8, 64))
    assert only_sequences.base_s + only_sequences.per_token_s > 0


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [StepSample(8, 8, 0, 0.01)] * 5,
        [StepSample(8, 8, 0, 0.01), StepSample(16, 8, 0, 0.0)],
        [StepSample(8, 8, 0, 0.01), StepSample(16, 8, 0, float("nan"))],
        [StepSample(8, 8, 0, 0.01), StepSample(0, 0, 0, 0.01)],
    ],
)
def test_samples_that_cannot_make_a_profile_are_refused(samples: list[StepSample]) -> None:
    with pytest.raises(ProfileError):
        fit_profile(samples)


@given(coefficients)
def test_a_saved_profile_is_the_same_profile(truth: tuple[float, float, float, float]) -> None:
    profile = StepProfile(*truth, samples=7, fit_error=0.02)
    assert StepProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": 2}, "layout 2, this is layout 1"),
        ({"kind": "other"}, "no kind"),
        ({"base_s": None}, "without numbers for base_s"),
        ({"base_s": True}, "without numbers for base_s"),
        ({"base_s": -1.0}, "not negative"),
        ({"base_s": 0.0, "per_token_s": 0.0}, "takes time"),
    ],
)
def test_another_layout_or_a_broken_file_is_one_clear_line(
    change: dict[str, object], message: str
) -> None:
    saved = json.loads(StepProfile(0.005, 1e-4).to_json()) | change
    with pytest.raises(ProfileError, match=message) as caught:
        StepProfile.from_json(json.dumps(saved))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_text_that_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ProfileError, match="profile the replica again"):
        StepProfile.from_json(text)
