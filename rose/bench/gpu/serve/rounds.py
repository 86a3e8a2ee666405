"""Rounds of all arms, each in an order of its own, for as long as there is time."""

import random
import time
from collections.abc import Sequence

from rose.bench.coserve.plan import ARMS, IDLE_NAIVE, IDLE_ROSE, Block, Cell
from rose.bench.coserve.records import BlockRecord
from rose.bench.gpu.serve.needs import ANALYSIS_S
from rose.bench.gpu.serve.session import ServingSession
from rose.bench.gpu.serve.sizes import ServingSizes


def round_of(cell: Cell, segment: int, number: int, sizes: ServingSizes) -> list[Block]:
    """Every arm with the same arrivals, and each guest without host load, in random order."""
    name = f"rose-serving/{sizes.seed}/{cell.busy_target}/{cell.traffic}/{number}"
    rng = random.Random(name)  # noqa: S311 - an order, not a secret
    blocks = [Block(arm, sizes.idle_s, number, 0) for arm in (IDLE_ROSE, IDLE_NAIVE)]
    blocks += [Block(arm, sizes.arm_s, number, segment, cell) for arm in ARMS]
    rng.shuffle(blocks)
    return blocks


async def play_rounds(
    session: ServingSession, cell: Cell, segments: Sequence[int], until_s: float
) -> list[BlockRecord]:
    """At least one round, then others while the longest so far would still end by `until_s`."""
    records: list[BlockRecord] = []
    longest_s = 0.0
    for number, segment in enumerate(segments):
        began_s = time.monotonic()
        if records and began_s + longest_s + ANALYSIS_S > until_s:
            break
        blocks = round_of(cell, segment, number, session.sizes)
        records += [await session.play(block) for block in blocks]
        longest_s = max(longest_s, time.monotonic() - began_s)
    return records
