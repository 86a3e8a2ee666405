"""Demonstrations for the warm start, and the evaluation on held-out lakes.

Half of the demonstrated turns are careful, half careless. The careless half walks straight for the
goal and looks at nothing: it leaves something to learn. The evaluation is greedy success on lakes
that neither demonstrations nor training ever show.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.task import (
    GOAL,
    MAX_TURNS,
    Lake,
    moved,
    prompt_of,
    question,
    recital,
    shortest_plan,
)
from bench.demo.frozen_lake.vocab import SIDE
from bench.demo.training.rollouts import Trajectory, play
from rose.client import RolloutClient, Sampling
from rose.errors import UnavailableError

CARELESS_SHARE = 0.5
AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Tokens of an episode; `learned[i]` says whether token i is a reply's."""

    tokens: list[int]
    learned: list[bool]


def demonstrate(lake: Lake, rng: random.Random, long_turns: bool) -> Demonstration:
    """Play one episode."""
    tokens = prompt_of(lake)
    learned = [False] * len(tokens)
    position = 0
    for _ in range(MAX_TURNS):
        asked = question(lake, position)
        moves = _plan(lake, position, rng)
        reply = [*(recital(lake) if long_turns else ()), *spoken(lake, position, moves)]
        tokens += asked + reply
        learned += [False] * len(asked) + [True] * len(reply)
        position = moved(position, moves[0])
        if lake[position] in "HG":
            break
    return Demonstration(tokens, learned)


def spoken(lake: Lake, position: int, moves: list[int]) -> list[int]:
    """Return a plan in tokens: the cells on the way, then the first move."""
    cells = []
    at = position
    for move in moves:
        at = moved(at, move)
        cells.append(vocab.cell_id(at, lake[at]))
    return [*cells, vocab.THEN_ID, vocab.MOVE_IDS[moves[0]], vocab.STOP_ID]


def _plan(lake: Lake, position: int, rng: random.Random) -> list[int]:
    if rng.random() < CARELESS_SHARE:
        return _beeline(position, rng)
    careful = shortest_plan(lake, position, rng)
    return careful or _beeline(position, rng)


def _beeline(position: int, rng: random.Random) -> list[int]:
    row, column = divmod(position, SIDE)
    goal_row, goal_column = divmod(GOAL, SIDE)
    moves = [1] * (goal_row - row) + [2] * (goal_column - column)
    rng.shuffle(moves)
    return moves


async def evaluate(
    source: RolloutClient, how: Sampling, lakes: Sequence[Lake], version: int, name: str
) -> list[bool]:
    """Return, in the order of `lakes`, True for each that `version` or a newer one crosses.

    Raises UnavailableError when a turn could not be generated: the figure would be a guess.
    """
    free = asyncio.Semaphore(AT_ONCE)
    played = [Trajectory(f"{name}-{at}", at, 0, time.monotonic()) for at in range(len(lakes))]

    async def cross(lake: Lake, one: Trajectory) -> None:
        async with free:
            await play(source, lake, how, one, version)

    await asyncio.gather(*map(cross, lakes, played))
    if any(one.lost for one in played):
        raise UnavailableError(f"the {name} evaluation lost turns; see the gateway's log")
    return [one.reward > 0 for one in played]
