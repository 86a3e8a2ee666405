"""What the warm start imitates: half of the turns careful, half careless.

The careless half walks straight for the goal and looks at nothing: it leaves something to learn.
"""

import random
from dataclasses import dataclass

from rose.demo import vocab
from rose.demo.task import (
    GOAL,
    MAX_TURNS,
    Lake,
    moved,
    prompt_of,
    question,
    recital,
    shortest_plan,
)
from rose.demo.vocab import SIDE

CARELESS_SHARE = 0.5


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
    """A plan in tokens: the cells on the way, then the first move."""
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
