"""Rounds that do not wait for their slowest, and still train on every prompt once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import Round, RoundDone, TailBatcher, TailPlan


@given(st.integers(1, 4), st.integers(0, 40), st.randoms(), st.integers(0, 3))
def test_every_prompt_is_trained_on_exactly_once_whatever_round_it_was_in(
    size: int, count: int, rng: random.Random, trouble: int
) -> None:
    batcher = TailBatcher(TailPlan(0.5, 0.5), size, 2)
    for number in range(count):
        batcher.add(number)
    trained: list[int] = []
    dropped: list[int] = []
    while (current := batcher.begin(size, last=True)) is not None:
        assert current.samples == (2 if current.is_long else 3)
        members = [*current.prompts, *current.spares]
        done = None
        while done is None:
            what, prompt = rng.randrange(8), members.pop(rng.randrange(len(members)))
            if what == 0 and trouble > 0:
                batcher.put_back(prompt)
                again = batcher.begin(size, last=True)
                assert again is not None
                assert [*again.prompts, *again.spares] == [prompt]
                assert again.samples == current.samples
                members.append(prompt)
            elif what == 1 and trouble > 1:
                done = batcher.drop(prompt)
                dropped.append(prompt)
            else:
                assert batcher.begin(size, last=True) is None
                done = batcher.complete(prompt)
        trained += done.delivered
        assert len(done.delivered) <= len(current.prompts)
        assert not (current.is_long and done.deferred)
    assert batcher.waiting == 0
    assert sorted(trained + dropped) == [*range(count)]


def test_what_was_too_slow_runs_in_a_long_round() -> None:
    batcher = TailBatcher(TailPlan(more_prompts=0.5, more_samples=0.0), prompts=2, samples=1)
    assert batcher.wanted(2) == 3
    for number in range(6):
        batcher.add(number)
    for slow in (0, 3):
        short = batcher.begin(2)
        assert short is not None
        assert (len(short.prompts), len(short.spares), short.is_long) == (2, 1, False)
        quick = [number for number in (*short.prompts, *short.spares) if number != slow]
        assert batcher.complete(quick[0]) is None
        assert batcher.complete(quick[1]) == RoundDone(tuple(quick), (slow,))
    assert (batcher.deferred, batcher.wanted(2)) == (2, 0)
    long = batcher.begin(2)
    assert long == Round((0, 3), 1, (), is_long=True)
    with pytest.raises(ValueError, match="shares"):
        TailPlan(-0.1)


def test_a_round_fills_up_the_step_that_another_left_too_small() -> None:
    batcher = TailBatcher(TailPlan(0.0, 0.0), prompts=4, samples=1)
    for number in range(8):
        batcher.add(number)
    assert batcher.begin(0) is None
    filling = batcher.begin(5)  # of 8 places 3 hold ready groups: one is missing for a step
    assert filling is not None
    assert filling.prompts == (0,)


def test_spares_that_waited_for_nothing_do_not_start_again_in_a_round_that_is_over() -> None:
    batcher = TailBatcher(TailPlan(1.0, 0.0), prompts=1, samples=1)
    for number in range(4):
        batcher.add(number)
    assert batcher.begin(1) == Round((0,), 1, (1,))
    batcher.put_back(0)
    assert batcher.complete(1) == RoundDone((1,), (0,))
    assert batcher.begin(1) == Round((0,), 1, (), is_long=True)
