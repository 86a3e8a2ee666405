"""The stand-in for engines samples what the trainer scores."""

import asyncio
from pathlib import Path

import pytest

from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.models import load_policy, new_policy, save_model
from bench.demo.frozen_lake.task import different_lakes
from bench.demo.training.forward import Snapshots, load_version_zero, rescored, values_of
from bench.demo.training.local_policy import LocalPolicy
from bench.demo.training.rollouts import Trajectory, play, sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local-policy")
    save_model(new_policy(0), folder, vocab.WORDS)
    return folder


@pytest.mark.parametrize("long_turns", [False, True])
async def test_prompts_of_different_lengths_are_sampled_together_and_score_the_same(
    folder: Path, long_turns: bool
) -> None:
    policy = LocalPolicy(load_policy(folder))
    how = sampling(long_turns=long_turns, greedy=True)
    played = [Trajectory(str(at), at, 0, 0.0) for at in range(4)]
    lakes = different_lakes(4, "held-out")
    await asyncio.gather(
        *(play(policy, lake, how, one, 0) for lake, one in zip(lakes, played, strict=True))
    )
    kept = Snapshots()
    kept.keep(0, values_of(load_version_zero(folder)))
    ours = rescored(played, kept, {}, how.min_tokens)
    for one in played:
        assert ours[one.name] == pytest.approx(one.logprobs(), abs=1e-4)
        assert all(len(taken.turn.token_ids) >= how.min_tokens for taken in one.turns)
