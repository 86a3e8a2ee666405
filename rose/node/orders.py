"""What a node takes as an order: a scheduler, or whoever answers in its place, is not believed."""

import math

from rose.errors import ConfigError, RefusedError
from rose.rpc import rose_pb2
from rose.urls import checked_url

# A scheduler renews each second: a lease that lives for much longer would outlive its node's sight.
MAX_LEASE_TTL_S = 60.0
MAX_EPOCH = MAX_VERSION = 2**53
MAX_NEIGHBOURS = 4_096


def check_order(command: rose_pb2.NodeCommand) -> None:
    """Raise `RefusedError` or `ConfigError`, in a line, for an order that is not to be obeyed."""
    match command.WhichOneof("command"):
        case "lease":
            _check_lease(command.lease)
        case "version":
            _check_version(command.version)
        case "relays":
            _check_relays(command.relays)


def _check_lease(lease: rose_pb2.Lease) -> None:
    if lease.epoch > MAX_EPOCH:
        raise RefusedError(f"epoch {lease.epoch} of {lease.replica} is above 2^53")
    if not (math.isfinite(lease.ttl_s) and 0 < lease.ttl_s <= MAX_LEASE_TTL_S):
        raise RefusedError(
            f"a lease of {lease.replica} for {lease.ttl_s} s; it may live for up to"
            f" {MAX_LEASE_TTL_S:.0f} s"
        )


def _check_version(version: rose_pb2.Version) -> None:
    if not version.parent < version.version <= MAX_VERSION:
        raise RefusedError(
            f"version {version.version} with parent {version.parent}; versions grow, up to 2^53"
        )
    checked_url(version.url, f"the url of version {version.version}")


def _check_relays(relays: rose_pb2.Relays) -> None:
    if len(relays.urls) > MAX_NEIGHBOURS:
        raise RefusedError(f"{len(relays.urls)} relays at once; a cluster has {MAX_NEIGHBOURS}")
    for url in relays.urls:
        try:
            checked_url(url, "a neighbour's relay")
        except ConfigError as error:
            raise RefusedError(f"the cluster's relays stay as they were: {error}") from error
