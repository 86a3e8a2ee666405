"""Replica backends: one file for each API of a replica, bodies out and lines in.

The backends do no IO; `http_pool` and `probe` hold the connections.
"""

from rose.gateway.backends.base import BackendError, ReplicaBackend, ReplicaLine
from rose.gateway.backends.rose import RoseBackend
from rose.gateway.backends.sglang import SglangBackend
from rose.gateway.backends.vllm import VllmBackend
from rose.gateway.replicas.table import ReplicaApi

LINKS: dict[ReplicaApi, ReplicaBackend] = {
    ReplicaApi.ROSE: RoseBackend(),
    ReplicaApi.VLLM: VllmBackend(),
    ReplicaApi.SGLANG: SglangBackend(),
}

__all__ = ["LINKS", "BackendError", "ReplicaBackend", "ReplicaLine"]
