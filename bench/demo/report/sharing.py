"""Shares of several jobs in the guest, from the scheduler's events on its leases.

    lease_granted ──> lease_released, revoked or lease_expired       time of the lease's job

Only blocks count in which the guest was lent and every job wanted it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from bench.demo.report import measures
from bench.demo.report.records import (
    ENGINE_SWITCHED,
    FIRST_TOKEN,
    LEASE_ENDS,
    LEASE_GRANTED,
    Records,
)

BORROWED = "guest"
ANOTHER_JOB = "job"


@dataclass(frozen=True, slots=True)
class GuestLease:
    """A job's lease of a guest; monotonic seconds."""

    job: str
    replica: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class JobMeasures:
    """One job of several. `guest_s`: its leases' time; `share`: of all jobs' such time."""

    job: str
    guest_s: float
    share: float | None
    steps: int
    reward: measures.Reward
    trajectories: measures.Trajectories
    tokens: measures.Tokens
    logprob_gap: measures.LogprobGap
    weights: measures.WeightMeasures


@dataclass(frozen=True, slots=True)
class Sharing:
    """The guest's time in the blocks that count: `leased_share` of it somebody had a lease.

    `changes`: times that it went from one job to another. `engine_starts`: how often that took a
    new engine. `change_s`: from a lease of another job's guest to its first token, on average.
    """

    seconds: float
    leased_share: float | None
    changes: int
    engine_starts: int
    change_s: float | None


def guest_leases(records: Records) -> list[GuestLease]:
    """Return leases of borrowed engines within the blocks in which they were lent, in order."""
    ends = {
        (event.replica, event.epoch): event.t_s
        for name in LEASE_ENDS
        for event in records.events_named(name)
    }
    found = []
    for granted in records.events_named(LEASE_GRANTED):
        if granted.kind != BORROWED:
            continue
        key = granted.replica, granted.epoch
        for start_s, end_s in _spans(records):
            begin_s, over_s = max(start_s, granted.t_s), min(end_s, ends.get(key, end_s))
            if begin_s < over_s:
                lease = GuestLease(granted.job or "", granted.replica or "", begin_s, over_s)
                found.append(lease)
    return found


def job_measures(records: Records) -> list[JobMeasures]:
    """Return every job's own figures; empty where there is one job."""
    leases = guest_leases(records)
    had_s = {
        job: sum(lease.end_s - lease.start_s for lease in leases if lease.job == job)
        for job in records.jobs
    }
    whole_s = sum(had_s.values())
    return [
        JobMeasures(
            job=job,
            guest_s=seconds,
            share=seconds / whole_s if whole_s else None,
            steps=len(own.steps),
            reward=measures.reward(own),
            trajectories=measures.trajectories(own),
            tokens=measures.tokens(own),
            logprob_gap=measures.logprob_gap(own),
            weights=measures.weights(own),
        )
        for job, seconds in had_s.items()
        for own in [records.of_job(job)]
    ]


def sharing(records: Records) -> Sharing | None:
    """Return the changes of the guest's job; None where there is one job."""
    if not records.jobs:
        return None
    leases = guest_leases(records)
    seconds = sum(end_s - start_s for start_s, end_s in _spans(records))
    replicas = {lease.replica for lease in leases}
    leased_s = sum(lease.end_s - lease.start_s for lease in leases)
    took_s = [
        event.took_s
        for event in records.events_named(FIRST_TOKEN)
        if event.switch == ANOTHER_JOB and event.took_s is not None
    ]
    return Sharing(
        seconds=seconds,
        leased_share=leased_s / (seconds * len(replicas)) if seconds and replicas else None,
        changes=sum(
            first.job != then.job
            for replica in replicas
            for first, then in pairwise(lease for lease in leases if lease.replica == replica)
        ),
        engine_starts=len(records.events_named(ENGINE_SWITCHED)),
        change_s=sum(took_s) / len(took_s) if took_s else None,
    )


def _spans(records: Records) -> Iterator[tuple[float, float]]:
    return ((block.start_s, block.end_s) for block in records.blocks_of("leased"))
