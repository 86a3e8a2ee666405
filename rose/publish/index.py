"""A catalog, between a publisher and whoever catches up: JSON in the envelope of a manifest.

{"job", "expires_s", "bases": [[version, bytes], …], "deltas": [[version, parent, bytes], …]}
It is signed by the key of the job's manifests, and bounded: who is sent somewhere else by it, or
kept busy with it, would be a replica that does not get its version.
"""

from math import isfinite
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from rose.errors import RoseError
from weight_transfer import SigningKey, VerifyKey, WeightError
from weight_transfer.catalog import Catalog, Published
from weight_transfer.envelope import Envelope, Kind
from weight_transfer.manifest import MALFORMED, Count, Name

MOST_DELTAS: Final = 3_072
MOST_BASES: Final = 256
# The longest entry, three numbers of 19 digits, takes 64 bytes.
MAX_CATALOG_BYTES: Final = 256 << 10
# It is written for whoever asks: long enough for clocks that differ, and for relays of tomorrow.
LIFETIME_S: Final = 3_600.0


class IndexFormatError(RoseError):
    """What was sent is no catalog of this job."""


class _Listed(Struct, frozen=True, forbid_unknown_fields=True):
    job: Name
    expires_s: float
    bases: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MOST_BASES)]
    deltas: Annotated[tuple[tuple[Count, Count, Count], ...], Meta(max_length=MOST_DELTAS)]


_read = msgspec.json.Decoder(_Listed).decode


def written(catalog: Catalog, job: str, key: SigningKey | None, now_s: float) -> bytes:
    """As it is sent: the newest versions, where there are too many; unsigned without a key."""
    bases = sorted(catalog.bases.items())[-MOST_BASES:]
    deltas = sorted((d.version, d.parent, d.wire_bytes) for d in catalog.deltas)[-MOST_DELTAS:]
    listed = _Listed(job, now_s + LIFETIME_S, tuple(bases), tuple(deltas))
    envelope = Envelope(Kind.CATALOG, msgspec.json.encode(listed))
    return (envelope.signed(key) if key else envelope).to_bytes()


def read(raw: bytes, job: str, verify_key: VerifyKey | None, now_s: float) -> Catalog:
    """From untrusted bytes, of which nothing is parsed before the key has vouched for them.

    Raises IndexFormatError.
    """
    try:
        envelope = Envelope.of(raw, Kind.CATALOG, MAX_CATALOG_BYTES)
        if verify_key is not None:
            envelope.verify(verify_key)
        listed = _read(envelope.payload)
        if listed.job != job:
            raise IndexFormatError(f"asked for versions of {job}, was given those of {listed.job}")
        if not isfinite(listed.expires_s) or now_s >= listed.expires_s:
            raise IndexFormatError("a catalog that expired; ask again, or check this clock")
        return Catalog(dict(listed.bases), tuple(Published(*delta) for delta in listed.deltas))
    except (WeightError, *MALFORMED) as error:
        raise IndexFormatError(f"no catalog of versions: {error!s:.200}") from error
