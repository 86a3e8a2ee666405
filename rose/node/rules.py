"""What stands against an engine, asked again and again while it runs."""

from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> str | None:
    return None


def _fits() -> None:
    return


@dataclass(frozen=True, slots=True)
class Rules:
    """Each answers with a reason, None when nothing stands against it.

    must_end: it may not exist. must_wait: it may not be started, one that runs may stay.
    hangs: it lives but does nothing any more.
    fits: raises RoseError where it could not be started now, beside what the engine checks itself.
    """

    must_end: Callable[[], str | None] = _nothing
    must_wait: Callable[[], str | None] = _nothing
    hangs: Callable[[], str | None] = _nothing
    fits: Callable[[], None] = _fits
