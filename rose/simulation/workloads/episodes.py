"""Episodes of environments: FrozenLake and ALFWorld, as the ROSE paper trains on them.

The paper says models, cards, batches and groups; it does not publish the lengths of its turns. The
figures here are those of the same environments in the open (ROLL's and verl-agent's recipes,
ALFWorld's expert solutions): `assumptions` says them, and every table of results prints them.
"""

import math
import random
from dataclasses import dataclass

from rose.errors import ConfigError
from rose.simulation.workload import Trajectory, Turn
from rose.simulation.workloads.lengths import Amount, LogNormal, whole


@dataclass(frozen=True, slots=True)
class Environment:
    """Episodes of one environment. Samples of a prompt share its difficulty: the long ones come in
    groups, and so do groups whose scores are all equal.

    solved: mean share of episodes that reach the goal; they end early, in `solved_turns` of the
    turns that others take. spread: of prompts' difficulty, 0 (all alike) to 1 (each is always or
    never solved). Raises ConfigError for figures that cannot be.
    """

    name: str
    prompt: Amount
    turns: Amount
    observed: Amount
    output: Amount
    environment_s: Amount
    reward_s: float = 0.0
    shared_tokens: int = 0
    solved: float = 0.5
    solved_turns: float = 0.6
    spread: float = 0.5
    max_context: int = 32_768
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ("solved", "solved_turns", "spread"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"{self.name}.{key} is {getattr(self, key)}; give a share")
        if not (math.isfinite(self.reward_s) and self.reward_s >= 0):
            raise ConfigError(f"{self.name}.reward_s is {self.reward_s}; give 0 or more seconds")

    def trajectory(self, seed: int, prompt: int, sample: int) -> Trajectory:
        """The same episode for the same three numbers."""
        task = random.Random(f"rose-task/{self.name}/{seed}/{prompt}")  # noqa: S311 - a load
        rng = random.Random(f"rose-episode/{self.name}/{seed}/{prompt}/{sample}")  # noqa: S311
        solves, tokens = self._chance(task), whole(self.prompt, task)
        solved = rng.random() < solves
        # Two draws, of the task and of the episode, half of the logarithm's deviation each.
        count = math.sqrt(self.turns.sample(task) * self.turns.sample(rng))
        turns, context = list[Turn](), 0
        for number in range(max(1, round(count * (self.solved_turns if solved else 1.0)))):
            observed = tokens if number == 0 else whole(self.observed, rng)
            output = whole(self.output, rng)
            if turns and context + observed + output > self.max_context:
                break
            context += observed + output
            turns.append(Turn(observed, output, self.environment_s.sample(rng), self.name))
        last = turns[-1]
        turns[-1] = Turn(last.observed_tokens, last.output_tokens)
        return Trajectory(
            tuple(turns), self.reward_s, min(self.shared_tokens, tokens), float(solved)
        )

    def _chance(self, task: random.Random) -> float:
        """Share of a prompt's samples that are solved: a beta of mean `solved`."""
        if self.spread <= 0 or self.solved in (0, 1):
            return self.solved
        if self.spread >= 1:
            return float(task.random() < self.solved)
        weight = 1 / self.spread - 1
        return task.betavariate(self.solved * weight, (1 - self.solved) * weight)


FROZEN_LAKE = Environment(
    name="frozen_lake",
    prompt=LogNormal(620, 0.05, least=400, most=1_000),
    turns=LogNormal(7, 0.6, least=1, most=20),
    observed=LogNormal(110, 0.1, least=60, most=200),
    output=LogNormal(420, 0.9, least=24, most=4_096),
    environment_s=LogNormal(0.05, 0.8, least=0.002, most=2.0),
    shared_tokens=620,
    solved=0.55,
    assumptions=(
        "FrozenLake: 7 turns at the median and at most 20, 420 output tokens a turn (log-normal, "
        "sigma 0.9, at most 4,096), 110 tokens observed, 50 ms of environment",
    ),
)
ALFWORLD = Environment(
    name="alfworld",
    prompt=LogNormal(1_400, 0.15, least=800, most=2_048),
    turns=LogNormal(22, 0.55, least=3, most=50),
    observed=LogNormal(220, 0.4, least=40, most=1_024),
    output=LogNormal(260, 0.8, least=16, most=2_048),
    environment_s=LogNormal(0.8, 0.9, least=0.05, most=30.0),
    shared_tokens=900,
    solved=0.5,
    assumptions=(
        "ALFWorld: 22 turns at the median and at most 50, 260 output tokens a turn (log-normal, "
        "sigma 0.8, at most 2,048), 220 tokens observed, 0.8 s of environment (at most 30 s)",
    ),
)
