"""What a trainer imports: turns from one or several gateways, with and without an event loop."""

from elastic_scheduler import (
    DroppedGroup,
    FeedProgress,
    StalenessBound,
    StepPlan,
    TailPlan,
    TrainingGroup,
    TrainingStep,
)
from rose.client.blocking import BlockingRolloutClient, BlockingSession
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
from rose.client.group import Group, Member
from rose.client.pipeline import RolloutPipeline
from rose.client.pipeline_blocking import BlockingRolloutPipeline
from rose.client.progress import Progress, TurnProgress
from rose.client.rollout import RolloutClient
from rose.client.session import Session
from rose.client.settings import Retry
from rose.client.stream import TurnStream
from rose.client.turn import Sampling, TokenChunk, Turn

__all__ = [
    "AnswerBroken",
    "BlockingRolloutClient",
    "BlockingRolloutPipeline",
    "BlockingSession",
    "ClientClosed",
    "DroppedGroup",
    "FeedProgress",
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
    "Sampling",
    "Session",
    "StalenessBound",
    "StepPlan",
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
]
