"""Whether a replica may get turns."""

from enum import StrEnum

from elastic_scheduler.staleness import StalenessBound


class Health(StrEnum):
    """HEALTHY gets turns; the others say what is missing."""

    HEALTHY = "healthy"
    BEHIND = "behind"
    DOWN = "down"


def judge(alive: bool, policy_version: int, latest_version: int, bound: StalenessBound) -> Health:
    """Health of a replica that its node calls `alive`, given the newest announced version.

    One that missed a version beyond the job's bound is BEHIND until it has caught up: its tokens
    would be refused by the trainer anyway.
    """
    if not alive:
        return Health.DOWN
    if not bound.admits_token(policy_version, latest_version):
        return Health.BEHIND
    return Health.HEALTHY
