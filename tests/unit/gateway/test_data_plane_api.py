from types import ModuleType

import pytest

import elastic_scheduler
import rose.client
import rose.gateway

SCHEDULER = """
    AnswerBook Attempt Candidate Conflict Continue Deliver End GiveUp HarvestMode HarvestPlan
    HarvestPolicy Health JournalError Lease LeaseBook LeaseError LeaseHeld LeaseState Offer Outcome
    Placement RateMeter ReplicaKind ReplicaView Router SchedulerError Segment StaleEpoch
    StalenessBound TurnJournal TurnNeed VersionSpan judge
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
