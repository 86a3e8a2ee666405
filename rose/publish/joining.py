"""How a fixed group of GPUs comes together: its leader names it, all join under that name."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import aiohttp
import msgspec
from msgspec import Meta

from rose.publish.fanout import Communicator, Fanout, NcclCommunicator
from rose.publish.group import FixedGroup
from rose.publish.muster import Lead, LeadersMuster, Muster, RemoteMuster

ASK_S = 1.0
MOST_NUMBERS = 1_024
MOST_NAME_BYTES = 8 << 10

_read_name = msgspec.json.Decoder(Annotated[tuple[int, ...], Meta(max_length=MOST_NUMBERS)]).decode

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
            async with session.get(
                f"{leader}/group", timeout=timeout, allow_redirects=False
            ) as answer:
                if answer.status == 200:
                    name: tuple[int, ...] = _read_name(await _at_most(answer, MOST_NAME_BYTES))
                    return name
        except (aiohttp.ClientError, OSError, ValueError):
            pass  # It starts when it starts: weights come over HTTP meanwhile.
        await asyncio.sleep(ASK_S)


async def _at_most(answer: aiohttp.ClientResponse, size: int) -> bytes:
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > size:
            raise ValueError(f"an answer of more than {size} bytes")
    return bytes(body)
