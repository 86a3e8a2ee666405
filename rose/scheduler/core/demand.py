"""Demand of the jobs, as the gateways report it.

Gateways report turns, the tokens that these turns still owe, and the present rate of tokens. An
agent's next turn begins when the last one ended, so the tokens that turns in flight owe are a small
part of a job's work. The rest is unknown: work that has gone on for t seconds is expected to go on
for t more, at its present rate. Pauses shorter than `PAUSE_S`, as trainers make
between rounds of rollouts, do not end it.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from elastic_scheduler import JobDemand
from rose.errors import RefusedError
from rose.scheduler.core.limits import MAX_SUM, Name, Sum, Text

# A gateway reports every second: one that was silent for this long is gone, and its turns with it.
REPORT_TTL_S = 5.0
PAUSE_S = 30.0
MOST_WORK_S = 3_600.0
GATEWAYS_KEPT = 1_024


@dataclass(frozen=True, slots=True)
class JobFigures:
    """Number of a job's turns, tokens that they still owe, and tokens per second now.

    The figures are one gateway's or the sum of all. job: "" for turns that name none.
    """

    job: Text
    turns: int = 0
    owed_tokens: Sum = 0.0
    made_tok_s: Sum = 0.0

    def cleaned(self) -> "JobFigures":
        """Return the figures without invalid values; each turn owes at least one token."""
        if self.turns <= 0:
            return JobFigures(self.job)
        owed_tokens = max(float(self.turns), _figure(self.owed_tokens))
        return JobFigures(self.job, self.turns, owed_tokens, _figure(self.made_tok_s))


@dataclass(frozen=True, slots=True)
class Switched:
    """Gateway's measurement: seconds from the lease `epoch` to its first token, less idle time."""

    replica: Name
    epoch: int
    took_s: Sum


@dataclass(slots=True)
class _Work:
    """Times at which a job's work began and was last seen."""

    since_s: float
    seen_s: float


class DemandBook:
    """Newest demand report of each gateway. Times are monotonic seconds passed in.

    Nothing is stored: until gateways report to a new scheduler, demand is unknown.
    """

    def __init__(self, ttl_s: float = REPORT_TTL_S) -> None:
        self._ttl_s = ttl_s
        # Each gateway's last report: its time and its jobs.
        self._reports: dict[str, tuple[float, tuple[JobFigures, ...]]] = {}
        self._work: dict[str, _Work] = {}
        self._known = False

    @property
    def gateways(self) -> Collection[str]:
        """Names of the gateways whose reports are kept."""
        return self._reports.keys()

    def hear(self, gateway: str, jobs: Iterable[JobFigures], now_s: float) -> None:
        """Replace a gateway's report of its jobs' turns and owed tokens.

        Raises `RefusedError` for more than 1,024 gateways.
        """
        self.drop_silent(now_s)
        if gateway not in self._reports and len(self._reports) >= GATEWAYS_KEPT:
            raise RefusedError(
                f"{GATEWAYS_KEPT} gateways report already; stop those that are not needed"
            )
        self._known = True
        self._reports.pop(gateway, None)
        self._reports[gateway] = (now_s, tuple(each.cleaned() for each in jobs))

    def figures(self, job: str, now_s: float, *, alone: bool = True) -> JobFigures | None:
        """Return the sum of all live gateways' reports of a job; None before any gateway reported.

        alone: it is the only job, so all turns are counted, whatever job they name.
        """
        if not self._known:
            return None
        live = (said for heard_s, said in self._reports.values() if now_s < heard_s + self._ttl_s)
        return _sum(job, (each for said in live for each in said if alone or each.job == job))

    def demand(self, job: str, step: int, now_s: float, *, alone: bool = True) -> JobDemand:
        """Return a job's turns and expected tokens for the lease policy; infinite until any report.

        Expected tokens are those owed, plus the present rate times the time for which the work has
        gone on, up to an hour. Records that the work goes on. step: the job's newest version.
        """
        figures = self.figures(job, now_s, alone=alone)
        if figures is None:
            return JobDemand(job, step=step)
        if not figures.turns:
            return JobDemand(job, 0.0, 0.0, step)
        work = self._work.get(job)
        if work is None or now_s >= work.seen_s + PAUSE_S:
            work = self._work[job] = _Work(now_s, now_s)
        work.seen_s = now_s
        to_come = figures.made_tok_s * min(MOST_WORK_S, now_s - work.since_s)
        return JobDemand(job, figures.turns, figures.owed_tokens + to_come, step)

    def forget(self, job: str) -> None:
        """Delete the time at which an ended job's work began."""
        self._work.pop(job, None)

    def drop_silent(self, now_s: float) -> None:
        """Delete the reports of gateways that were silent for 5 s."""
        # Oldest first: a report that is replaced moves to the end.
        for gateway, (heard_s, _) in list(self._reports.items()):
            if now_s < heard_s + self._ttl_s:
                break
            del self._reports[gateway]

    def __len__(self) -> int:
        return len(self._reports)


def _sum(job: str, figures: Iterable[JobFigures]) -> JobFigures:
    each = tuple(figures)
    return JobFigures(
        job,
        sum(one.turns for one in each),
        sum(one.owed_tokens for one in each),
        sum(one.made_tok_s for one in each),
    )


def _figure(value: float) -> float:
    return min(value, MAX_SUM) if 0.0 <= value < math.inf else 0.0
