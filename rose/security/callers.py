"""Caller of a gateway: whom a request is from, and for which job.

What a caller names (turns, sessions, groups) is told apart by `scope`: the same name of another
caller's is another thing, and reaches nothing of this one's.
"""

from dataclasses import dataclass
from typing import Final

from rose.errors import RefusedError

# No name of a job or a subject has it.
_BETWEEN = "\x1f"


class ForeignJobError(RefusedError):
    """A caller named a job that is not its own."""


@dataclass(frozen=True, slots=True)
class Caller:
    """job: the only one it may name, None: any. subject: its name within the job."""

    job: str | None
    subject: str

    @property
    def scope(self) -> str:
        """What its names begin with inside; empty where nobody is asked who he is."""
        if self.job is None and not self.subject:
            return ""
        return f"{self.job or ''}{_BETWEEN}{self.subject}{_BETWEEN}"

    def job_for(self, asked: str) -> str:
        """The job of a request that names this one, or none (""). Raises ForeignJobError."""
        if self.job is None or asked == self.job:
            return asked
        if asked:
            raise ForeignJobError(
                f"this caller's job is {self.job!r}, not {asked[:80]!r}: leave the job out, or show"
                " a token of that job"
            )
        return self.job


ANYBODY: Final = Caller(None, "")
"""Whoever calls where nobody is asked who he is: on loopback, or behind the operator's fence."""

TRAINER: Final = "trainer"
"""Subject of tokens that name none, and of trainers' certificates: one caller of a job."""
