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
    """A lease cannot be granted, renewed or ended as asked."""


class LeaseHeld(LeaseError):  # noqa: N818 - a state, as in the tree above
    """The replica has a live lease: release or revoke it first."""


class StaleEpoch(LeaseError):  # noqa: N818 - a state, as in the tree above
    """The epoch is not that of the replica's live lease: the caller acts on an old one."""


class PolicyError(SchedulerError):
    """A capacity policy cannot be used: the line has the field's path, and what to do."""


class JournalError(SchedulerError):
    """A replica sent more tokens than the turn may have, or an answer without a logprob each."""
