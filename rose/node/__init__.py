"""The node daemon: guards its host, runs its replicas, and updates them to each policy version."""

from rose.node.config import HostConfig, NodeConfig, ReplicaConfig
from rose.node.daemon import NodeDaemon

__all__ = ["HostConfig", "NodeConfig", "NodeDaemon", "ReplicaConfig"]
