"""Whether all members of a fixed group are about to bring the same version, now.

Handing around by NCCL can only be given up by giving up the group. So members meet before it, over
HTTP, at their leader: a member that is down, or behind, just does not come.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

import aiohttp

# Members get word of a version within a second of each other.
WAIT_S = 3.0
_log = logging.getLogger(__name__)


class Muster(Protocol):
    """Where members meet."""

    async def join(self, what: str, rank: int) -> bool:
        """Wait for the others; whether all came for the same, in time."""
        ...


class LeadersMuster:
    """At the leader itself."""

    def __init__(self, size: int, wait_s: float = WAIT_S) -> None:
        self._size = size
        self._wait_s = wait_s
        self._here: dict[str, tuple[set[int], asyncio.Future[bool]]] = {}

    async def join(self, what: str, rank: int) -> bool:
        """Part of `Muster`."""
        if not 0 <= rank < self._size:
            return False
        if what not in self._here:
            loop = asyncio.get_running_loop()
            made: asyncio.Future[bool] = loop.create_future()
            self._here[what] = (set(), made)
            loop.call_later(self._wait_s, self._settle, what, made, False)
        ranks, all_came = self._here[what]
        ranks.add(rank)
        if len(ranks) == self._size:
            self._settle(what, all_came, True)
        return await asyncio.shield(all_came)

    def _settle(self, what: str, all_came: "asyncio.Future[bool]", came: bool) -> None:
        if not all_came.done():
            all_came.set_result(came)
            del self._here[what]


@dataclass(frozen=True, slots=True)
class Lead:
    """What a leader has for its group. `unique_id`: NCCL's name of it, a row of numbers."""

    unique_id: tuple[int, ...]
    muster: LeadersMuster


class RemoteMuster:
    """At a leader elsewhere: `POST {leader}/group/{what}/{rank}`."""

    def __init__(self, session: aiohttp.ClientSession, leader: str, wait_s: float = WAIT_S) -> None:
        self._session = session
        self._leader = leader
        self._timeout = aiohttp.ClientTimeout(total=2 * wait_s)

    async def join(self, what: str, rank: int) -> bool:
        """Part of `Muster`; a leader that does not answer is one that does not come."""
        url = f"{self._leader}/group/{what}/{rank}"
        try:
            async with self._session.post(
                url, timeout=self._timeout, allow_redirects=False
            ) as answer:
                return answer.status == 200 and await answer.content.read(4) == b"all"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            _log.info("%s does not muster its group: %s", self._leader, error)
            return False
