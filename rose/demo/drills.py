"""The faults that every run must survive: revocations in mid-turn and a killed guest."""

import asyncio
import os
import signal
import time

from rose.demo.stack import GUEST, Stack
from rose.demo.usage import engine_pid
from rose.demo.watcher import Watcher, replica_of
from rose.eventlog import EventLog

# Not each revocation finds the guest at work.
TRIES_A_REVOCATION = 3
WAIT_FOR_TURNS_S = 4.0
SETTLE_S = 0.15
POLL_S = 0.01


class Drills:
    """Takes the guest away while it works. `revocations` counts those that hit live turns."""

    def __init__(self, stack: Stack, watcher: Watcher, events: EventLog) -> None:
        self.revocations = 0
        self.kills = 0
        self._stack = stack
        self._watcher = watcher
        self._events = events

    async def note_if_revoking(self, lent: bool) -> None:
        """The next change of arm takes the guest from live turns: that is a revocation too."""
        if not lent and await self._live_turns():
            self._revoked("hold and drain")

    async def storm(self, revocations: int) -> None:
        """Revoke so often, each time in mid-turn, then kill the guest with SIGKILL."""
        done = 0
        for _ in range(TRIES_A_REVOCATION * revocations):
            if done == revocations:
                break
            if not await self._guest_is_at_work():
                continue
            self._revoked("drill")
            await self._watcher.revoke(GUEST, "drill")
            await asyncio.sleep(SETTLE_S)
            done += 1
        if await self._guest_is_at_work():
            self._kill()

    def _kill(self) -> None:
        pid = engine_pid(self._stack.roots, GUEST)
        if pid is None:
            self._events.write("guest_kill_failed", why="no guest process found")
            return
        # The engine leads its process group: API process and engine core go down together.
        os.killpg(pid, signal.SIGKILL)
        self.kills += 1
        self._events.write("guest_killed", signal=int(signal.SIGKILL), pid=pid)

    def _revoked(self, why: str) -> None:
        self.revocations += 1
        self._events.write("forced_revocation", replica=GUEST, why=why)

    async def _live_turns(self) -> int:
        return (await self._watcher.gateway()).live_turns.get(GUEST, 0)

    async def _guest_is_at_work(self) -> bool:
        """Wait until the guest is leased and holds turns that have produced tokens."""
        deadline_s = time.monotonic() + WAIT_FOR_TURNS_S
        while time.monotonic() < deadline_s:
            guest = replica_of(await self._watcher.snapshot(), GUEST)
            if guest is not None and guest.leased and await self._live_turns():
                await asyncio.sleep(SETTLE_S)
                if await self._live_turns():
                    return True
            await asyncio.sleep(POLL_S)
        self._events.write("drill_skipped", why="the guest held no turns")
        return False
