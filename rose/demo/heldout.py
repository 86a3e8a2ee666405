"""Greedy success on lakes that neither demonstrations nor training ever show."""

import asyncio
import time
from collections.abc import Sequence

from rose.client import Sampling
from rose.demo.rollouts import TurnSource, play
from rose.demo.task import Lake
from rose.demo.trajectory import Trajectory
from rose.errors import UnavailableError

AT_ONCE = 128


async def evaluate(
    source: TurnSource, how: Sampling, lakes: Sequence[Lake], version: int, name: str
) -> list[bool]:
    """Whether `version` or a newer one crosses each lake, in the order of `lakes`.

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
