"""Roles and identities: the owner of a certificate, and the calls that each role may make.

An identity is the one URI of a certificate, `spiffe://rose/CLUSTER/ROLE/NAME`. A role in a common
name or a host name could be confused with other names; cert-manager and SPIRE both write such
URIs, and TLS libraries hand them on unchanged.

A server's certificate also has the DNS name `ROLE.CLUSTER.rose.internal`. Clients ask for that
name and not for the address that they dial: an address says where a process runs, not what it
is, and the address of a standby or a forwarded port is not known beforehand.

`RPCS` is the one table of allowed calls; a method without a row is refused.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Self

from rose.errors import ConfigError

TRUST_DOMAIN: Final = "rose"
_URI = re.compile(r"spiffe://rose/(?P<cluster>[^/]+)/(?P<role>[^/]+)/(?P<name>[^/]+)")
_CLUSTER = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
# A path segment of a SPIFFE ID; `.` and `..` have another meaning there.
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,253}")


class Role(StrEnum):
    """Role of a process or person in a cluster, as its certificate names it."""

    NODE = "node"
    SCHEDULER = "scheduler"
    GATEWAY = "gateway"
    TRAINER = "trainer"
    OPERATOR = "operator"
    RELAY = "relay"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class Identity:
    """Owner of a certificate: cluster, role and name. A trainer's name is its job's."""

    cluster: str
    role: Role
    name: str

    def __post_init__(self) -> None:
        if not _CLUSTER.fullmatch(self.cluster):
            raise ConfigError(
                f"{self.cluster[:80]!r} names no cluster; give 1 to 63 of a-z, 0-9 and -"
            )
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name[:80]!r} is no name for a certificate; give 1 to 253 of A-Z, a-z, 0-9,"
                " . _ and -"
            )

    @staticmethod
    def check_job(job: str) -> None:
        """Raise ConfigError if a job's name cannot be that of a trainer's certificate.

        A job may have almost any name; a segment of a SPIFFE ID may not, and has no escapes.
        """
        if not _NAME.fullmatch(job):
            raise ConfigError(
                f"job {job[:80]!r} can have no certificate, whose names are 1 to 253 of A-Z, a-z,"
                " 0-9, . _ and -; register the job under such a name"
            )

    @property
    def uri(self) -> str:
        """URI of this identity in a certificate: spiffe://rose/CLUSTER/ROLE/NAME."""
        return f"spiffe://{TRUST_DOMAIN}/{self.cluster}/{self.role}/{self.name}"

    @property
    def server_name(self) -> str:
        """DNS name that clients require in the certificate of a server of this role and cluster."""
        return server_name(self.role, self.cluster)

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Return the identity that a URI names.

        Raises ConfigError for one that names no role of ROSE.
        """
        match = _URI.fullmatch(uri)
        if match is None or match["role"] not in _ROLES:
            raise ConfigError(
                f"{uri[:120]!r} is no identity; it reads spiffe://rose/CLUSTER/ROLE/NAME"
            )
        return cls(match["cluster"], Role(match["role"]), match["name"])

    @classmethod
    def of_uris(cls, uris: Iterable[str]) -> Self:
        """Return the one identity among a certificate's URIs.

        Raises ConfigError for none or several.
        """
        ours = [uri for uri in uris if uri.startswith(f"spiffe://{TRUST_DOMAIN}/")]
        if len(ours) != 1:
            raise ConfigError(
                f"the certificate has {len(ours)} identities; issue one with the URI"
                " spiffe://rose/CLUSTER/ROLE/NAME"
            )
        return cls.parse(ours[0])

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


_ROLES = frozenset(role.value for role in Role)


def server_name(role: Role, cluster: str) -> str:
    """Return the DNS name of all servers of a role: `scheduler.prod.rose.internal`."""
    return f"{role}.{cluster}.rose.internal"


class Own(StrEnum):
    """Rule by which a field of a gRPC request must name the request's caller."""

    NAME = "its own name"
    """The field equals the caller's name."""
    PROCESS = "its own name, or NAME/ANYTHING"
    """The field equals the caller's name, or NAME/ANYTHING: one of several processes that share the
    name.
    """


@dataclass(frozen=True, slots=True)
class Leave:
    """Permission of a role to call a gRPC method.

    field: the request's field that must name the caller; "" allows any request.
    """

    field: str = ""
    own: Own = Own.NAME

    def permits(self, name: str, request: object) -> bool:
        """Return True if the request names only its caller, whose name is `name`, in the
        permission's field.
        """
        if not self.field:
            return True
        said = str(getattr(request, self.field))
        return said == name or (self.own is Own.PROCESS and said.startswith(f"{name}/"))


ANYTHING = Leave()
Rules = Mapping[Role, Leave]
_READ: Final[Rules] = MappingProxyType({Role.OPERATOR: ANYTHING, Role.VIEWER: ANYTHING})

RPCS: Final[Mapping[str, Rules]] = MappingProxyType(
    {
        "Attach": {Role.NODE: Leave("node")},
        "WatchReplicas": {Role.GATEWAY: Leave("gateway", Own.PROCESS)},
        "ReportDemand": {Role.GATEWAY: Leave("gateway", Own.PROCESS)},
        "RegisterJob": {Role.TRAINER: Leave("job")},
        "AnnounceVersion": {Role.TRAINER: Leave("job")},
        "RenewRun": {Role.TRAINER: Leave("job")},
        "EndRun": {Role.TRAINER: Leave("job")},
        "DropJob": {Role.OPERATOR: ANYTHING},
        "SetHarvest": {Role.OPERATOR: ANYTHING},
        "Revoke": {Role.OPERATOR: ANYTHING},
        "Snapshot": _READ,
        "EndJob": {Role.TRAINER: Leave("job"), Role.OPERATOR: ANYTHING},
        "ApplyPolicy": {Role.OPERATOR: ANYTHING},
        "DeletePolicy": {Role.OPERATOR: ANYTHING},
        "ListPolicies": _READ,
        "ExplainPolicy": _READ,
    }
)
"""Roles that may call each method of `rose.v1.Scheduler`, with the permission of each."""

HTTP_CALLERS: Final = frozenset({Role.TRAINER, Role.OPERATOR})
"""Roles that may use a gateway's routes: a trainer for its own job, an operator for any."""

DASHBOARD_READERS: Final = frozenset(_READ)
"""Roles that may read a scheduler's dashboard where it is served over TLS."""

WEIGHT_READERS: Final = frozenset({Role.NODE, Role.RELAY, Role.TRAINER, Role.OPERATOR})
"""Roles that may fetch weights from publishers and relays."""
