"""What became of a feed's prompts and samples."""

from dataclasses import dataclass


@dataclass(slots=True)
class FeedCounts:
    """Groups trained (handed out), dropped, aged out (begun anew because the policy moved on) and
    deferred (moved to a long round); samples retried. They only grow."""

    trained: int = 0
    dropped: int = 0
    aged_out: int = 0
    deferred: int = 0
    retried: int = 0


@dataclass(frozen=True, slots=True)
class FeedProgress:
    """A feed now; the last five are its `FeedCounts`."""

    version: int
    prompts_waiting: int
    groups_running: int
    groups_ready: int
    samples_running: int
    samples_waiting: int
    trained: int
    dropped: int
    aged_out: int
    deferred: int
    retried: int
