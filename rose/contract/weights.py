"""Weights in transfer: from publishers and relays to nodes, and from a node to its replicas.

catalog          ──► Listing, as the payload of a signed envelope leases           LeaseBody ──►
LeaseGranted group            ──► GroupName, of a leader of a fixed group of GPUs weights/apply
ApplyBody ──► Applied; 422 Unproven if the engine's version is unknown weights/audit    nothing ──►
Audited Manifests and chunks are files: `weight_transfer`.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from rose.contract.fields import Name
from rose.contract.replica import ROUTES, Fault
from weight_transfer import OnUpdate
from weight_transfer.format.manifest import Count
from weight_transfer.format.manifest import Name as JobName

CATALOG: Final = "/catalog"
LEASES: Final = "/leases"
GROUP: Final = "/group"
APPLY: Final = f"{ROUTES}weights/apply"
AUDIT: Final = f"{ROUTES}weights/audit"

RUN_TTL_S: Final = 10.0
"""A trainer that has not renewed its run for this long counts as dead."""
MOST_BODY_BYTES: Final = 4_096
MOST_DELTAS: Final = 3_072
MOST_BASES: Final = 256
# The longest entry, three numbers of 19 digits, takes 64 bytes.
MAX_CATALOG_BYTES: Final = 256 << 10
MOST_NUMBERS: Final = 1_024
MOST_NAME_BYTES: Final = 8 << 10
LONGEST_TTL_S: Final = 120.0
MOST_READER_CHARS: Final = 512


class Listing(Struct, frozen=True, forbid_unknown_fields=True):
    """A catalog: (version, bytes) of each base, (version, parent, bytes) of each delta."""

    job: JobName
    expires_s: float
    bases: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MOST_BASES)]
    deltas: Annotated[tuple[tuple[Count, Count, Count], ...], Meta(max_length=MOST_DELTAS)]


class LeaseBody(Struct, frozen=True):
    """Request to keep everything after `version` for `ttl_s`; renewed by a new request."""

    reader: str
    version: Count
    ttl_s: float


class LeaseGranted(Struct, frozen=True):
    """Granted time, LONGEST_TTL_S at most."""

    ttl_s: float


GroupName = Annotated[tuple[int, ...], Meta(max_length=MOST_NUMBERS)]
"""NCCL's name of a group."""


class ApplyBody(Struct, frozen=True, omit_defaults=True):
    """Versions to bring into force: paths on this machine.

    `manifests` of versions that follow each other and are applied at once, or one `manifest`.
    """

    chunks: Name
    manifest: Name = ""
    manifests: Annotated[list[Name], Meta(max_length=4_096)] = []
    on_update: OnUpdate = OnUpdate.RECOMPUTE

    @property
    def paths(self) -> list[str]:
        """The manifests, in order; empty if the caller named none."""
        return self.manifests or ([self.manifest] if self.manifest else [])


class UpdateApplied(Struct, frozen=True, kw_only=True):
    """Report of an activation; `ok` only when digest and probe both agree.

    Times are of the whole replica: `stage_s` while it served, `pause_s` while it did not.
    """

    version: int
    tensors: int = 0
    changed_elements: int
    wire_bytes: int
    stage_s: float = 0.0
    pause_s: float
    apply_s: float
    probe_s: float = 0.0
    loose: int = 0
    on_update: OnUpdate = OnUpdate.RECOMPUTE
    finished_old: bool = False
    digest_ok: bool
    probe_ok: bool
    probe_max_abs_diff: float

    @property
    def ok(self) -> bool:
        """True if the version is active and proven."""
        return self.digest_ok and self.probe_ok


class Unproven(Struct, frozen=True):
    """A commit broke off: the engine's version is unknown, and it runs no turns."""

    error: Fault
    version: None = None
    digest_ok: bool = False
    probe_ok: bool = False


class Audited(Struct, frozen=True):
    """Names of wrong live tensors, and of those that could not be judged."""

    version: int
    flipped: list[str]
    unjudged: list[str]
    weights: int
    audit_s: float
