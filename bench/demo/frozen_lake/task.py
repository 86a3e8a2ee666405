"""FrozenLake 4x4 as a conversation: gymnasium's environment, read and written in tokens."""

import random
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2s
from typing import Literal

import gymnasium

from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.vocab import SIDE
from rose.errors import RoseError

SAFE_SHARE = 0.7
MAX_TURNS = 8
CELLS = SIDE * SIDE
GOAL = CELLS - 1
PLAN_TOKENS = 10
REPLY_TOKENS = PLAN_TOKENS + 4
LONG_TURN_TOKENS = 2 * CELLS
LONG_REPLY_TOKENS = LONG_TURN_TOKENS + REPLY_TOKENS
SPLIT_PARTS = 8
HELD_OUT_TRIES = 20_000
HELD_OUT_SEEDS = 3_000_000_000
TRAINING_SEEDS = 2_000_000_000
GROUPS_OF_A_SEED = 100_000
_STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))  # left, down, right, up

Lake = str
"""16 cells, row-major, one of S F H G each."""

Split = Literal["training", "validation", "held-out"]


def moved(position: int, move: int) -> int:
    """Return the cell after a move, which never leaves the lake."""
    row, column = divmod(position, SIDE)
    down, right = _STEPS[move]
    row = min(max(row + down, 0), SIDE - 1)
    column = min(max(column + right, 0), SIDE - 1)
    return row * SIDE + column


def shortest_plan(lake: Lake, start: int, rng: random.Random | None = None) -> list[int] | None:
    """Return the moves of a shortest safe way to the goal, None when there is none.

    `rng` picks among equally short ways.
    """
    before: dict[int, tuple[int, int]] = {start: (-1, -1)}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        if here == GOAL:
            return _walk_back(before, here)
        moves = [0, 1, 2, 3]
        if rng:
            rng.shuffle(moves)
        for move in moves:
            there = moved(here, move)
            if there not in before and lake[there] != "H":
                before[there] = (here, move)
                queue.append(there)
    return None


def _walk_back(before: dict[int, tuple[int, int]], here: int) -> list[int]:
    plan: list[int] = []
    while before[here][0] >= 0:
        here, move = before[here]
        plan.append(move)
    return plan[::-1]


def random_lake(seed: int, split: Split = "training") -> Lake:
    """Return a lake of the split that can be crossed within the turns of an episode."""
    rng = random.Random(seed)  # noqa: S311 - a puzzle, not a secret
    while True:
        cells = ["F" if rng.random() < SAFE_SHARE else "H" for _ in range(CELLS)]
        cells[0], cells[GOAL] = "S", "G"
        lake = "".join(cells)
        plan = shortest_plan(lake, 0)
        if plan is not None and len(plan) <= MAX_TURNS and split_of(lake) == split:
            return lake


def split_of(lake: Lake) -> Split:
    """Return a lake's use: two parts of eight for the claim, one for the warm start's choice.

    There are fewer than four thousand lakes: other seeds alone would not do, nearly every lake is
    met in training. Validation is apart from the claim's lakes, or choosing would flatter it.
    """
    part = blake2s(lake.encode()).digest()[0] % SPLIT_PARTS
    if part < 2:
        return "held-out"
    return "validation" if part == 2 else "training"


def different_lakes(count: int, split: Split) -> list[Lake]:
    """Return the first `count` different lakes of a split, the same in every run."""
    found: dict[Lake, None] = {}
    for seed in range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + HELD_OUT_TRIES):
        found[random_lake(seed, split)] = None
        if len(found) == count:
            return list(found)
    raise RoseError(f"{count} {split} lakes are more than there are; ask for {len(found)} or fewer")


def training_lake(seed: int, group: int) -> Lake:
    """Return the lake of a group in the run with this seed."""
    return random_lake(TRAINING_SEEDS + seed * GROUPS_OF_A_SEED + group)


def prompt_of(lake: Lake) -> list[int]:
    """Return the map as the first tokens of every prompt."""
    return [*(vocab.cell_id(at, lake[at]) for at in range(CELLS)), vocab.BAR_ID]


def question(lake: Lake, position: int) -> list[int]:
    """Return the tokens that state the position and ask for a move."""
    return [vocab.cell_id(position, lake[position]), vocab.ASK_ID]


def recital(lake: Lake) -> list[int]:
    """Return the lake by rows and by columns, which a long turn recites."""
    rows = list(range(CELLS))
    columns = [row * SIDE + column for column in range(SIDE) for row in range(SIDE)]
    return [vocab.cell_id(at, lake[at]) for at in (*rows, *columns)]


def parse_move(reply: list[int]) -> int | None:
    """Return the move at the end of a reply, None for a malformed reply."""
    if len(reply) < 3 or reply[-1] != vocab.STOP_ID or reply[-3] != vocab.THEN_ID:
        return None
    return vocab.MOVE_IDS.index(reply[-2]) if reply[-2] in vocab.MOVE_IDS else None


@dataclass(slots=True)
class Episode:
    """One trajectory in the lake. `tokens` is the whole conversation so far."""

    lake: Lake
    tokens: list[int] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0
    done: bool = False
    _env: "gymnasium.Env[int, int]" = field(init=False)

    def __post_init__(self) -> None:
        rows = [self.lake[at : at + SIDE] for at in range(0, CELLS, SIDE)]
        self._env = gymnasium.make(
            "FrozenLake-v1", desc=rows, is_slippery=False, disable_env_checker=True
        )
        position, _ = self._env.reset()
        self.tokens = [*prompt_of(self.lake), *question(self.lake, int(position))]

    def reply(self, reply: list[int]) -> None:
        """Take the policy's turn; a malformed one ends the episode without reward."""
        self.tokens += reply
        self.turns += 1
        move = parse_move(reply)
        if move is None:
            self.done = True
            return
        position, reward, terminated, truncated, _ = self._env.step(move)
        self.reward += float(reward)
        self.done = terminated or truncated or self.turns >= MAX_TURNS
        if not self.done:
            self.tokens += question(self.lake, int(position))
