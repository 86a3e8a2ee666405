"""How a fixed group of GPUs comes together: its leader names it, all join under that name."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from rose.publish.fanout import Communicator, Fanout, NcclCommunicator
from rose.publish.group import FixedGroup
from rose.publish.muster import Lead, LeadersMuster, Muster, RemoteMuster

ASK_S = 1.0
MOST_NUMBERS = 1_024

MakeCommunicator = Callable[[int, int, tuple[int, ...], int], Communicator]


@dataclass(frozen=True, slots=True)
class Membership:
    """Rank 0 leads. `leader`: its relay's address; `device`: the CUDA ordinal of this member."""

    rank: int
    size: int
    leader: str
    device: int = 0


def lead(size: int) -> Lead:
    """What rank 0 needs. Raises ConfigError without CuPy and a GPU."""
    return Lead(NcclCommunicator.new_id(), LeadersMuster(size))


async def join_group(
    session: aiohttp.ClientSession,
    mine: Membership,
    leading: Lead | None = None,
    make: MakeCommunicator = NcclCommunicator,
) -> FixedGroup:
    """Return once all members have joined; `leading` is the leader's own. Until then, no group."""
    muster: Muster
    if leading is not None:
        name, muster = leading.unique_id, leading.muster
    else:
        name, muster = await _named(session, mine.leader), RemoteMuster(session, mine.leader)
    communicator = await asyncio.to_thread(make, mine.rank, mine.size, name, mine.device)
    return FixedGroup(Fanout(communicator), muster)


async def _named(session: aiohttp.ClientSession, leader: str) -> tuple[int, ...]:
    """Ask until the leader is up."""
    timeout = aiohttp.ClientTimeout(total=5 * ASK_S)
    while True:
        try:
            async with session.get(f"{leader}/group", timeout=timeout) as answer:
                if answer.status == 200:
                    numbers = await answer.json()
                    if isinstance(numbers, list) and len(numbers) <= MOST_NUMBERS:
                        return tuple(int(number) for number in numbers)
        except (aiohttp.ClientError, OSError, ValueError, TypeError):
            pass  # It starts when it starts: weights come over HTTP meanwhile.
        await asyncio.sleep(ASK_S)
