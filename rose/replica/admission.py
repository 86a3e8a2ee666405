"""Admission of turns to a replica: by the newest lease epoch, and not while a version changes.

`TurnGate` makes turns wait for the end of a weight update, so that none starts in the middle of it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final


class TurnGate:
    """Gate that holds back new turns while weights change, so that none starts in the middle of an
    update.
    """

    def __init__(self) -> None:
        self._holders = 0
        self._moved = asyncio.Event()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Return a context manager that keeps the gate closed inside its `with` block; blocks may
        overlap.
        """
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self.look_again()

    def look_again(self) -> None:
        """Wake all waiting turns, so that each evaluates its `unless` again."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def passed(self, unless: Callable[[], bool]) -> None:
        """Wait until the gate is open or `unless` returns True; `unless` is evaluated again after
        each `look_again`.
        """
        while self._holders and not unless():
            await self._moved.wait()


# Largest leap of epochs, that of a restored store: its epochs continue from the time in
# milliseconds.
MAX_LEAP: Final = 1 << 42


class AdmissionError(Exception):
    """Error raised for an admit or drain command that was refused and changed nothing."""


class StaleEpochError(AdmissionError):
    """Error raised for a command whose epoch is older than the newest one seen."""


class EpochAheadError(AdmissionError):
    """Error raised for a command whose epoch is impossibly far ahead: if it were obeyed, every real
    lease would be refused.
    """


class QuarantinedError(AdmissionError):
    """Error raised because this process cannot prove which weights it runs, so it must be
    restarted.
    """


@dataclass(slots=True)
class AdmittedLease:
    """Newest lease of one offer. job: "" if unknown; it stays after the lease's end.

    latest: newest version of the job at the lease's begin, None if unknown.
    """

    open: bool = False
    epoch: int = 0
    job: str = ""
    latest: int | None = None


class Admission:
    """State of a replica's admission: open or closed, under which lease epoch, for which job; of
    each offer where it has several. Commands with an older epoch are refused.

    The first epoch may be any, since leases are older than engines; later ones are at most MAX_LEAP
    ahead of the newest. reason: why it is closed.
    """

    def __init__(self) -> None:
        self._leases: defaultdict[int, AdmittedLease] = defaultdict(AdmittedLease)
        self.reason = "no lease yet"
        self._quarantined = False

    @property
    def open(self) -> bool:
        """True if turns of any lease may begin."""
        return any(lease.open for lease in self._leases.values())

    @property
    def first(self) -> AdmittedLease:
        """Lease of the first offer."""
        return self._leases[0]

    @property
    def jobs(self) -> set[str]:
        """Jobs of the open leases."""
        return {lease.job for lease in self._leases.values() if lease.open}

    @property
    def known_jobs(self) -> set[str]:
        """Jobs of the newest leases, ended ones too."""
        return {lease.job for lease in self._leases.values()}

    @property
    def quarantined(self) -> bool:
        """True if admission is closed until this process ends."""
        return self._quarantined

    def takes(self, job: str) -> bool:
        """Return True if turns of the job may begin: if it is an open lease's job, or if either of
        the two is unnamed; of several leases, an unnamed turn belongs to none.
        """
        jobs = self.jobs
        return job in jobs or "" in jobs or (not job and len(jobs) == 1)

    def begins_with_base(self, job: str) -> bool:
        """Return True if an open lease says that the job has no version yet."""
        leases = self._leases.values()
        return any(each.open and each.job == job and each.latest == 0 for each in leases)

    def admit(self, epoch: int, job: str = "", latest: int | None = None, offer: int = 0) -> None:
        """Open admission under the lease `epoch` of a job. Raises StaleEpochError, EpochAheadError
        or QuarantinedError.
        """
        lease = self._take(epoch, offer)
        if self._quarantined:
            raise QuarantinedError(f"{self.reason}; restart this replica")
        lease.open, lease.job, lease.latest = True, job, latest
        self.reason = ""

    def close(self, epoch: int, reason: str, offer: int = 0) -> None:
        """Close admission at the end of the lease `epoch`. Raises StaleEpochError or
        EpochAheadError.
        """
        self._take(epoch, offer).open = False
        if not self._quarantined:
            self.reason = reason or "drained"

    def quarantine(self, why: str) -> None:
        """Close admission until this process ends, for this reason."""
        self._quarantined = True
        for lease in self._leases.values():
            lease.open = False
        self.reason = why

    def _take(self, epoch: int, offer: int) -> AdmittedLease:
        lease = self._leases[offer]
        if epoch < lease.epoch:
            raise StaleEpochError(f"epoch {epoch} is older than {lease.epoch}; attach again")
        if lease.epoch and epoch > lease.epoch + MAX_LEAP:
            raise EpochAheadError(f"epoch {epoch} is no successor of {lease.epoch}")
        lease.epoch = epoch
        return lease
