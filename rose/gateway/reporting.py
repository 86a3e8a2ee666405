"""Tells the scheduler what turns need: each second, and at once when the first turn comes.

The scheduler forgets a gateway that is silent for a few seconds, and the next report says all there
is, so one that is lost is not repeated. Measured switches are sent until they are taken.
"""

import asyncio
from collections.abc import Callable

import grpc

from rose.gateway.demand import DemandMeter
from rose.gateway.dispatcher import EventSink
from rose.rpc import rose_pb2_grpc

PERIOD_S = 1.0
CALL_TIMEOUT_S = 2.0


class DemandReporter:
    """Reports over whatever connection the table is watched on."""

    def __init__(
        self,
        meter: DemandMeter,
        work_began: asyncio.Event,
        clock: Callable[[], float],
        on_event: EventSink,
    ) -> None:
        self._meter = meter
        self._work_began = work_began
        self._clock = clock
        self._on_event = on_event

    async def run(self, stub: "rose_pb2_grpc.SchedulerAsyncStub") -> None:
        """Until cancelled, or until it is clear that this scheduler takes no reports."""
        while True:
            # Before the figures are read: a turn that comes while they are sent counts as news.
            self._work_began.clear()
            report = self._meter.report(self._clock())
            idle = not report.jobs
            try:
                await stub.ReportDemand(report, timeout=CALL_TIMEOUT_S)
                self._meter.told(report)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    self._on_event("demand_not_taken", reason="the scheduler is an older one")
                    return
                idle = False
            await self._pause(idle)

    async def _pause(self, idle: bool) -> None:
        """One period; less when the scheduler believes that there are no turns and one comes."""
        if not idle:
            await asyncio.sleep(PERIOD_S)
            return
        try:
            async with asyncio.timeout(PERIOD_S):
                await self._work_began.wait()
        except TimeoutError:
            return
