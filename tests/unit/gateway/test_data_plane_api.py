from types import ModuleType

import pytest

import elastic_scheduler
import rose.client
import rose.gateway

SCHEDULER = """
    AnswerBook Attempt Candidate Conflict Continue Decision Deliver End FairShares GiveUp
    HarvestMode HarvestPlan HarvestPolicy Health HealthLimits Hedge HedgedGroup Holding
    JobDemand JournalError Lease LeaseBook LeaseError LeaseHeld LeaseState MemberView Move Offer
    Outcome Placement Policy Quote RateMeter Reason ReasonLog ReplicaHealth ReplicaKind ReplicaView
    Report Round RoundDone Router RoutingDecision SchedulerError Segment Situation StaleEpoch
    StalenessAdmission StalenessBound TailBatcher TailPlan TurnJournal TurnNeed VersionSpan Won
    make_policy max_min policy_names
"""
CLIENT = """
    AnswerBroken BlockingRolloutClient BlockingSession ClientClosed GatewayUnavailable Group
    Member Progress RequestRefused Retry RolloutClient RolloutError Sampling Session TokenChunk
    Turn TurnCancelled TurnProgress TurnStream TurnTimedOut VersionNotServed
"""
GATEWAY = "Gateway GatewaySettings ReplicaEntry StaticReplica"


@pytest.mark.parametrize(
    ("package", "public"),
    [(elastic_scheduler, SCHEDULER), (rose.client, CLIENT), (rose.gateway, GATEWAY)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_public_face_is_exactly_this(package: ModuleType, public: str) -> None:
    assert sorted(package.__all__) == public.split()
    assert all(hasattr(package, name) for name in package.__all__)
