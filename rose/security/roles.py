"""Roles and identities: what a certificate says of its owner, and what each role may call.

An identity is the one URI of a certificate, `spiffe://rose/CLUSTER/ROLE/NAME`. A URI is used, since
a role in a common name or a host name would have to be told apart from names that mean something
else; cert-manager and SPIRE both write such URIs, and TLS libraries hand them on as they are.

A server also bears the DNS name `ROLE.CLUSTER.rose.internal`. Clients ask for that name and not for
the address that they dial: an address says where a process runs, not what it is, and a standby's or
a forwarded port's is known to nobody beforehand.

`RPCS` is the one table of who may call what; a method without a row is refused.
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
# Of a path segment of a SPIFFE ID; `.` and `..` would be segments that mean something else.
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,253}")


class Role(StrEnum):
    """What a process is in a cluster."""

    NODE = "node"
    SCHEDULER = "scheduler"
    GATEWAY = "gateway"
    TRAINER = "trainer"
    OPERATOR = "operator"
    RELAY = "relay"


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of a certificate. A trainer's name is its job's."""

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
        """Raise ConfigError for a job that no trainer's certificate can name.

        Jobs may be called almost anything; a segment of a SPIFFE ID may not, and knows no escapes.
        """
        if not _NAME.fullmatch(job):
            raise ConfigError(
                f"job {job[:80]!r} can have no certificate, whose names are 1 to 253 of A-Z, a-z,"
                " 0-9, . _ and -; register the job under such a name"
            )

    @property
    def uri(self) -> str:
        """As a certificate bears it."""
        return f"spiffe://{TRUST_DOMAIN}/{self.cluster}/{self.role}/{self.name}"

    @property
    def server_name(self) -> str:
        """The DNS name that clients of this role ask its servers for."""
        return server_name(self.role, self.cluster)

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Read a URI. Raises ConfigError for one that names no role of ROSE."""
        match = _URI.fullmatch(uri)
        if match is None or match["role"] not in _ROLES:
            raise ConfigError(
                f"{uri[:120]!r} is no identity; it reads spiffe://rose/CLUSTER/ROLE/NAME"
            )
        return cls(match["cluster"], Role(match["role"]), match["name"])

    @classmethod
    def of_uris(cls, uris: Iterable[str]) -> Self:
        """The one identity among a certificate's URIs. Raises ConfigError for none or several."""
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
    """The DNS name of all servers of a role: `scheduler.prod.rose.internal`."""
    return f"{role}.{cluster}.rose.internal"


class Own(StrEnum):
    """How the named field of each request is held to the caller's own name."""

    NAME = "its own name"
    """Equal to it."""
    PROCESS = "its own name, or NAME/ANYTHING"
    """Or that of one of its processes, which follow each other under one name."""


@dataclass(frozen=True, slots=True)
class Leave:
    """A role may call a method, for itself only: `field` of each request names the caller."""

    field: str = ""
    own: Own = Own.NAME

    def permits(self, name: str, request: object) -> bool:
        """Whether this request speaks for nobody but its caller."""
        if not self.field:
            return True
        said = str(getattr(request, self.field))
        return said == name or (self.own is Own.PROCESS and said.startswith(f"{name}/"))


ANYTHING = Leave()
Rules = Mapping[Role, Leave]

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
        "Snapshot": {Role.OPERATOR: ANYTHING},
        "EndJob": {Role.TRAINER: Leave("job"), Role.OPERATOR: ANYTHING},
        "ApplyPolicy": {Role.OPERATOR: ANYTHING},
        "DeletePolicy": {Role.OPERATOR: ANYTHING},
        "ListPolicies": {Role.OPERATOR: ANYTHING},
        "ExplainPolicy": {Role.OPERATOR: ANYTHING},
    }
)
"""Methods of `rose.v1.Scheduler`, and who may call each of them."""

HTTP_CALLERS: Final = frozenset({Role.TRAINER, Role.OPERATOR})
"""Who may use a gateway's routes by certificate: a trainer for its job, an operator for any."""

WEIGHT_READERS: Final = frozenset({Role.NODE, Role.RELAY, Role.TRAINER, Role.OPERATOR})
"""Who may fetch weights of publishers and relays."""
