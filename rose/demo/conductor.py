"""Plays the plan: sets arm and host load block by block as the trainer's steps complete."""

import asyncio
import time

from rose.demo.drills import Drills
from rose.demo.plan import STORM_STEPS, Block, Plan
from rose.demo.records import BlockStats
from rose.demo.stack import GUEST, Stack
from rose.demo.usage import cpu_seconds
from rose.demo.watcher import Watcher, replica_of
from rose.errors import UnavailableError
from rose.eventlog import KEEP_ALL, JsonlLog
from rose.rpc import rose_pb2
from rose.talker import Talker

SWITCH_TIMEOUT_S = 10.0
POLL_S = 0.02


class Conductor:
    """Runs the blocks of one plan; the trainer goes on until it is told to finish."""

    def __init__(
        self,
        plan: Plan,
        stack: Stack,
        watcher: Watcher,
        drills: Drills,
    ) -> None:
        assert stack.load is not None
        self.steps_done = 0
        self.arm: str = ""
        self._plan = plan
        self._stack = stack
        self._load: Talker = stack.load
        self._watcher = watcher
        self._drills = drills
        self._blocks = JsonlLog(stack.layout.out / "blocks.jsonl", KEEP_ALL)
        self._stepped = asyncio.Condition()

    async def step_done(self) -> None:
        """The trainer finished a step."""
        async with self._stepped:
            self.steps_done += 1
            self._stepped.notify_all()

    async def run(self) -> None:
        """Every block of the plan, then tell the trainer to finish the batch under way."""
        assert self._stack.trainer is not None
        for block in self._plan.blocks:
            await self._run_block(block)
        await self._load.say(cmd="off")
        await self._stack.trainer.say(cmd="finish")

    async def _run_block(self, block: Block) -> None:
        self.arm = "faults" if block.revocations else block.arm
        await self._set_arm(block)
        await self._set_load(block)
        start_s, start = time.monotonic(), await self._stats()
        target = block.until_step
        if block.revocations:
            # However long it takes: training goes on until every fault has happened.
            await self._drills.storm(block.revocations)
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
                "start_stats": _plain(start),
                "end_stats": _plain(end),
            }
        )

    async def _set_arm(self, block: Block) -> None:
        lent = block.arm != "frozen"
        await self._drills.note_if_revoking(lent)
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

    async def _set_load(self, block: Block) -> None:
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
            steps=self.steps_done,
            tokens=gateway.tokens,
            host_busy_ns=sum(host.busy_ns for host in snapshot.hosts),
            cpu_s=cpu_s,
        )


def _plain(stats: BlockStats) -> dict[str, object]:
    return {name: getattr(stats, name) for name in stats.__struct_fields__}
