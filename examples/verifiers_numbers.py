"""A game of several turns as an environment of verifiers, its policy behind ROSE's gateway.

    pip install verifiers==0.4.0 reasoning-gym==0.1.23 && pip install --no-deps gem-llm==0.1.0
    PYTHONPATH=examples vf-eval @ examples/verifiers_numbers.toml \
        --model $ROSE_CHECKPOINT --client.base-url $ROSE_GATEWAY/v1

GEM's GuessTheNumber, stepped by the environment's own process: each answer of the policy is a
guess, each of the game's a turn of the user. verifiers' training client renders prompts to tokens
and asks `/inference/v1/generate`, so its traces hold the tokens and logprobs that a trainer needs.
"""

from collections.abc import Iterator

import gem
import verifiers.v1 as vf

__all__ = ["NumbersEnv", "NumbersEnvConfig", "NumbersTaskset"]
GAME, GAMES, TURNS = "game:GuessTheNumber-v0-easy", 64, 4


class NumbersData(vf.TaskData):
    """seed: of the number."""

    seed: int


class NumbersTask(vf.Task[NumbersData, vf.State, vf.TaskConfig]):
    """One game."""


class NumbersTaskset(vf.Taskset[NumbersTask, vf.TasksetConfig]):
    """Games that differ in their numbers."""

    def load(self) -> Iterator[NumbersTask]:
        """Yield them."""
        for seed in range(GAMES):
            data = NumbersData(name=f"number-{seed}", prompt="guess 1-9", seed=seed)
            yield NumbersTask(data, self.config.task)


class NumbersEnvConfig(vf.EnvConfig):
    """Players of the game."""

    player: vf.AgentConfig = vf.AgentConfig()


class NumbersEnv(vf.Env[NumbersEnvConfig]):
    """The game answers each guess until it is over."""

    async def run(self, task: NumbersTask, agents: vf.Agents) -> None:
        """Play one."""
        game = gem.make(GAME, max_turns=TURNS)
        game.reset(seed=task.data.seed)
        won = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                said = segment.last_reply.strip()[:1]
                seen, reward, ended, stopped, _ = game.step(f"\\boxed{{{said}}}")
                won += reward
                if ended or stopped:
                    break
                hint = "too low" if "higher" in seen else "too high"
                segment = await interaction.turn(hint)
        interaction.trace.record_reward("won", won, 1.0)
