"""Admission of turns to a replica: by the newest lease epoch, and not while a version changes.

`TurnGate` makes turns wait for the end of a weight update, so that none starts in the middle of it.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final


class TurnGate:
    """Gate for new turns, closed while weights change: none starts in the middle of a switch."""

    def __init__(self) -> None:
        self._holders = 0
        self._moved = asyncio.Event()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close the gate inside the context."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self.look_again()

    def look_again(self) -> None:
        """Wake the waiting turns: the answer to their `unless` may have changed."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def passed(self, unless: Callable[[], bool]) -> None:
        """Wait until the gate is open, or until `unless` returns True."""
        while self._holders and not unless():
            await self._moved.wait()


# Leap of a restored store: its epochs continue from the time in milliseconds.
MAX_LEAP: Final = 1 << 42


class AdmissionError(Exception):
    """A command that changes nothing."""


class StaleEpochError(AdmissionError):
    """A command of an older lease."""


class EpochAheadError(AdmissionError):
    """A command of an impossible lease: obeyed, it would shut out every real one."""


class QuarantinedError(AdmissionError):
    """This process cannot prove which weights it runs."""


class Admission:
    """Open or closed. Epochs only grow: commands of an old lease are refused.

    The first epoch may be any, since leases are older than engines; later ones are at most MAX_LEAP
    ahead of it.
    """

    def __init__(self) -> None:
        self.open = False
        self.epoch = 0
        # Job of the lease; "" if unknown.
        self.job = ""
        self.reason = "no lease yet"
        self._quarantined = False

    @property
    def quarantined(self) -> bool:
        """True if it is closed for as long as this process lives."""
        return self._quarantined

    def takes(self, job: str) -> bool:
        """Return True if turns of a job are taken: not those sent under another job's lease."""
        return not (job and self.job) or job == self.job

    def admit(self, epoch: int, job: str = "") -> None:
        """Open for a job's lease `epoch`. Raises an AdmissionError."""
        self._take(epoch)
        if self._quarantined:
            raise QuarantinedError(f"{self.reason}; restart this replica")
        self.open = True
        self.job = job
        self.reason = ""

    def close(self, epoch: int, reason: str) -> None:
        """Close at the end of the lease `epoch`. Raises StaleEpochError or EpochAheadError."""
        self._take(epoch)
        self.open = False
        if not self._quarantined:
            self.reason = reason or "drained"

    def quarantine(self, why: str) -> None:
        """Close for as long as this process lives."""
        self._quarantined = True
        self.open = False
        self.reason = why

    def _take(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpochError(f"epoch {epoch} is older than {self.epoch}; attach again")
        if self.epoch and epoch > self.epoch + MAX_LEAP:
            raise EpochAheadError(f"epoch {epoch} is no successor of {self.epoch}")
        self.epoch = epoch
