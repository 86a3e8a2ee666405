"""What a trainer imports: turns from the gateway."""

from rose.client.errors import GatewayUnavailable, RequestRefused, RolloutError, VersionNotServed
from rose.client.rollout import RolloutClient
from rose.client.turn import Sampling, Turn

__all__ = [
    "GatewayUnavailable",
    "RequestRefused",
    "RolloutClient",
    "RolloutError",
    "Sampling",
    "Turn",
    "VersionNotServed",
]
