"""The task in tokens is gymnasium's FrozenLake."""

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.demo.frozen_lake import task, vocab
from bench.demo.frozen_lake.task import (
    GOAL,
    MAX_TURNS,
    Episode,
    different_lakes,
    moved,
    parse_move,
    random_lake,
    shortest_plan,
    training_lake,
)
from rose.errors import RoseError

DOWN, RIGHT = 1, 2


@given(seed=st.integers(0, 10_000), moves=st.lists(st.integers(0, 3), max_size=8))
def test_moves_are_those_of_gymnasium(seed: int, moves: list[int]) -> None:
    lake = random_lake(seed)
    rows = [lake[at : at + 4] for at in range(0, 16, 4)]
    env = gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=False)
    env.reset()
    position = 0
    for move in moves:
        there, reward, ended, _, _ = env.step(move)
        position = moved(position, move)
        assert there == position
        assert (reward > 0) == (position == GOAL)
        if ended:
            break


@given(seed=st.integers(0, 10_000))
def test_every_lake_can_be_crossed_in_time(seed: int) -> None:
    plan = shortest_plan(random_lake(seed), 0)
    assert plan is not None
    assert len(plan) <= MAX_TURNS


def test_a_careful_player_gets_the_reward() -> None:
    lake = random_lake(1)
    episode = Episode(lake)
    plan = shortest_plan(lake, 0)
    assert plan is not None
    for move in plan:
        episode.reply([vocab.THEN_ID, vocab.MOVE_IDS[move], vocab.STOP_ID])
    assert episode.done
    assert episode.reward == 1.0


def test_a_malformed_reply_ends_the_episode_without_reward() -> None:
    episode = Episode(random_lake(1))
    episode.reply([vocab.STOP_ID])
    assert episode.done
    assert episode.reward == 0.0


@pytest.mark.parametrize(
    "reply", [[], [vocab.STOP_ID], [vocab.MOVE_IDS[0], vocab.STOP_ID], [vocab.THEN_ID] * 3]
)
def test_only_a_whole_reply_holds_a_move(reply: list[int]) -> None:
    assert parse_move(reply) is None


def test_training_validation_and_the_claim_never_share_a_lake() -> None:
    held_out = set(different_lakes(512, "held-out"))
    validation = set(different_lakes(256, "validation"))
    assert (len(held_out), len(validation)) == (512, 256)
    met = {training_lake(seed, group) for seed in range(3) for group in range(300)}
    assert not met & held_out
    assert not met & validation
    assert not held_out & validation


def test_more_lakes_than_there_are_is_refused_with_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task, "HELD_OUT_TRIES", 100)
    with pytest.raises(RoseError, match=r"ask for \d+ or fewer"):
        different_lakes(101, "validation")


def test_words_and_tokens_are_one_to_one() -> None:
    assert len(set(vocab.WORDS)) == len(vocab.WORDS) <= vocab.VOCABULARY_SIZE
    assert vocab.words([vocab.cell_id(5, "H"), vocab.STOP_ID]) == "b2H ."
