"""The step model is monotone, learns, and reacts at once to a slow step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo import StepModel

times = st.floats(0, 0.1)
models = st.builds(
    StepModel,
    base_s=st.floats(1e-4, 0.1),
    per_token_s=times,
    per_sequence_s=times,
    scale=st.floats(0.1, 10),
    floor_s=times,
    floor_tokens=st.integers(1, 512),
)


@given(models, st.integers(0, 600), st.integers(0, 600), st.integers(0, 64), st.integers(0, 64))
def test_more_work_is_never_predicted_faster(
    model: StepModel, tokens: int, more: int, sequences: int, extra: int
) -> None:
    assert model.seconds(tokens, sequences) <= model.seconds(tokens + more, sequences + extra)


@given(models, st.floats(0, 1), st.integers(0, 2048), st.integers(1, 64))
def test_the_largest_budget_fits_and_one_token_more_does_not(
    model: StepModel, available_s: float, cap: int, sequences: int
) -> None:
    budget = model.largest_budget(available_s, cap, sequences)
    assert 0 <= budget <= cap
    assert model.seconds(budget, min(budget, sequences)) <= available_s
    if budget < cap:
        assert model.seconds(budget + 1, min(budget + 1, sequences)) > available_s


def test_predictions_settle_on_what_is_measured() -> None:
    model = StepModel(base_s=0.005, per_token_s=1e-5)
    for _ in range(100):
        model = model.observed(64, 64, 0.012)
    assert model.seconds(64, 64) == pytest.approx(0.012, rel=0.01)


def test_one_slow_step_raises_the_floor_at_once_and_it_fades() -> None:
    model = StepModel(base_s=0.005, per_token_s=0).observed(32, 32, 0.5)
    assert model.seconds(32, 32) >= 0.5
    for _ in range(60):
        model = model.observed(32, 32, 0.005)
    assert model.seconds(32, 32) < 0.006


def test_empty_or_senseless_measurements_teach_nothing() -> None:
    model = StepModel(base_s=0.005, per_token_s=0)
    for tokens, measured_s in ((0, 1.0), (5, 0.0), (5, float("nan"))):
        assert model.observed(tokens, 1, measured_s) == model


@pytest.mark.parametrize("bad", [{"base_s": -1.0}, {"base_s": 0.0}, {"scale": 0.0}, {"fade": 1.0}])
def test_a_model_that_cannot_be_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|give"):
        StepModel(**({"base_s": 0.01, "per_token_s": 0.0} | bad))
