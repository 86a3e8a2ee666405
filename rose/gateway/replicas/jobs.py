"""Routers of a gateway, one for each job, so that jobs share no turns, prefixes and forecasts.

A gateway that watches a scheduler knows its jobs. If the jobs are unknown (replicas of the command
line, a scheduler without a job) one router has all replicas, and a turn's job is a label.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_scheduler import Router
from rose.gateway.errors import BadRequest, UnknownJob
from rose.gateway.replicas.table import ReplicaEntry
from rose.gateway.settings import StalenessRule

ANY = ""


class JobRouters:
    """Routers of a gateway by job, and the names of the registered jobs."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._routers: dict[str, Router] = {ANY: Router()}

    def resolve(self, named: str) -> str:
        """Return the job to which a turn that names `named` belongs: the only registered job if it
        names none, any label if none is registered. Raises UnknownJob or BadRequest.
        """
        names = self._names
        if not names or named in names:
            return named
        if named:
            raise UnknownJob(f"job {named!r} is not registered here; name another, or none", "job")
        if len(names) == 1:
            return next(iter(names))
        raise BadRequest(
            f"{len(names)} jobs are registered: name yours in the header X-Rose-Job or the field"
            " job",
            "job",
        )

    def owner(self, named: str) -> str:
        """Return the registered job that owns the names of a caller who names `named`; "" if no
        jobs are registered.

        Raises as `resolve` does.
        """
        return self.registered(self.resolve(named))

    def registered(self, job: str) -> str:
        """Return the job if it is registered, else ""."""
        return job if job in self._names else ANY

    def of(self, job: str) -> Router:
        """Return the router that places turns of this job, a name that `resolve` returned."""
        if not self._names:
            return self._routers[ANY]
        return self._routers.get(job) or self._routers[ANY]

    @property
    def sessions_known(self) -> int:
        """Number of sessions (trajectories) that the routers remember."""
        return sum(router.sessions_known for router in self._routers.values())

    def has_room(self) -> bool:
        """Return True if any router has a replica with room for a turn."""
        return any(router.has_room() for router in self._routers.values())

    def live_turns(self) -> dict[str, int]:
        """Return the number of running turns on each replica of the table, by replica id."""
        found: dict[str, int] = {}
        for router in self._routers.values():
            found |= router.live_turns()
        return found

    def set_table(
        self, entries: Iterable[ReplicaEntry], jobs: Iterable[str], now_s: float, renewed: set[str]
    ) -> None:
        """Replace replicas and registered jobs: each router gets the replicas that are leased to
        its job. Routers of other jobs are dropped.

        renewed: ids of the replicas that start with an empty load, under a new lease.
        """
        self._names = frozenset(jobs)
        for name in self._names - self._routers.keys():
            self._routers[name] = Router()
        rows: dict[str, list[ReplicaEntry]] = {name: [] for name in self._routers}
        for entry in entries:
            owner = self._owner(entry)
            if owner is not None:
                rows[owner].append(entry)
        for name, mine in rows.items():
            self._routers[name].set_table([entry.view() for entry in mine], now_s, renewed)
        for name in self._routers.keys() - self._names - {ANY}:
            del self._routers[name]

    def _owner(self, entry: ReplicaEntry) -> str | None:
        """Return the job of the router that gets the replica; None if no router gets it, as for an
        unleased replica with several jobs.
        """
        if not self._names:
            return ANY
        if len(self._names) == 1:
            [only] = self._names
            return only if entry.job in ("", only) else None
        return entry.job if entry.job in self._names else None


@dataclass(frozen=True, slots=True)
class JobVersions:
    """Newest weight version of a job at the scheduler, and its bound on staleness."""

    latest: int
    max_staleness: int


class DefaultVersions:
    """Default `min_version` of turns that name no version, by the staleness rules of the gateway.

    It counts back from the job's announced version; without announcements, from the newest version
    on a replica.
    """

    def __init__(self, rules: Sequence[StalenessRule]) -> None:
        self._rules = {rule.job: rule for rule in rules}
        self.announced: Mapping[str, JobVersions] = {}
        """Versions of each registered job at the scheduler; empty without one."""
        self._newest = 0

    def set_table(self, entries: Iterable[ReplicaEntry]) -> None:
        """Record the newest policy version that any replica of a new table has."""
        self._newest = max((entry.policy_version for entry in entries), default=0)

    def min_version_of(self, job: str, asked: int | None, exact: int | None) -> int | None:
        """Return the oldest version that a turn accepts: its own `asked`, or the job's default if
        it names neither bound; None accepts any.
        """
        return self.oldest(job) if asked is None and exact is None else asked

    def oldest(self, job: str) -> int | None:
        """Return the default `min_version` of a job's turns now; None if any version will do."""
        rule = self._rules.get(job) or self._rules.get(ANY)
        if rule is None:
            return None
        known = self.announced.get(job)
        latest = self._newest if known is None else known.latest
        bound = rule.versions
        if bound is None:
            if known is None:
                return None
            bound = known.max_staleness
        return latest - bound if latest > bound else None
