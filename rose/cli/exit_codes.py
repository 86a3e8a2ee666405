"""Exit codes of `rose`, for scripts. `docs/operators/cli.md` has this table.

A command that changes several things checks them all first: DONE means that all of it is done,
BAD_INPUT that nothing is.
"""

from enum import IntEnum
from typing import Self

from rose.errors import RoseError, UnavailableError


class ExitCode(IntEnum):
    """Exit code of a command. meaning: its explanation for people."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Self:
        """Create a member. code: exit code of the process."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    DONE = 0, "done; of a stop: every node confirmed it, every guest is measured to be gone"
    FOUND = (
        1,
        "something is not as it should be: `policy diff` differs, `stop-all` and `kill` left"
        " something, `doctor`, `audit verify` and `weights verify` found a fault, a claim of the"
        " demo or of `compare` failed; or an unexpected error, its line names the traceback",
    )
    BAD_INPUT = (
        2,
        "the input is wrong or was refused: an unknown option, file, field, node, job or replica,"
        " no permission, another release; nothing was changed",
    )
    UNPROVED = (
        3,
        "`stop-all`: nothing is known to be left, and a node has not confirmed, is not attached or"
        " has not measured; they are named. `compare`: too little was measured to say",
    )
    NOBODY_ANSWERS = (
        4,
        "no scheduler answers as the leader, or no gateway, or a store; ask again, or give another"
        " address",
    )
    INTERRUPTED = 130, "interrupted (Ctrl-C), as `top` and `--watch` are ended"


def code_of(error: RoseError) -> ExitCode:
    """Return the exit code of a command that ends with this error: NOBODY_ANSWERS for
    UnavailableError, else BAD_INPUT.
    """
    return ExitCode.NOBODY_ANSWERS if isinstance(error, UnavailableError) else ExitCode.BAD_INPUT
