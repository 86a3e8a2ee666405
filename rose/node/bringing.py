"""The way of one replica to a version: planned, leased, fetched; the engine takes it at once.

held ──δ──► … ──δ──► target       one folded update: versions between are never active here
base ──δ──► … ──δ──► target       where that is fewer bytes, or what is held is not what it says
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rose.node.chain import KnownVersion, VersionChain
from rose.publish import FetchError, Hub, IndexFormatError, Reader, Receiving, fetch_version
from weight_transfer import OnUpdate, VerifyKey
from weight_transfer.catalog import Catalog, Plan
from weight_transfer.errors import CatalogError


@dataclass(frozen=True, slots=True)
class Source:
    """Where versions come from, shared by all replicas of a node."""

    session: aiohttp.ClientSession
    hub: Hub
    chain: VersionChain
    verify_key: VerifyKey | None
    reader: Reader

    @property
    def receiving(self) -> Receiving:
        """Where they are stored."""
        return self.hub.receiving


@dataclass(frozen=True, slots=True)
class Brought:
    """Manifests that lead to `version`, in order; all their chunks are here.

    `on_update`: what the last of them wants for turns in flight.
    """

    version: int
    manifests: tuple[Path, ...]
    wire_bytes: int
    on_update: OnUpdate


@dataclass(frozen=True, slots=True)
class Wish:
    """What a replica needs. `rebase`: it holds other weights than its version says."""

    replica: str
    held: int
    target: KnownVersion
    rebase: bool = False


async def bring(
    source: Source, wish: Wish, on_reject: Callable[[str], None], hold: set[str]
) -> Brought:
    """Have all that the engine needs in the store; `hold` takes the names of the files.

    Raises RoseError or WeightError that says what is in the way; CatalogError only when a base is
    needed and there is none.
    """
    url = wish.target.url
    async with source.reader.lease(url, wish.replica, wish.held):
        plan = await _plan(source, wish)
        steps = [(version, False) for version in plan.deltas]
        if plan.base is not None:
            steps.insert(0, (plan.base, True))
        paths, wire_bytes, on_update = [], 0, OnUpdate.RECOMPUTE
        for version, base in steps:
            fetched = await fetch_version(
                source.hub,
                url,
                wish.target.job,
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
    return Brought(steps[-1][0], tuple(paths), wire_bytes, on_update)


async def _plan(source: Source, wish: Wish) -> Plan:
    target = wish.target
    if wish.rebase:
        return rebased(
            await source.reader.catalog(target.url, target.job), wish.held, target.version
        )
    if target.parent == wish.held:
        return Plan(None, (target.version,), 0)
    try:
        catalog = await source.reader.catalog(target.url, target.job)
        return catalog.plan(wish.held, target.version)
    except (FetchError, IndexFormatError, CatalogError):
        # What was announced is known without a catalog, one step after the other.
        step = source.chain.after(wish.held)
        if step is None:
            raise
        return Plan(None, (step.version,), 0)


def rebased(catalog: Catalog, held: int, target: int) -> Plan:
    """The cheapest way to `target` from a base after `held`; CatalogError without any."""
    newer = {version: size for version, size in catalog.bases.items() if version > held}
    return Catalog(newer, catalog.deltas).plan(None, target)
