"""Which block runs when: seeded, randomised inside each round. Pure.

cell    one busy target and one kind of traffic
round   one segment of arrivals, replayed in every arm of the cell, in random order; before it
        each guest alone, with the host's load off
event   windows with the same arrivals: alone, then with a weight apply, a kill, a start
"""

import math
import random
from dataclasses import dataclass
from typing import Literal

Guest = Literal["none", "rose", "naive"]
EVENTS = ("weight_apply", "guest_kill", "guest_start")
# Between blocks: streams fill up before the load begins, and the host runs empty after it.
BLOCK_OVERHEAD_S = 1.2


@dataclass(frozen=True, slots=True)
class Arm:
    """Who shares the host's core, and under which rules."""

    name: str
    guest: Guest
    policy: str | None = None
    slack_share: float | None = None


ALONE, ALONE_AGAIN = Arm("alone", "none"), Arm("alone_again", "none")
NAIVE = Arm("naive", "naive")
ROSE_ARMS = tuple(
    Arm(f"{policy}-{share}", "rose", policy, share)
    for policy in ("paper", "adaptive")
    for share in (0.0, 0.7)
)
ARMS = (ALONE, ALONE_AGAIN, NAIVE, *ROSE_ARMS)
# The guests with the host's load off: what they make of an idle core.
IDLE_ROSE = Arm("guest_alone", "rose", "adaptive", 0.0)
IDLE_NAIVE = Arm("naive_alone", "naive")
WARM_UP = Arm("warm_up", "rose", "adaptive", 0.0)
CALIBRATION = Arm("calibration", "none")
EVENT_ALONE = Arm("event_alone", "none")
EVENT_ARMS = tuple(Arm(event, "rose", "adaptive", 0.0) for event in EVENTS)
ALL_ARMS = {arm.name: arm for arm in (*ARMS, IDLE_ROSE, IDLE_NAIVE, EVENT_ALONE, *EVENT_ARMS)}


@dataclass(frozen=True, slots=True)
class Cell:
    """One host load: `rate_per_s` keeps the host busy for `busy_target` of the time, alone."""

    busy_target: float
    traffic: str
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class Block:
    """One stretch of one arm. Without a cell the host has no load."""

    arm: Arm
    duration_s: float
    round: int
    segment: int
    cell: Cell | None = None


def rounds_wanted(cell: Cell, block_s: float, requests: int, least: int) -> int:
    """Rounds until every arm of the cell has seen `requests`."""
    return max(least, math.ceil(requests / (cell.rate_per_s * block_s)))


def round_s(block_s: float, idle_block_s: float) -> float:
    """Wall time of one round of a cell."""
    return len(ARMS) * (block_s + BLOCK_OVERHEAD_S) + 2 * (idle_block_s + BLOCK_OVERHEAD_S)


def fit_rounds(wanted: list[int], one_round_s: float, budget_s: float, least: int) -> list[int]:
    """As many rounds of what is wanted as the budget allows: the largest wishes shrink first."""
    rounds = list(wanted)
    while sum(rounds) * one_round_s > budget_s and max(rounds) > least:
        rounds[rounds.index(max(rounds))] -= 1
    return rounds


def make_rounds(
    cells: list[Cell], rounds: list[int], block_s: float, idle_block_s: float, seed: int
) -> list[Block]:
    """All blocks of all cells, rounds of cells interleaved so that a slow hour hits all alike."""
    rng = random.Random(f"rose-coserve/{seed}")  # noqa: S311 - an order, not a secret
    order = [(cell, number) for cell, n in zip(cells, rounds, strict=True) for number in range(n)]
    rng.shuffle(order)
    blocks = []
    for cell, number in order:
        # Segments differ between cells, so that no arrivals are measured twice as if independent.
        segment = 1_000 * (cells.index(cell) + 1) + number
        idle = [Block(arm, idle_block_s, number, 0) for arm in (IDLE_ROSE, IDLE_NAIVE)]
        arms = [Block(arm, block_s, number, segment, cell) for arm in ARMS]
        rng.shuffle(idle)
        rng.shuffle(arms)
        blocks += [*idle, *arms]
    return blocks


def make_events(cell: Cell, rounds: int, event_s: float) -> list[Block]:
    """Windows of each event. The kill comes before the start that brings the guest back."""
    return [
        Block(arm, event_s, number, number, cell)
        for number in range(rounds)
        for arm in (EVENT_ALONE, *EVENT_ARMS)
    ]
