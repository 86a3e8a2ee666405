"""Fetch of one replica's next update: planned, leased, and fetched from the publisher or a relay.

held ──δ──► … ──δ──► target       one folded update: versions between are never active here
base ──δ──► … ──δ──► target       where that is fewer bytes, or the held weights are not the version

`AnnouncedVersions` are the versions that the node knows of; they say which one a replica needs
next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rose.publish import (
    ChunkFetcher,
    DownloadLimits,
    FetchError,
    IndexFormatError,
    PublisherClient,
    fetch_version,
)
from weight_transfer import OnUpdate, VerifyKey
from weight_transfer.errors import CatalogError
from weight_transfer.store.catalog import Catalog, FetchPlan

# A replica further behind than that finds its way in the publisher's catalog.
STEPS_KEPT = 4_096


@dataclass(frozen=True, slots=True)
class KnownVersion:
    """A version that was announced: whose it is, what it builds on and where it is."""

    job: str
    version: int
    parent: int
    url: str


class AnnouncedVersions:
    """Announced versions by their parent; version 0 is the model every engine starts from."""

    def __init__(self) -> None:
        self._by_parent: dict[int, KnownVersion] = {}
        self.newest: KnownVersion | None = None

    def add(self, known: KnownVersion) -> None:
        """Learn of a version; learning it twice changes nothing."""
        self._by_parent[known.parent] = known
        if len(self._by_parent) > STEPS_KEPT:
            del self._by_parent[min(self._by_parent)]
        if self.newest is None or known.version >= self.newest.version:
            self.newest = known

    def after(self, version: int) -> KnownVersion | None:
        """The step that follows `version`, None when a replica at it is up to date."""
        return self._by_parent.get(version)


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Source of versions, shared by all replicas of a node."""

    session: aiohttp.ClientSession
    fetcher: ChunkFetcher
    chain: AnnouncedVersions
    verify_key: VerifyKey | None
    reader: PublisherClient

    @property
    def receiving(self) -> DownloadLimits:
        """Where they are stored."""
        return self.fetcher.receiving


@dataclass(frozen=True, slots=True)
class FetchedUpdate:
    """Manifests that lead to `version`, in order; all their chunks are here.

    `on_update`: what the last of them wants for turns in flight.
    """

    version: int
    manifests: tuple[Path, ...]
    wire_bytes: int
    on_update: OnUpdate


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """Request for a replica's update. `rebase`: it holds other weights than its version says."""

    replica: str
    held: int
    target: KnownVersion
    rebase: bool = False


async def fetch_update(
    source: WeightSource, request: UpdateRequest, on_reject: Callable[[str], None], hold: set[str]
) -> FetchedUpdate:
    """Have all that the engine needs in the store; `hold` takes the names of the files.

    Raises RoseError or WeightError that says what is in the way; CatalogError only when a base is
    needed and there is none.
    """
    url = request.target.url
    async with source.reader.lease(url, request.replica, request.held):
        plan = await _plan(source, request)
        steps = [(version, False) for version in plan.deltas]
        if plan.base is not None:
            steps.insert(0, (plan.base, True))
        paths, wire_bytes, on_update = [], 0, OnUpdate.RECOMPUTE
        for version, base in steps:
            fetched = await fetch_version(
                source.fetcher,
                url,
                request.target.job,
                version,
                source.verify_key,
                on_reject,
                hold,
                base=base,
                on_the_way=version != steps[-1][0],
            )
            paths.append(fetched.manifest_path)
            wire_bytes += fetched.wire_bytes
            on_update = fetched.manifest.on_update
    return FetchedUpdate(steps[-1][0], tuple(paths), wire_bytes, on_update)


async def _plan(source: WeightSource, request: UpdateRequest) -> FetchPlan:
    target = request.target
    if request.rebase:
        return rebased(
            await source.reader.catalog(target.url, target.job), request.held, target.version
        )
    if target.parent == request.held:
        return FetchPlan(None, (target.version,), 0)
    try:
        catalog = await source.reader.catalog(target.url, target.job)
        return catalog.plan(request.held, target.version)
    except (FetchError, IndexFormatError, CatalogError):
        # What was announced is known without a catalog, one step after the other.
        step = source.chain.after(request.held)
        if step is None:
            raise
        return FetchPlan(None, (step.version,), 0)


def rebased(catalog: Catalog, held: int, target: int) -> FetchPlan:
    """The cheapest way to `target` from a base after `held`; CatalogError without any."""
    newer = {version: size for version, size in catalog.bases.items() if version > held}
    return Catalog(newer, catalog.deltas).plan(None, target)
