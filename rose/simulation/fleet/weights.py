"""Stand-in for weight transfer: how long a version takes to each node, and who waits for whom.

Which objects a node needs is production's choice (`weight_transfer.catalog.Catalog`: the
chain of deltas or a base, whichever is fewer bytes). The model sends them: each object crosses the
slow link once, one after the other, and is passed on inside its cluster while it comes.
"""

from dataclasses import replace

from rose.simulation.clock.event_queue import EventQueue
from rose.simulation.cluster import Links
from weight_transfer.catalog import Catalog, Published
from weight_transfer.errors import CatalogError

KEPT_DELTAS = 8


class ModelledTransfer:
    """Versions of one job, from its trainer to two clusters: its own, and one behind the link."""

    def __init__(self, queue: EventQueue, links: Links, base_bytes: int) -> None:
        self._queue = queue
        self._links = links
        self._base_bytes = base_bytes
        self._catalog = Catalog({0: base_bytes})
        # Time at which each object has crossed the slow link: ("base" or "delta", version).
        self._crossed_s: dict[tuple[str, int], float] = {}
        self._slow_free_s = 0.0
        self.slow_bytes = 0

    def publish(self, version: int, parent: int, wire_bytes: int) -> None:
        """A version is durable at its trainer."""
        deltas = (*self._catalog.deltas, Published(version, parent, wire_bytes))
        self._catalog = replace(self._catalog, deltas=deltas)
        if self._catalog.base_due():
            # Older deltas are collected; who is further behind takes the base.
            self._catalog = Catalog({version: self._base_bytes}, deltas[-KEPT_DELTAS:])

    def fetch_s(self, held: int | None, target: int, *, far: bool) -> float:
        """Seconds from now until a node that holds version `held` has `target`.

        far: it is behind the slow link.
        """
        try:
            plan = self._catalog.plan(held, target)
        except CatalogError:
            plan = self._catalog.plan(None, target)
        now_s = self._queue.now_s
        links = self._links
        near_s = now_s + plan.wire_bytes / links.near_bytes_s
        if far:
            for kind, version, size in self._objects(plan.base, plan.deltas):
                near_s = max(near_s, self._cross(kind, version, size, now_s))
        return near_s + links.latency_s - now_s

    def _objects(self, base: int | None, deltas: tuple[int, ...]) -> list[tuple[str, int, int]]:
        sizes = {each.version: each.wire_bytes for each in self._catalog.deltas}
        objects = [("delta", version, sizes[version]) for version in deltas]
        # The model that it began with is on every node's disk.
        if base is not None and base != 0:
            objects.insert(0, ("base", base, self._catalog.bases[base]))
        return objects

    def _cross(self, kind: str, version: int, size: int, now_s: float) -> float:
        key = (kind, version)
        if key not in self._crossed_s:
            began_s = max(now_s, self._slow_free_s)
            self._slow_free_s = began_s + size / self._links.slow_bytes_s
            self._crossed_s[key] = self._slow_free_s
            self.slow_bytes += size
        return self._crossed_s[key]
