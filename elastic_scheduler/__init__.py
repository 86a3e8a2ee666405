"""Cores that lease capacity, route turns and keep every token: no clock, socket or file in here."""

from elastic_scheduler.answers import AnswerBook, Conflict
from elastic_scheduler.errors import JournalError, LeaseError, LeaseHeld, SchedulerError, StaleEpoch
from elastic_scheduler.harvest import HarvestMode, HarvestPlan, HarvestPolicy
from elastic_scheduler.health import Health, judge
from elastic_scheduler.journal import (
    Attempt,
    Continue,
    Deliver,
    End,
    GiveUp,
    Outcome,
    Segment,
    TurnJournal,
    VersionSpan,
)
from elastic_scheduler.lease import Lease, LeaseBook, LeaseState
from elastic_scheduler.offer import Offer, ReplicaKind
from elastic_scheduler.rate import RateMeter
from elastic_scheduler.reasons import Reason, ReasonLog
from elastic_scheduler.replica_load import ReplicaView
from elastic_scheduler.router import Placement, Router, RoutingDecision
from elastic_scheduler.routing_cost import Candidate
from elastic_scheduler.staleness import StalenessBound
from elastic_scheduler.turn_need import TurnNeed

__all__ = [
    "AnswerBook",
    "Attempt",
    "Candidate",
    "Conflict",
    "Continue",
    "Deliver",
    "End",
    "GiveUp",
    "HarvestMode",
    "HarvestPlan",
    "HarvestPolicy",
    "Health",
    "JournalError",
    "Lease",
    "LeaseBook",
    "LeaseError",
    "LeaseHeld",
    "LeaseState",
    "Offer",
    "Outcome",
    "Placement",
    "RateMeter",
    "Reason",
    "ReasonLog",
    "ReplicaKind",
    "ReplicaView",
    "Router",
    "RoutingDecision",
    "SchedulerError",
    "Segment",
    "StaleEpoch",
    "StalenessBound",
    "TurnJournal",
    "TurnNeed",
    "VersionSpan",
    "judge",
]
