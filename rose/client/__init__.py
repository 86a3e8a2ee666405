"""What a trainer imports: turns from one or several gateways, with and without an event loop."""

from rose.client.blocking import BlockingRolloutClient, BlockingSession
from rose.client.errors import (
    AnswerBroken,
    ClientClosed,
    GatewayUnavailable,
    RequestRefused,
    RolloutError,
    TurnCancelled,
    TurnTimedOut,
    VersionNotServed,
)
from rose.client.group import Group, Member
from rose.client.progress import Progress, TurnProgress
from rose.client.rollout import RolloutClient
from rose.client.session import Session
from rose.client.settings import Retry
from rose.client.stream import TurnStream
from rose.client.turn import Sampling, TokenChunk, Turn

__all__ = [
    "AnswerBroken",
    "BlockingRolloutClient",
    "BlockingSession",
    "ClientClosed",
    "GatewayUnavailable",
    "Group",
    "Member",
    "Progress",
    "RequestRefused",
    "Retry",
    "RolloutClient",
    "RolloutError",
    "Sampling",
    "Session",
    "TokenChunk",
    "Turn",
    "TurnCancelled",
    "TurnProgress",
    "TurnStream",
    "TurnTimedOut",
    "VersionNotServed",
]
