"""Greedy success on lakes that neither demonstrations nor training ever show."""

import asyncio
import time

from rose.client import Sampling
from rose.demo.rollouts import TurnSource, play
from rose.demo.task import held_out_lakes
from rose.demo.trajectory import Trajectory
from rose.errors import UnavailableError


async def evaluate(source: TurnSource, how: Sampling, maps: int, version: int, name: str) -> float:
    """Share of `maps` held-out lakes crossed by `version` or a newer one, all played at once.

    Raises UnavailableError when a turn could not be generated: the figure would be a guess.
    """
    lakes = held_out_lakes(maps)
    played = [Trajectory(f"{name}-{at}", at, 0, time.monotonic()) for at in range(maps)]
    await asyncio.gather(
        *(play(source, lake, how, one, version) for lake, one in zip(lakes, played, strict=True))
    )
    if any(one.lost for one in played):
        raise UnavailableError(f"the {name} evaluation lost turns; see the gateway's log")
    return sum(one.reward > 0 for one in played) / maps
