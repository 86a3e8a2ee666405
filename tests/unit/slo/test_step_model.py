"""The step model is monotone, learns within bounds, and reacts at once to a slow step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo import StepModel, StepProfile

times = st.floats(0, 0.1)
profiles = st.builds(
    StepProfile,
    base_s=st.floats(1e-4, 0.1),
    per_token_s=times,
    per_sequence_s=times,
    per_context_token_s=st.floats(0, 1e-4),
)
steps = st.tuples(
    st.integers(1, 600), st.integers(0, 64), st.floats(1e-5, 10.0), st.integers(0, 10_000)
)


@st.composite
def models(draw: st.DrawFn) -> StepModel:
    """Models as steps make them."""
    model = StepModel(draw(profiles))
    for tokens, sequences, measured_s, context_tokens in draw(st.lists(steps, max_size=20)):
        model = model.observed(tokens, sequences, measured_s, context_tokens)
    return model


sizes = st.tuples(st.integers(0, 600), st.integers(0, 64), st.integers(0, 10_000))


@given(models(), sizes, sizes)
def test_more_work_is_never_predicted_faster(
    model: StepModel, size: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    larger = [a + b for a, b in zip(size, more, strict=True)]
    assert model.seconds(*size) <= model.seconds(*larger)


@given(models(), st.floats(0, 1), st.integers(0, 2048), st.integers(1, 64), st.integers(0, 1000))
def test_the_largest_budget_fits_and_one_token_more_does_not(
    model: StepModel, available_s: float, cap: int, sequences: int, context: int
) -> None:
    budget = model.largest_budget(available_s, cap, sequences, context)
    assert 0 <= budget <= cap
    assert model.seconds(budget, min(budget, sequences), context) <= available_s
    if budget < cap:
        assert model.seconds(budget + 1, min(budget + 1, sequences), context) > available_s


@given(models())
def test_correction_error_and_memory_stay_within_their_bounds(model: StepModel) -> None:
    assert 1 / model.max_correction <= model.scale <= model.max_correction
    assert 0 <= model.error < 1
    assert 0 <= model.shortfall < 1
    assert len(model.recent) <= 16


def test_predictions_settle_on_what_is_measured_and_the_error_fades() -> None:
    model = StepModel(StepProfile(base_s=0.005, per_token_s=1e-5)).observed(64, 64, 0.012)
    first_error = model.error
    for _ in range(100):
        model = model.observed(64, 64, 0.012)
    assert model.seconds(64, 64) == pytest.approx(0.012, rel=0.01)
    assert model.error < first_error / 4
    assert not model.floored


def test_context_lengthens_a_step_where_the_profile_says_so() -> None:
    model = StepModel(StepProfile(0.005, 0.0, per_context_token_s=1e-6))
    assert model.seconds(1, 1, 10_000) == pytest.approx(0.015)


def test_one_slow_step_raises_the_floor_at_once_and_it_fades() -> None:
    model = StepModel(StepProfile(base_s=0.005, per_token_s=0)).observed(32, 32, 0.5)
    assert model.floored
    assert model.seconds(32, 32) >= 0.5
    for _ in range(60):
        model = model.observed(32, 32, 0.005)
    assert model.seconds(32, 32) < 0.006


def test_a_slow_step_lifts_smaller_steps_in_proportion_to_the_profile() -> None:
    model = StepModel(StepProfile(base_s=0.01, per_token_s=1e-4)).observed(900, 1, 1.0)
    # Profiled, 100 tokens take a fifth of the time of 900; a ninth would promise too much.
    assert model.seconds(100, 1) == pytest.approx(0.2)


def test_an_engine_slower_than_any_correction_is_predicted_by_its_longest_recent_step() -> None:
    model = StepModel(StepProfile(base_s=0.005, per_token_s=0), max_correction=2.0)
    for measured_s in (0.100, 0.110, 0.105) * 60:
        model = model.observed(8, 8, measured_s)
    assert model.scale == pytest.approx(2.0)
    assert model.seconds(8, 8) == 0.110


def test_an_engine_faster_than_its_profile_raises_no_floor() -> None:
    model = StepModel(StepProfile(base_s=0.100, per_token_s=0))
    for _ in range(50):
        model = model.observed(8, 8, 0.050)
    assert not model.floored
    assert model.seconds(8, 8) == pytest.approx(0.050, rel=0.02)


def test_empty_or_senseless_measurements_teach_nothing() -> None:
    model = StepModel(StepProfile(base_s=0.005, per_token_s=0))
    for tokens, measured_s in ((0, 1.0), (5, 0.0), (5, float("nan"))):
        assert model.observed(tokens, 1, measured_s) == model


@pytest.mark.parametrize(
    "bad",
    [{"scale": 0.0}, {"scale": 5.0}, {"max_correction": 0.5}, {"alpha": 0.0}, {"fade": 1.0}],
)
def test_a_model_that_cannot_be_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must"):
        StepModel(StepProfile(0.01, 0.0), **bad)
