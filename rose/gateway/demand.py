"""Demand reports of a gateway to the scheduler: the needs of its turns.

A report is sent each second, and at once when the first turn comes. The scheduler forgets a gateway
that is silent for a few seconds, and each report holds all the demand, so a lost one is not
repeated. Measured lease latencies are sent until they are acknowledged.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable

import grpc

from rose.gateway.replicas.dispatcher import Dispatcher
from rose.rpc import rose_pb2, rose_pb2_grpc

# Time constant of the flow's average, longer than a weight update or a host's burst, which pause a
# flow without ending it.
FLOW_TAU_S = 5.0
JOBS_KEPT = 64
# Callers name jobs as they like, and a report has to stay small.
JOB_CHARS = 200


class DemandMeter:
    """Meter of a gateway's demand by job: turns, tokens that they still need, and tokens a second.
    `now_s`: the dispatcher's clock.

    gateway: name that no other process has, since a report replaces the one of the same name.
    """

    def __init__(self, dispatcher: Dispatcher, gateway: str, now_s: float) -> None:
        self._dispatcher = dispatcher
        self._gateway = gateway
        self._measured_s = now_s
        dispatcher.made_tokens = Counter()
        # Tokens per second over the time in which a job had turns.
        self._flow_tok_s: dict[str, float] = {}

    def report(self, now_s: float) -> rose_pb2.DemandReport:
        """Return the demand report of all jobs that have turns now, with lease latencies that were
        not reported yet.
        """
        turns: Counter[str] = Counter()
        owed: Counter[str] = Counter()
        for job, owed_tokens in self._dispatcher.owed():
            turns[job] += 1
            owed[job] += owed_tokens
        _fold(turns, owed)
        self._measure(turns, now_s)
        return rose_pb2.DemandReport(
            gateway=self._gateway,
            jobs=[
                rose_pb2.JobDemand(
                    job=job[:JOB_CHARS],
                    turns=count,
                    owed_tokens=owed[job],
                    made_tok_s=self._flow_tok_s.get(job, 0.0),
                )
                for job, count in turns.items()
            ],
            switches=[
                rose_pb2.Switch(replica=each.replica, epoch=each.epoch, took_s=each.took_s)
                for each in self._dispatcher.switches.measured
            ],
        )

    def told(self, report: rose_pb2.DemandReport) -> None:
        """Record that the scheduler has received the report, so that its lease latencies are not
        repeated.
        """
        for each in report.switches:
            self._dispatcher.switches.told(each.replica, each.epoch)

    def _measure(self, turns: Counter[str], now_s: float) -> None:
        elapsed_s = now_s - self._measured_s
        if elapsed_s <= 0:
            return
        new, self._dispatcher.made_tokens = self._dispatcher.made_tokens or Counter(), Counter()
        self._measured_s = now_s
        share = -math.expm1(-elapsed_s / FLOW_TAU_S)
        # A job without turns keeps its figure: after a pause it continues.
        for job in turns.keys() | new.keys():
            flow_tok_s = self._flow_tok_s.pop(job, 0.0)
            self._flow_tok_s[job] = flow_tok_s + share * (new[job] / elapsed_s - flow_tok_s)
        while len(self._flow_tok_s) > JOBS_KEPT:
            del self._flow_tok_s[next(iter(self._flow_tok_s))]


def _fold(turns: Counter[str], owed: Counter[str]) -> None:
    """Add jobs beyond the `JOBS_KEPT` largest to the unnamed job, in place, since callers choose
    the names.
    """
    for job, count in turns.most_common()[JOBS_KEPT - 1 :]:
        if job:
            del turns[job]
            turns[""] += count
            owed[""] += owed.pop(job)


PERIOD_S = 1.0
CALL_TIMEOUT_S = 2.0


class DemandReporter:
    """Sender of demand reports over the connection on which the replica table is watched."""

    def __init__(
        self, meter: DemandMeter, work_began: asyncio.Event, clock: Callable[[], float]
    ) -> None:
        self._meter = meter
        self._work_began = work_began
        self._clock = clock

    async def run(self, stub: "rose_pb2_grpc.SchedulerAsyncStub") -> None:
        """Send a report each second until cancelled, and at once when the first turn comes; a
        failed report is not repeated.
        """
        while True:
            # Clear the event before the figures are read: a turn that comes while they are sent
            # counts as new.
            self._work_began.clear()
            report = self._meter.report(self._clock())
            idle = not report.jobs
            try:
                await stub.ReportDemand(report, timeout=CALL_TIMEOUT_S)
                self._meter.told(report)
            except grpc.aio.AioRpcError:
                idle = False
            await self._pause(idle)

    async def _pause(self, idle: bool) -> None:
        """Wait one period of a second; if `idle`, end the wait when the first turn comes."""
        if not idle:
            await asyncio.sleep(PERIOD_S)
            return
        try:
            async with asyncio.timeout(PERIOD_S):
                await self._work_began.wait()
        except TimeoutError:
            return
