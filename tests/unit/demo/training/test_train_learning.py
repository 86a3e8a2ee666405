"""Advantages, the clip, the update and the check of stamps."""

import pytest
import torch

from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.models import new_policy
from bench.demo.training.forward import (
    published,
    reply_logprobs,
    rescored,
    turn_gap,
)
from bench.demo.training.learner import Learner
from bench.demo.training.rollouts import TakenTurn, Trajectory
from rose.client import Turn

REPLY = (vocab.cell_id(5, "F"), vocab.THEN_ID, vocab.MOVE_IDS[1], vocab.STOP_ID)
PROMPT = [vocab.cell_id(at, "F") for at in range(16)] + [vocab.BAR_ID, vocab.ASK_ID]


def _learner(seed: int = 0, control: str = "none") -> Learner:
    base = published(dict(new_policy(seed).named_parameters()))
    return Learner(base, control, learning_rate=1e-3)  # type: ignore[arg-type]  # a literal


def _trajectory(
    learner: Learner, name: str, group: int, reward: float, reply: tuple[int, ...] = REPLY
) -> Trajectory:
    tokens = [*PROMPT, *reply]
    with torch.no_grad():
        scores = reply_logprobs(learner.values, [tokens], [range(len(PROMPT), len(tokens))])
    turn = Turn(
        name,
        tuple(reply),
        tuple(scores.tolist()),
        ((0, 0, len(reply)),),
        (("r", "guest", 0, 2), ("d", "dedicated", 2, len(reply))),
        "stop",
        2,
    )
    taken = TakenTurn(len(PROMPT), turn, 0.0, 1.0)
    return Trajectory(name, group, 0, 0.0, 1.0, tokens, [taken], reward)


def test_an_update_makes_rewarded_replies_likelier() -> None:
    learner = _learner()
    worse = (vocab.cell_id(1, "F"), vocab.THEN_ID, vocab.MOVE_IDS[2], vocab.STOP_ID)
    good = _trajectory(learner, "0.0", 0, 1.0)
    bad = _trajectory(learner, "0.1", 0, 0.0, worse)
    before = sum(good.logprobs())
    update = learner.step([good, bad])
    after = sum(_trajectory(learner, "x", 0, 1.0).logprobs())
    assert after > before
    assert update.gradient_norm > 0
    assert any((update.old[name].bits != update.new[name].bits).any() for name in update.old)


def test_without_learning_rate_nothing_moves() -> None:
    learner = _learner(control="lr0")
    update = learner.step(
        [_trajectory(learner, "0.0", 0, 1.0), _trajectory(learner, "0.1", 0, 0.0)]
    )
    assert all((update.old[name].bits == update.new[name].bits).all() for name in update.old)


def test_scores_under_the_right_version_leave_no_gap_and_a_wrong_one_shows() -> None:
    learner, other = _learner(), _learner(seed=1)
    trajectory = _trajectory(learner, "0.0", 0, 1.0)
    exact = rescored([trajectory], {0: learner.values}, {})["0.0"]
    assert exact == pytest.approx(trajectory.logprobs(), abs=1e-5)
    gap, unstamped = turn_gap(trajectory.turns[0], exact)
    assert set(gap) == {"guest", "continued"}
    assert unstamped == 0
    off, _ = turn_gap(trajectory.turns[0], rescored([trajectory], {0: other.values}, {})["0.0"])
    assert off["guest"][0] / off["guest"][1] > 0.01


def test_a_version_that_is_not_kept_counts_as_unstamped() -> None:
    learner = _learner()
    trajectory = _trajectory(learner, "0.0", 0, 1.0)
    _, unstamped = turn_gap(trajectory.turns[0], rescored([trajectory], {}, {})["0.0"])
    assert unstamped == len(REPLY)
