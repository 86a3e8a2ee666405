"""Steps of a profile run, and the reading of their records."""

import pytest

from executor.step_log import STEP, StepRecord
from rose.profile import Batch, LoggedStep, plan, samples_of
from rose.profile.plan import DECODE_STEPS, EngineLimits, steps_of, waited_share
from slo import fit_profile

LIMITS = EngineLimits(max_num_seqs=64, max_model_len=512, token_budget=512, kv_tokens=20_000)


def test_the_plan_covers_what_a_lease_may_use_and_fits_the_kv_cache() -> None:
    batches = plan(LIMITS)
    assert {batch.sequences for batch in batches} == {1, 4, 16, 64}
    assert all(batch.kv_tokens <= LIMITS.kv_tokens for batch in batches)
    assert all(batch.prompt_tokens + DECODE_STEPS <= 512 for batch in batches)
    assert all(batch.sequences <= batch.token_budget <= 512 for batch in batches)
    assert {batch.token_budget for batch in batches} == {64, 256, 512}
    assert len(batches) == len(set(batches)) <= 36


@pytest.mark.parametrize("most", [1, 3, 6, 100])
def test_the_largest_batch_is_always_run(most: int) -> None:
    limits = EngineLimits(most, 512, 512, kv_tokens=1 << 20)
    assert max(batch.sequences for batch in plan(limits)) == most


def record(tokens: int, sequences: int, sampled: int, ms: int = 5) -> StepRecord:
    return StepRecord(STEP, 1_000, 1_000 + ms * 1_000_000, ms * 900_000, tokens, sequences, sampled)


def test_context_is_the_kv_in_use_when_a_step_begins() -> None:
    batch = Batch(sequences=3, prompt_tokens=10, token_budget=20)
    chunked = [record(20, 2, 2), record(12, 3, 3), record(3, 3, 3), record(1, 1, 1)]
    assert [
        (step.tokens, step.sequences, step.context_tokens) for step in steps_of(batch, chunked)
    ] == [(20, 2, 0), (12, 3, 20), (3, 3, 32)], "the last one follows the end of two turns"


def test_a_size_of_step_is_told_by_its_median() -> None:
    batch = Batch(1, 10, 10)
    runs = [steps_of(batch, [record(10, 1, 1, ms), record(1, 1, 1, 4)]) for ms in (9, 70, 11)]
    assert [(s.tokens, s.seconds) for s in samples_of(runs)] == [(10, 0.011), (1, 0.004)]
    assert waited_share(runs) == pytest.approx(0.1)


def test_the_fit_recovers_an_engine_from_the_plans_own_steps() -> None:
    samples = []
    for batch in plan(LIMITS):
        prefill = batch.sequences * batch.prompt_tokens
        sizes = [(min(batch.token_budget, prefill), min(batch.sequences, 8), 0)]
        sizes += [(batch.sequences, batch.sequences, prefill + n) for n in range(DECODE_STEPS)]
        steps = [
            LoggedStep(t, s, c, s, 0.003 + 2e-5 * t + 1e-5 * s + 2e-8 * c, 0.003)
            for t, s, c in sizes
        ]
        samples += samples_of([steps])
    profile = fit_profile(samples)
    assert profile.base_s == pytest.approx(0.003, rel=1e-6)
    assert profile.per_context_token_s == pytest.approx(2e-8, rel=1e-3)
    assert profile.fit_error < 1e-6
