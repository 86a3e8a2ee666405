"""Errors of this package.

SchedulerError
├── LeaseError
│   ├── LeaseHeld        the replica is leased already
│   └── StaleEpoch       the lease that is meant is over
├── PolicyError          a capacity policy says what cannot be
└── JournalError         a replica sent what the turn did not ask for
"""


class SchedulerError(Exception):
    """Base of all errors of this package."""


class LeaseError(SchedulerError):
    """Error of a lease that cannot be granted, renewed or ended as asked."""


class LeaseHeld(LeaseError):  # noqa: N818 - a state, as in the tree above
    """Error of a grant: the replica has a live lease, to be released or revoked first."""


class StaleEpoch(LeaseError):  # noqa: N818 - a state, as in the tree above
    """Error of a lease call whose epoch is not the replica's live lease's, or not usable."""


class PolicyError(SchedulerError):
    """Error of a capacity policy; its line has the field's path, and what to do.

    path: keys that lead to the field from the policy's own object.
    """

    def __init__(self, line: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(line)
        self.path = path


class JournalError(SchedulerError):
    """Error of a turn: its replica sent too many tokens or logprobs, or the turn is over."""
