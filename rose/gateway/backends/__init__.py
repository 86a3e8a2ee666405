"""How the gateway speaks with a replica: one file an API, bodies out and lines in, without IO."""

from rose.gateway.backends.base import BackendError, ReplicaBackend
from rose.gateway.backends.rose import RoseLink
from rose.gateway.backends.sglang import SglangLink
from rose.gateway.backends.vllm import VllmLink
from rose.gateway.replicas.table import ReplicaApi

LINKS: dict[ReplicaApi, ReplicaBackend] = {
    ReplicaApi.ROSE: RoseLink(),
    ReplicaApi.VLLM: VllmLink(),
    ReplicaApi.SGLANG: SglangLink(),
}

__all__ = ["LINKS", "BackendError", "ReplicaBackend"]
