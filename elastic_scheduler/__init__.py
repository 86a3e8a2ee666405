"""Cores that lease capacity, route turns and keep every token: no clock, socket or file in here.

The loop of a turn, of which the gateway's is the real one; golden traces: tests/traces/journal:

    journal = TurnJournal(prompt, max_tokens, max_attempts=8)
    while True:
        attempt = journal.begin(replica, kind)
        async for chunk in ask(replica, attempt.token_ids, attempt.max_tokens):
            journal.append(attempt.number, chunk.token_ids, chunk.logprobs, chunk.version)
        match journal.end(attempt.number, how_it_ended, chunk.finish_reason):
            case Continue():        replica, kind = another()
            case Deliver():         return deliver()
            case GiveUp(reason):    return fail(reason)
"""

from elastic_scheduler.errors import JournalError, LeaseError, LeaseHeld, SchedulerError, StaleEpoch
from elastic_scheduler.hedging import Hedge, HedgedGroup, MemberView, Won
from elastic_scheduler.leases.health import Health, HealthReport, ReplicaHealth
from elastic_scheduler.leases.lease_table import (
    HarvestMode,
    HarvestModes,
    HarvestPlan,
    Lease,
    LeaseState,
    LeaseTable,
    Offer,
    ReplicaKind,
    SwitchKind,
)
from elastic_scheduler.policies import Policy, make_policy, policy_names
from elastic_scheduler.policies.rose import FairShares
from elastic_scheduler.policies.types import Holding, JobDemand, LeaseDecision, Move, Situation
from elastic_scheduler.rollouts.admission import (
    StalenessAdmission,
    StalenessBound,
    TakenGroup,
    TurnTicket,
)
from elastic_scheduler.rollouts.buffer import (
    CancelRun,
    DroppedGroup,
    PromptQueue,
    RolloutBuffer,
    RolloutProgress,
    Round,
    RoundDone,
    SampleRun,
    StartRun,
    StepPlan,
    TailBatcher,
    TailPlan,
    TrainingGroup,
    TrainingStep,
)
from elastic_scheduler.routing.cost import (
    Quote,
    ReplicaCandidate,
    ReplicaView,
    TurnNeed,
    TurnPlacement,
)
from elastic_scheduler.routing.decision_log import Reason, ReasonLog, RoutingDecision
from elastic_scheduler.routing.predictors import RateMeter, prefix_keys
from elastic_scheduler.routing.router import Router
from elastic_scheduler.turn_journal import (
    Attempt,
    Conflict,
    Continue,
    Deliver,
    End,
    GiveUp,
    IdempotencyCache,
    Outcome,
    Segment,
    TurnJournal,
    VersionSpan,
)

__all__ = [
    "Attempt",
    "CancelRun",
    "Conflict",
    "Continue",
    "Deliver",
    "DroppedGroup",
    "End",
    "FairShares",
    "GiveUp",
    "HarvestMode",
    "HarvestModes",
    "HarvestPlan",
    "Health",
    "HealthReport",
    "Hedge",
    "HedgedGroup",
    "Holding",
    "IdempotencyCache",
    "JobDemand",
    "JournalError",
    "Lease",
    "LeaseDecision",
    "LeaseError",
    "LeaseHeld",
    "LeaseState",
    "LeaseTable",
    "MemberView",
    "Move",
    "Offer",
    "Outcome",
    "Policy",
    "PromptQueue",
    "Quote",
    "RateMeter",
    "Reason",
    "ReasonLog",
    "ReplicaCandidate",
    "ReplicaHealth",
    "ReplicaKind",
    "ReplicaView",
    "RolloutBuffer",
    "RolloutProgress",
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
    "SwitchKind",
    "TailBatcher",
    "TailPlan",
    "TakenGroup",
    "TrainingGroup",
    "TrainingStep",
    "TurnJournal",
    "TurnNeed",
    "TurnPlacement",
    "TurnTicket",
    "VersionSpan",
    "Won",
    "make_policy",
    "policy_names",
    "prefix_keys",
]
