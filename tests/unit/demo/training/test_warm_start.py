"""The warm start ends in the band wherever it is made, and says so when it could not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.demo.training.warm_start import (
    CHECK_EVERY,
    FIRST_CHECK,
    LEAST_SUCCESS,
    MOST_SUCCESS,
    STEPS,
    WarmStart,
    train_into_band,
)


class StandInPolicy:
    """One weight, which is its success; `learn` says what it is after each step."""

    def __init__(self, learn: Callable[[int], float]) -> None:
        self.weights: dict[str, Tensor] = {"w": torch.zeros(1)}
        self.learn = learn

    def advance(self, step: int) -> None:
        self.weights["w"].fill_(self.learn(step))

    def success(self) -> float:
        return float(self.weights["w"])

    def train(self) -> WarmStart:
        return train_into_band(self.weights, self.advance, self.success)


@pytest.mark.parametrize("steps_to_perfect", [170, 220, 300])
def test_fast_and_slow_learners_both_end_in_the_band(steps_to_perfect: int) -> None:
    policy = StandInPolicy(lambda step: step / steps_to_perfect)
    reached = policy.train()
    assert reached.leaves_room
    assert LEAST_SUCCESS <= policy.success() <= MOST_SUCCESS
    assert FIRST_CHECK <= reached.steps < STEPS


def test_a_leap_over_the_band_ends_between_its_two_checkpoints() -> None:
    leap = FIRST_CHECK + CHECK_EVERY
    policy = StandInPolicy(lambda step: 0.1 if step < leap - 1 else 0.95)
    reached = policy.train()
    assert reached.steps == leap
    assert reached.leaves_room
    assert policy.success() == pytest.approx(reached.success)


def test_a_warm_start_that_never_learns_ends_and_does_not_claim_to_leave_room() -> None:
    reached = StandInPolicy(lambda step: 0.2).train()
    assert reached.steps == STEPS
    assert reached.success == pytest.approx(0.2)
    assert not reached.leaves_room
