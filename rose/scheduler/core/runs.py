"""Runs of jobs: at most one trainer has a job, and one that lost it is refused.

    begin ──► live ──(renewed each few seconds)──► live
                │ silent for RUN_TTL_S ──► lapsed: another may begin, and if none does it goes on
                │ ended by itself ──► another may begin
                └ taken over, or dropped ──► fenced: its renewals and versions are refused

A run is named by the root of its versions, whose lock its process holds: a process that comes with
the same run has proved that the one before is dead, and need not wait. No IO and no clock here. The
store keeps who has a job, not the renewals: a new leader believes that each run lives, until it has
heard nothing of it for as long as a run may be silent.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from rose.contract.weights import RUN_TTL_S
from rose.errors import RunFencedError, RunHeldError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.limits import Name, Text


@dataclass(frozen=True, slots=True)
class Claim:
    """Run and process ids by which a trainer's calls prove that it has a job.

    holder: description of the process, for people.
    """

    run: Name
    process: Name
    holder: Text


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Stored run that has a job, or had it last; since_s: Unix seconds at which it began."""

    job: str
    run: str
    process: str
    holder: str
    since_s: float
    ended: bool = False


class RunBook:
    """The run of each job: at most one trainer has a job. Callers set the time with `at` first."""

    def __init__(self, records: Iterable[RunRecord] = (), ttl_s: float = RUN_TTL_S) -> None:
        self.ttl_s = ttl_s
        self._runs = {record.job: record for record in records}
        self._heard_s: dict[str, float] = {}
        self._now_s: float | None = None
        self._wall_s = 0.0

    def at(self, now_s: float, wall_s: float | None = None) -> None:
        """Set the current time: monotonic `now_s`, and Unix `wall_s` if known.

        The first call counts as a sign of life of every stored run.
        """
        if self._now_s is None:
            self._heard_s = dict.fromkeys(self._runs, now_s)
        self._now_s = now_s
        self._wall_s = wall_s or self._wall_s

    def live(self, job: str) -> bool:
        """Return True if the job's run has not ended and was renewed within `ttl_s`."""
        record = self._runs.get(job)
        return record is not None and not record.ended and self._silent_s(job) < self.ttl_s

    def get(self, job: str) -> RunRecord | None:
        """Return the run that has the job, or had it last; None if there was none."""
        return self._runs.get(job)

    def beginning(self, job: str, claim: Claim | None, *, take_over: bool) -> RunRecord | None:
        """Return the record to store for a trainer that begins; None if it names no run.

        Raises `RunHeldError` while another run holds the job, unless `take_over`.
        """
        known = self._runs.get(job)
        same = known is not None and claim is not None and known.run == claim.run
        if known is not None and self.live(job) and not (same or take_over):
            raise RunHeldError(
                f"job {job} is held by {known.holder}, since {_moment(known.since_s)}; stop that"
                f" trainer, or take over (take_over=True, --take-over). It holds the job for"
                f" {self.ttl_s:g} s after its last sign, {self._silent_s(job):.0f} s ago"
            )
        if claim is None:
            return None
        return RunRecord(job, claim.run, claim.process, claim.holder, self._wall_s)

    def begin(self, record: RunRecord) -> RunRecord | None:
        """Give the job to a run; return the other live run that thereby loses it, else None."""
        known, lived = self._runs.get(record.job), self.live(record.job)
        self._runs[record.job] = record
        self._heard_s[record.job] = self._now_s or 0.0
        return known if lived and known is not None and known.run != record.run else None

    def check(self, job: str, claim: Claim | None) -> None:
        """Raise `RunFencedError` if a run holds the job and the caller is not its process.

        A caller without a claim is refused only while the run lives.
        """
        known = self._runs.get(job)
        if known is None or (claim is None and not self.live(job)):
            return
        if claim is None or (known.run, known.process) != (claim.run, claim.process):
            who = claim.holder if claim is not None else "a trainer that names no run"
            raise RunFencedError(
                f"{who} has lost job {job} to {known.holder}, since {_moment(known.since_s)}; stop"
                " this trainer, or start it anew and take over"
            )

    def renew(self, job: str, claim: Claim) -> None:
        """Record a sign of life of the run's trainer. Raises RunFencedError as `check` does."""
        self.check(job, claim)
        self._heard_s[job] = self._now_s or 0.0

    def ending(self, job: str, claim: Claim | None = None) -> RunRecord | None:
        """Return the record to store for a run that ends, None if the job has none.

        Raises RunFencedError as `check` does, if a claim is given.
        """
        if claim is not None:
            self.check(job, claim)
        known = self._runs.get(job)
        return None if known is None else replace(known, ended=True)

    def end(self, record: RunRecord) -> None:
        """Mark a run as ended; its record stays, as the run of the job's newest version."""
        self._runs[record.job] = record

    def check_drop(self, job: str, *, force: bool) -> None:
        """Raise `RunHeldError` if the job's run lives, unless `force`."""
        known = self._runs.get(job)
        if known is not None and self.live(job) and not force:
            raise RunHeldError(
                f"job {job} is held by {known.holder}, since {_moment(known.since_s)}; stop that"
                " trainer first, or drop the job with --force, which fences it"
            )

    def drop(self, job: str) -> None:
        """Delete the job's run record."""
        self._runs.pop(job, None)
        self._heard_s.pop(job, None)

    def view(self, job: str) -> pb.RunView | None:
        """Return a job's run as a row for operators, None if the job had none."""
        record = self._runs.get(job)
        if record is None:
            return None
        return pb.RunView(
            run=record.run,
            holder=record.holder,
            since_s=record.since_s,
            silent_s=self._silent_s(job),
            live=self.live(job),
            ended=record.ended,
        )

    def _silent_s(self, job: str) -> float:
        now_s = self._now_s or 0.0
        return now_s - self._heard_s.get(job, now_s)


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
