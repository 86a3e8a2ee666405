"""Client for trainers: turns from one or several gateways, with and without an event loop."""

from elastic_scheduler import (
    DroppedGroup,
    RolloutProgress,
    StalenessBound,
    StepPlan,
    TailPlan,
    TrainingGroup,
    TrainingStep,
)
from rose.client.blocking import BlockingRolloutClient, BlockingSession
from rose.client.client import RolloutClient
from rose.client.credentials import GatewayCredentials
from rose.client.errors import (
    AnswerBroken,
    ClientClosed,
    GatewayUnavailable,
    GroupsDropped,
    RequestRefused,
    RolloutError,
    TurnCancelled,
    TurnTimedOut,
    VersionNotServed,
)
from rose.client.pipeline import BlockingRolloutPipeline, RolloutPipeline
from rose.client.session import Group, Member, Session
from rose.client.stream import Progress, TurnProgress, TurnStream
from rose.client.types import Retry, TokenChunk, Turn
from rose.contract.gateway import SessionTrajectory, Versions
from rose.contract.replica import Sampling, StructuredOutputs

__all__ = [
    "AnswerBroken",
    "BlockingRolloutClient",
    "BlockingRolloutPipeline",
    "BlockingSession",
    "ClientClosed",
    "DroppedGroup",
    "GatewayCredentials",
    "GatewayUnavailable",
    "Group",
    "GroupsDropped",
    "Member",
    "Progress",
    "RequestRefused",
    "Retry",
    "RolloutClient",
    "RolloutError",
    "RolloutPipeline",
    "RolloutProgress",
    "Sampling",
    "Session",
    "SessionTrajectory",
    "StalenessBound",
    "StepPlan",
    "StructuredOutputs",
    "TailPlan",
    "TokenChunk",
    "TrainingGroup",
    "TrainingStep",
    "Turn",
    "TurnCancelled",
    "TurnProgress",
    "TurnStream",
    "TurnTimedOut",
    "VersionNotServed",
    "Versions",
]
