"""Conductor of the experiment: sets arm and host load block by block, and drills the faults.

It moves through the plan as the trainer's steps complete. `Drills` are the faults that every run
must survive: revocations in mid-turn and a killed guest.
"""

import asyncio
import os
import signal
import time

from msgspec.structs import asdict

from bench.common.jsonl_process import JsonlProcess
from bench.demo.plan import STORM_STEPS, ExperimentBlock, Plan
from bench.demo.report.records import BlockStats
from bench.demo.stack import GUEST, Stack, Watcher, cpu_seconds, engine_pid, replica_of
from rose.errors import UnavailableError
from rose.logs.eventlog import KEEP_ALL, EventLog, JsonlLog
from rose.rpc import rose_pb2

# Not each revocation finds the guest at work.
TRIES_A_REVOCATION = 3
WAIT_FOR_TURNS_S = 4.0
SETTLE_S = 0.15
DRILL_POLL_S = 0.01
SWITCH_TIMEOUT_S = 10.0
POLL_S = 0.02


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
            await asyncio.sleep(DRILL_POLL_S)
        self._events.write("drill_skipped", why="the guest held no turns")
        return False


class Conductor:
    """Runs the blocks of one plan; the trainer goes on until it is told to finish."""

    def __init__(self, plan: Plan, stack: Stack, watcher: Watcher, drills: Drills) -> None:
        assert stack.load is not None
        self._steps = dict.fromkeys(stack.trainers, 0)
        self.arm: str = ""
        self._plan = plan
        self._stack = stack
        self._load: JsonlProcess = stack.load
        self._watcher = watcher
        self.drills = drills
        self._blocks = JsonlLog(stack.layout.out / "blocks.jsonl", KEEP_ALL)
        self._stepped = asyncio.Condition()

    @property
    def steps_done(self) -> int:
        """Steps that every trainer has finished."""
        return min(self._steps.values())

    async def step_done(self, job: str) -> None:
        """The job's trainer finished a step."""
        async with self._stepped:
            self._steps[job] += 1
            self._stepped.notify_all()

    async def run(self) -> None:
        """Every block of the plan, then tell the trainers to finish the batch under way."""
        for block in self._plan:
            await self._run_block(block)
        await self._load.say(cmd="off")
        for trainer in self._stack.trainers.values():
            await trainer.say(cmd="finish")

    async def _run_block(self, block: ExperimentBlock) -> None:
        self.arm = "faults" if block.revocations else block.arm
        await self._set_arm(block)
        await self._set_load(block)
        start_s, start = time.monotonic(), await self._stats()
        target = block.until_step
        if block.revocations:
            # However long it takes: training goes on until every fault has happened.
            await self.drills.storm(block.revocations)
            target = self.steps_done + STORM_STEPS
        await asyncio.sleep(start_s + block.seconds - time.monotonic())
        async with self._stepped:
            await self._stepped.wait_for(lambda: self.steps_done >= target)
        end_s, end = time.monotonic(), await self._stats()
        self._blocks.write(
            {
                "block": block.block,
                "pair": block.pair,
                "arm": block.arm,
                "segment": block.segment,
                "start_s": start_s,
                "end_s": end_s,
                "start_stats": asdict(start),
                "end_stats": asdict(end),
            }
        )

    async def _set_arm(self, block: ExperimentBlock) -> None:
        lent = block.arm != "frozen"
        await self.drills.note_if_revoking(lent)
        mode = rose_pb2.HARVEST_MODE_ACTIVE if lent else rose_pb2.HARVEST_MODE_HOLD_AND_DRAIN
        await self._watcher.harvest(mode)
        deadline_s = time.monotonic() + SWITCH_TIMEOUT_S
        while True:
            guest = replica_of(await self._watcher.snapshot(), GUEST)
            if guest is not None and guest.leased == lent:
                return
            if time.monotonic() > deadline_s:
                wanted = "leased" if lent else "released"
                raise UnavailableError(
                    f"the guest was not {wanted} within {SWITCH_TIMEOUT_S:.0f} s;"
                    f" see {self._stack.layout.logs}"
                )
            await asyncio.sleep(POLL_S)

    async def _set_load(self, block: ExperimentBlock) -> None:
        if block.segment is None:
            await self._load.say(cmd="off")
        else:
            await self._load.say(
                cmd="segment", segment=block.segment, block=block.block, arm=block.arm
            )

    async def _stats(self) -> BlockStats:
        snapshot, gateway = await asyncio.gather(self._watcher.snapshot(), self._watcher.gateway())
        cpu_s = await asyncio.to_thread(cpu_seconds, self._stack.roots)
        return BlockStats(
            steps=sum(self._steps.values()),
            tokens=gateway.tokens,
            host_busy_ns=sum(host.busy_ns for host in snapshot.hosts),
            cpu_s=cpu_s,
        )
