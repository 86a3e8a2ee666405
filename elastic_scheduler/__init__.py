"""Cores that lease capacity, route turns and keep every token: no clock, socket or file in here."""

from elastic_scheduler.admission import StalenessAdmission, TakenGroup, TurnTicket
from elastic_scheduler.answers import AnswerBook, Conflict
from elastic_scheduler.errors import JournalError, LeaseError, LeaseHeld, SchedulerError, StaleEpoch
from elastic_scheduler.fair import FairShares, max_min
from elastic_scheduler.feed_counts import FeedProgress
from elastic_scheduler.group_feed import CancelRun, GroupFeed, StartRun
from elastic_scheduler.harvest import HarvestMode, HarvestPlan, HarvestPolicy
from elastic_scheduler.health import Health, HealthLimits, ReplicaHealth, Report
from elastic_scheduler.hedge import Hedge, HedgedGroup, MemberView, Won
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
    stamp,
)
from elastic_scheduler.lease import Lease, LeaseBook, LeaseState
from elastic_scheduler.offer import Offer, ReplicaKind
from elastic_scheduler.placement import Placement, Quote
from elastic_scheduler.policies import Policy, make_policy, policy_names
from elastic_scheduler.prompt_queue import PromptQueue, Round, RoundDone
from elastic_scheduler.rate import RateMeter
from elastic_scheduler.reasons import Reason, ReasonLog
from elastic_scheduler.replica_load import ReplicaView
from elastic_scheduler.router import Router
from elastic_scheduler.routing_cost import Candidate
from elastic_scheduler.routing_log import RoutingDecision
from elastic_scheduler.sample_run import SampleRun
from elastic_scheduler.situation import Decision, Holding, JobDemand, Move, Situation
from elastic_scheduler.staleness import StalenessBound
from elastic_scheduler.step_plan import StepPlan
from elastic_scheduler.tail_batching import TailBatcher, TailPlan
from elastic_scheduler.training_step import DroppedGroup, TrainingGroup, TrainingStep
from elastic_scheduler.turn_need import TurnNeed

__all__ = [
    "AnswerBook",
    "Attempt",
    "CancelRun",
    "Candidate",
    "Conflict",
    "Continue",
    "Decision",
    "Deliver",
    "DroppedGroup",
    "End",
    "FairShares",
    "FeedProgress",
    "GiveUp",
    "GroupFeed",
    "HarvestMode",
    "HarvestPlan",
    "HarvestPolicy",
    "Health",
    "HealthLimits",
    "Hedge",
    "HedgedGroup",
    "Holding",
    "JobDemand",
    "JournalError",
    "Lease",
    "LeaseBook",
    "LeaseError",
    "LeaseHeld",
    "LeaseState",
    "MemberView",
    "Move",
    "Offer",
    "Outcome",
    "Placement",
    "Policy",
    "PromptQueue",
    "Quote",
    "RateMeter",
    "Reason",
    "ReasonLog",
    "ReplicaHealth",
    "ReplicaKind",
    "ReplicaView",
    "Report",
    "Round",
    "RoundDone",
    "Router",
    "RoutingDecision",
    "SampleRun",
    "SchedulerError",
    "Segment",
    "Situation",
    "StaleEpoch",
    "StalenessAdmission",
    "StalenessBound",
    "StartRun",
    "StepPlan",
    "TailBatcher",
    "TailPlan",
    "TakenGroup",
    "TrainingGroup",
    "TrainingStep",
    "TurnJournal",
    "TurnNeed",
    "TurnTicket",
    "VersionSpan",
    "Won",
    "make_policy",
    "max_min",
    "policy_names",
    "stamp",
]
