"""The task in tokens is gymnasium's FrozenLake."""

from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.task import (
    Episode,
    different_lakes,
    random_lake,
    training_lake,
)

DOWN, RIGHT = 1, 2


def test_a_malformed_reply_ends_the_episode_without_reward() -> None:
    episode = Episode(random_lake(1))
    episode.reply([vocab.STOP_ID])
    assert episode.done
    assert episode.reward == 0.0


def test_training_validation_and_the_claim_never_share_a_lake() -> None:
    held_out = set(different_lakes(512, "held-out"))
    validation = set(different_lakes(256, "validation"))
    assert (len(held_out), len(validation)) == (512, 256)
    met = {training_lake(seed, group) for seed in range(3) for group in range(300)}
    assert not met & held_out
    assert not met & validation
    assert not held_out & validation
