"""Policy versions of a trainer: published, announced by gRPC, served and relayed over HTTP."""

from rose.weight_distribution.credentials import Credentials
from rose.weight_distribution.relay import Relay
from rose.weight_distribution.version_server import VersionServer
from rose.weight_distribution.weight_publisher import (
    Begun,
    PublisherSettings,
    Receipt,
    WeightPublisher,
)

__all__ = [
    "Begun",
    "Credentials",
    "PublisherSettings",
    "Receipt",
    "Relay",
    "VersionServer",
    "WeightPublisher",
]
