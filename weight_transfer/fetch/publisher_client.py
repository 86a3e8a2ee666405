"""Client of a publisher: reads its signed catalog, and leases the versions that it still needs.

catalog  ──► CatalogPayload, in a signed envelope
leases   LeaseBody ──► LeaseGranted

{"job", "expires_s", "bases": [[version, bytes], …], "deltas": [[version, parent, bytes], …]}

The catalog is JSON in the envelope of a manifest, signed by the key of the job's manifests, and
bounded: a forged one could keep a replica from its version, by sending it elsewhere or keeping it
busy.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import isfinite
from typing import Annotated, Final

import aiohttp
import msgspec
from msgspec import Meta, Struct

from weight_transfer import SigningKey, VerifyKey, WeightError
from weight_transfer.catalog import Catalog, Published
from weight_transfer.errors import FetchError, IndexFormatError
from weight_transfer.fetch.download import ATTEMPT_FAILURES, Session, whole_reply
from weight_transfer.format.manifest import MALFORMED, Count, Name
from weight_transfer.format.signing import Envelope, Keys, Kind, key_of

CATALOG: Final = "/catalog"
LEASES: Final = "/leases"
MOST_BODY_BYTES: Final = 1 << 15
MOST_DELTAS: Final = 3_072
MOST_BASES: Final = 256
# The longest entry, three numbers of 19 digits, takes 64 bytes.
MAX_CATALOG_BYTES: Final = 256 << 10
# A catalog is signed for each request; the lifetime allows for clocks that differ.
LIFETIME_S: Final = 3_600.0
LEASE_TTL_S = 60.0
_CALL = aiohttp.ClientTimeout(total=10.0)


class CatalogPayload(Struct, frozen=True, forbid_unknown_fields=True):
    """Wire form of a catalog: (version, bytes) of each base, (version, parent, bytes) of each
    delta."""

    job: Name
    expires_s: float
    bases: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MOST_BASES)]
    deltas: Annotated[tuple[tuple[Count, Count, Count], ...], Meta(max_length=MOST_DELTAS)]


class LeaseBody(Struct, frozen=True):
    """Request that a publisher keep all after `version` for `ttl_s` seconds.

    Sent again to renew.
    """

    reader: str
    version: Count
    ttl_s: float


class LeaseGranted(Struct, frozen=True):
    """Reply to a lease request: granted seconds, LONGEST_TTL_S at most."""

    ttl_s: float


_read = msgspec.json.Decoder(CatalogPayload).decode


def encode_catalog(
    catalog: Catalog,
    job: str,
    key: SigningKey | None,
    now_s: float,
    lifetime_s: float = LIFETIME_S,
) -> bytes:
    """Return a catalog as signed bytes that expire after `lifetime_s`; unsigned without a key.

    Above MOST_BASES or MOST_DELTAS the oldest entries are left out.
    """
    bases = sorted(catalog.bases.items())[-MOST_BASES:]
    deltas = sorted((d.version, d.parent, d.wire_bytes) for d in catalog.deltas)[-MOST_DELTAS:]
    listed = CatalogPayload(job, now_s + lifetime_s, tuple(bases), tuple(deltas))
    envelope = Envelope(Kind.CATALOG, msgspec.json.encode(listed))
    return (envelope.signed(key) if key else envelope).to_bytes()


def decode_catalog(
    raw: bytes | bytearray, job: str, verify_key: VerifyKey | None, now_s: float
) -> Catalog:
    """Return the catalog in untrusted bytes, which are parsed only after `verify_key` verified
    them.

    Without a key the signature is not checked. Raises IndexFormatError, for another job's or an
    expired catalog too.
    """
    try:
        envelope = Envelope.of(raw, Kind.CATALOG, MAX_CATALOG_BYTES)
        if verify_key is not None:
            envelope.verify(verify_key)
        listed = _read(envelope.payload)
        catalog = Catalog(dict(listed.bases), tuple(Published(*delta) for delta in listed.deltas))
    except (WeightError, *MALFORMED) as error:
        raise IndexFormatError(f"no catalog of versions: {error!s:.200}") from error
    if listed.job != job:
        raise IndexFormatError(f"asked for versions of {job}, was given those of {listed.job}")
    if not isfinite(listed.expires_s) or now_s >= listed.expires_s:
        raise IndexFormatError("a catalog that expired; ask again, or check this clock")
    return catalog


_log = logging.getLogger(__name__)


class PublisherClient:
    """Client of publishers: it reads their catalogs and leases versions.

    `name`: unique among readers.
    """

    def __init__(self, session: Session, name: str, verify_key: Keys = None) -> None:
        """Keep the keys of the jobs' trainers, `verify_key`; None accepts unsigned catalogs."""
        self._session = session
        self._name = name
        self._verify_key = verify_key

    async def catalog(self, url: str, job: str) -> Catalog:
        """Fetch and return the catalog of a job's published versions.

        Raises FetchError, IndexFormatError.
        """
        try:
            raw = await whole_reply(self._session, f"{url}{CATALOG}", _CALL, MAX_CATALOG_BYTES)
        except ATTEMPT_FAILURES as error:
            raise FetchError(f"{url}{CATALOG} cannot be fetched: {error!r:.200}") from error
        return decode_catalog(raw, job, key_of(self._verify_key, job), time.time())

    @asynccontextmanager
    async def lease(self, url: str, part: str, version: int) -> AsyncIterator[None]:
        """Hold a lease at the publisher within the block, renewed in the background.

        The publisher then deletes nothing after `version`. A publisher that grants no leases or
        cannot be reached is ignored. `part`: name of this node's replica that reads.
        """
        asked = LeaseBody(f"{self._name}/{part}", version, LEASE_TTL_S)
        await self._take(url, asked)
        renewing = asyncio.create_task(self._renew(url, asked))
        try:
            yield
        finally:
            renewing.cancel()

    async def _renew(self, url: str, asked: LeaseBody) -> None:
        while True:
            await asyncio.sleep(LEASE_TTL_S / 3)
            await self._take(url, asked)

    async def _take(self, url: str, asked: LeaseBody) -> None:
        """Request the lease once.

        Failures are ignored, since the fetch reports a version that is gone.
        """
        try:
            async with self._session.request(
                "POST",
                f"{url}{LEASES}",
                data=msgspec.json.encode(asked),
                timeout=_CALL,
                allow_redirects=False,
            ):
                pass
        except ATTEMPT_FAILURES:
            pass  # It is asked again in a third of the lease's time.
        except Exception as error:  # noqa: BLE001 - whatever an announced address makes a client raise
            _log.warning("%s takes no lease: %s: %.200s", url, type(error).__name__, error)
