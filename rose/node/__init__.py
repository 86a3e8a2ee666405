"""The node daemon: guards its host, runs its replicas, and brings them each policy version."""

from rose.node.config import NodeConfig
from rose.node.daemon import NodeDaemon
from rose.node.engine_config import HostConfig, ReplicaConfig

__all__ = ["HostConfig", "NodeConfig", "NodeDaemon", "ReplicaConfig"]
