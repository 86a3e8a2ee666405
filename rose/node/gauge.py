"""What an engine without a control page says about itself, asked now and then."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from rose.errors import UnavailableError
from rose.node.replica_client import ReplicaClient

INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Turns on the engine and tokens since it started."""

    running: int = 0
    waiting: int = 0
    tokens_total: int = 0


class Gauge:
    """Keeps the last reading; an engine that does not answer has an empty one."""

    def __init__(self, client: ReplicaClient, is_up: Callable[[], bool]) -> None:
        self.reading = Reading()
        self._client = client
        self._is_up = is_up

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.reading = await self._read() if self._is_up() else Reading()
            await asyncio.sleep(INTERVAL_S)

    async def _read(self) -> Reading:
        # Telemetry only: whether the engine obeys is judged where it is told something.
        with contextlib.suppress(UnavailableError):
            state = await self._client.state()
            return Reading(state.running, state.waiting, state.tokens_total)
        return Reading()
