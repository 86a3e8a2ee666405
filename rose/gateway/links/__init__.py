"""How the gateway speaks with a replica: one file an API, bodies out and lines in, without IO."""

from rose.gateway.links.base import Link, LinkError, ReplicaLine
from rose.gateway.links.rose import RoseLink
from rose.gateway.links.sglang import SglangLink
from rose.gateway.links.vllm import VllmLink
from rose.gateway.table import ReplicaApi

LINKS: dict[ReplicaApi, Link] = {
    ReplicaApi.ROSE: RoseLink(),
    ReplicaApi.VLLM: VllmLink(),
    ReplicaApi.SGLANG: SglangLink(),
}

__all__ = ["LINKS", "Link", "LinkError", "ReplicaLine"]
