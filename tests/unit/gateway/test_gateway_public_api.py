from types import ModuleType

import pytest

import elastic_scheduler
import rose.client
import rose.gateway

SCHEDULER = """
    Attempt CancelRun Conflict Continue Deliver DroppedGroup End FairShares GiveUp HarvestMode
    HarvestModes HarvestPlan Health HealthReport Hedge HedgedGroup Holding IdempotencyCache
    JobDemand JournalError Lease LeaseDecision LeaseError LeaseHeld LeaseState LeaseTable
    MemberView Move Offer Outcome Policy PromptQueue Quote RateMeter Reason ReasonLog
    ReplicaCandidate ReplicaHealth ReplicaKind ReplicaView RolloutBuffer RolloutProgress Round
    RoundDone Router RoutingDecision SampleRun SchedulerError Segment Situation StaleEpoch
    StalenessAdmission StalenessBound StartRun StepPlan SwitchKind TailBatcher TailPlan
    TakenGroup TrainingGroup TrainingStep TurnJournal TurnNeed TurnPlacement TurnTicket
    VersionSpan Won make_policy policy_names prefix_keys
"""
CLIENT = """
    AnswerBroken BlockingRolloutClient BlockingRolloutPipeline BlockingSession ClientClosed
    DroppedGroup GatewayCredentials GatewayUnavailable Group GroupsDropped Member Progress
    RequestRefused Retry
    RolloutClient RolloutError RolloutPipeline RolloutProgress Sampling Session SessionTrajectory
    StalenessBound StepPlan StructuredOutputs TailPlan TokenChunk TrainingGroup TrainingStep Turn
    TurnCancelled TurnProgress TurnStream TurnTimedOut VersionNotServed Versions
"""
GATEWAY = "Gateway GatewaySettings GatewayStatus ReplicaEntry StaticReplica"


@pytest.mark.parametrize(
    ("package", "public"),
    [(elastic_scheduler, SCHEDULER), (rose.client, CLIENT), (rose.gateway, GATEWAY)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_public_face_is_exactly_this(package: ModuleType, public: str) -> None:
    assert sorted(package.__all__) == public.split()
    assert all(hasattr(package, name) for name in package.__all__)
