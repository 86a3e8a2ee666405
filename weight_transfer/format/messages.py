"""HTTP messages of publishers and relays, beside manifests and chunks, which are files.

catalog  ──► Listing, as the payload of a signed envelope
leases   LeaseBody ──► LeaseGranted
group    ──► GroupName, of a leader of a fixed group of GPUs
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from weight_transfer.format.manifest import Count, Name

CATALOG: Final = "/catalog"
LEASES: Final = "/leases"
GROUP: Final = "/group"
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

    job: Name
    expires_s: float
    bases: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MOST_BASES)]
    deltas: Annotated[tuple[tuple[Count, Count, Count], ...], Meta(max_length=MOST_DELTAS)]


class LeaseBody(Struct, frozen=True):
    """Request that nothing after `version` be collected for `ttl_s`; sent again to renew it."""

    reader: str
    version: Count
    ttl_s: float


class LeaseGranted(Struct, frozen=True):
    """Granted time of a lease, LONGEST_TTL_S at most."""

    ttl_s: float


GroupName = Annotated[tuple[int, ...], Meta(max_length=MOST_NUMBERS)]
"""NCCL's name of a group."""
