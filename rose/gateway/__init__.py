"""HTTP gateway of all rollout replicas: routes turns, moves them between replicas, keeps tokens."""

from rose.gateway.app import Gateway
from rose.gateway.replicas.table import ReplicaEntry
from rose.gateway.settings import GatewaySettings, StaticReplica
from rose.gateway.stats import GatewayStatus

__all__ = ["Gateway", "GatewaySettings", "GatewayStatus", "ReplicaEntry", "StaticReplica"]
