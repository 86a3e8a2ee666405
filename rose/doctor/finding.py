"""What one check found."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """NOTE: it works, yet something should be known. WRONG: it does not work like this."""

    OK = "ok"
    NOTE = "note"
    WRONG = "WRONG"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `what`, and for everything but OK what to do next."""

    level: Level
    subject: str
    what: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.level:<6} {self.subject}: {self.what}" + (f"; {self.do}" if self.do else "")


def ok(subject: str, what: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, subject, what)


def note(subject: str, what: str, do: str) -> Finding:
    """It works, yet."""
    return Finding(Level.NOTE, subject, what, do)


def wrong(subject: str, what: str, do: str) -> Finding:
    """It does not work like this."""
    return Finding(Level.WRONG, subject, what, do)


def checked(subject: str, check: Callable[[], Finding]) -> Finding:
    """The finding, also where the check itself breaks: a doctor never faints."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 -- whatever a broken machine throws is a finding
        first = (str(error).splitlines() or ["no message"])[0]
        return wrong(subject, f"cannot be checked ({type(error).__name__}: {first})", "look at it")
