"""Shortest time that a synchronous batch can take: that of its longest episode, alone on a card.

Turns of an episode follow each other, and a turn decodes token by token. More cards shorten a
rollout phase only down to this; what is left above it is what a policy can gain.
"""

from collections.abc import Sequence

from rose.simulation.results import StepResult
from rose.simulation.scenario import Scenario
from rose.simulation.step_times import StepTimes, StepWork
from rose.simulation.trainer import Algorithm
from rose.simulation.workload import Trajectory


def alone_s(episode: Trajectory, steps: StepTimes) -> float:
    """Seconds of an episode whose engine has nothing else to do and keeps its prefix."""
    context, passed_s = 0, episode.reward_s
    for turn in episode.turns:
        passed_s += steps.seconds(StepWork(turn.observed_tokens, 0, 1, context))
        context += turn.observed_tokens
        # The prompt's step makes the first token; the others have half of the turn behind them.
        middle = context + turn.output_tokens // 2
        passed_s += (turn.output_tokens - 1) * steps.seconds(StepWork(0, 1, 0, middle))
        context += turn.output_tokens
        passed_s += turn.environment_s
    return passed_s


def longest_alone_s(scenario: Scenario, seed: int, number: int) -> float:
    """Return the seconds that the longest episode of step `number`'s batch takes alone.

    0 for a trainer that need not wait for all of a batch: asynchronous, over-sampling, or with
    rounds for the tail.
    """
    trainer = scenario.trainer
    waits = trainer.algorithm is Algorithm.GRPO and trainer.max_staleness == 0
    if not waits or trainer.tail_batching:
        return 0.0
    first = number * trainer.groups
    return max(
        alone_s(
            scenario.rollouts.trajectory(seed, prompt, sample),
            scenario.cluster.dedicated.engine.steps,
        )
        for prompt in range(first, first + trainer.groups)
        for sample in range(trainer.samples)
    )


def most_gain(steps: Sequence[StepResult], alone: Sequence[float]) -> float:
    """Return the largest speed-up of these steps by shorter rollouts alone; 0: unknown.

    alone: of each step, the seconds of `longest_alone_s`.
    """
    if not all(alone):
        return 0.0
    took_s = sum(step.ended_s - step.started_s for step in steps)
    least_s = sum(
        min(longest_s, step.rollout_s) + step.train_s + step.sync_s
        for step, longest_s in zip(steps, alone, strict=True)
    )
    return took_s / least_s if least_s else 0.0
