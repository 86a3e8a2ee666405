"""The level is chosen for the link: seconds are handed in by a clock that knows what runs."""

import itertools

import pytest

from bench.weights.steps import adam_step, rate_for
from weight_transfer.format.delta_codec import Level
from weight_transfer.publish.level import quicker_level


@pytest.mark.parametrize(("link_bytes_s", "level"), [(1e6, Level.COMPACT), (1e12, Level.FAST)])
def test_a_slow_link_gets_few_bytes_and_a_fast_one_little_work(
    link_bytes_s: float, level: Level
) -> None:
    step = adam_step(256, 1024, rate_for(0.02), seed=1)
    # Each look at the clock is later than the one before by more: compact encodes for longer.
    seconds = itertools.accumulate(itertools.count(0.001, 0.001))
    chosen = quicker_level(step.old, step.new, link_bytes_s, 1, lambda: next(seconds))
    assert chosen is level
