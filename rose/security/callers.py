"""Caller of a gateway: the subject that sends a request, and its job.

Turns, sessions and groups are kept apart by the caller's `scope`: two callers may use the same
name, and neither reaches the other's turn.
"""

from dataclasses import dataclass
from typing import Final

from rose.errors import RefusedError

# A separator that no name of a job or a subject contains.
_BETWEEN = "\x1f"


class ForeignJobError(RefusedError):
    """Error: a caller named a job other than its own."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated caller of a gateway.

    job: the only job it may name, None for any. subject: its name within the job.
    """

    job: str | None
    subject: str

    @property
    def scope(self) -> str:
        """Prefix of the caller's names of turns, sessions and groups in the gateway; "" without
        authentication.
        """
        if self.job is None and not self.subject:
            return ""
        return f"{self.job or ''}{_BETWEEN}{self.subject}{_BETWEEN}"

    def job_for(self, asked: str) -> str:
        """Return the job of a request that names `asked`, or the caller's own job if it names none
        ("").

        Raises ForeignJobError.
        """
        if self.job is None or asked == self.job:
            return asked
        if asked:
            raise ForeignJobError(
                f"this caller's job is {self.job!r}, not {asked[:80]!r}: leave the job out, or show"
                " a token of that job"
            )
        return self.job


ANYBODY: Final = Caller(None, "")
"""Caller on a port without authentication: on loopback, or in a network that its operator has
fenced.
"""

TRAINER: Final = "trainer"
"""Subject of tokens issued without one, and of trainers' certificates."""
