"""HTTP front of all rollout replicas: routes turns, goes on elsewhere, keeps every token."""

from rose.gateway.process import Gateway
from rose.gateway.settings import GatewaySettings, StaticReplica
from rose.gateway.table import ReplicaEntry

__all__ = ["Gateway", "GatewaySettings", "ReplicaEntry", "StaticReplica"]
