"""Quotas: the most guests of a job, by its placeholder pods, which Kueue or KAI admits."""

import math
from collections.abc import Mapping

from rose.scheduler.core.messages import Action, LogRecord, QuotasHeard
from rose.scheduler.persistence import JobRecord

# A count that is older admits no new guest: as long as a lease lives without a renewal.
STALE_S = 5.0


class QuotaBook:
    """Newest count of the running placeholder pods of each job that has a quota.

    Nothing is stored: until a new scheduler has read the pods, a job keeps the guests that it has.
    """

    def __init__(self, namespaces: Mapping[str, str]) -> None:
        """Begin without counts. namespaces: those of the pods, by job; other jobs have no quota."""
        self._namespaces = namespaces
        # Pods last read, by job.
        self.pods: dict[str, int] = {}
        self._heard_s: dict[str, float] = {}

    def heard(self, event: QuotasHeard) -> list[Action]:
        """Replace the counts of the event's jobs; return a log record of each that changed."""
        news = {job: n for job, n in event.pods.items() if self.pods.get(job) != n}
        self.pods |= news
        self._heard_s |= dict.fromkeys(event.pods, event.heard_s)
        return [LogRecord("quota_changed", {"job": job, "guests": n}) for job, n in news.items()]

    def most(self, job: JobRecord, held: int, now_s: float) -> float:
        """Return the most guests that a job may have now, of which it has `held`; inf: no bound."""
        most = min(job.max_guests or math.inf, self.pods.get(job.job, math.inf))
        most = min(most, held) if self._is_stale(job.job, now_s) else most
        return 0 if job.standing else most

    def why(self, job: str, now_s: float) -> str:
        """Return why a job's quota admits no new guest, "" if it is a number like any other."""
        namespace = self._namespaces.get(job, "")
        if self._is_stale(job, now_s):
            return f"no new guests: its placeholder pods in namespace {namespace} cannot be read"
        look = f"kubectl get pods -n {namespace} -l rose.dev/job={job}"
        none = self.pods.get(job) == 0
        return f"no guests: none of its placeholder pods runs; {look}" if none else ""

    def _is_stale(self, job: str, now_s: float) -> bool:
        return job in self._namespaces and now_s > self._heard_s.get(job, -math.inf) + STALE_S
