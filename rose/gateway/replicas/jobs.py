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
    """The routers, and the turns of each."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._routers: dict[str, Router] = {ANY: Router()}

    def resolve(self, named: str) -> str:
        """Return the job of a turn that names this one. Raises UnknownJob or BadRequest."""
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
        """Return the registered job that owns names, sessions and turns, "" where it is a label.

        Raises as `resolve` does.
        """
        return self.registered(self.resolve(named))

    def registered(self, job: str) -> str:
        """Return the job if it is a registered one, "" if it is a label."""
        return job if job in self._names else ANY

    def of(self, job: str) -> Router:
        """Return the router of turns of a job that `resolve` returned."""
        if not self._names:
            return self._routers[ANY]
        return self._routers.get(job) or self._routers[ANY]

    @property
    def sessions_known(self) -> int:
        """Trajectories that the routers remember."""
        return sum(router.sessions_known for router in self._routers.values())

    def has_room(self) -> bool:
        """Return True if any turn could be placed."""
        return any(router.has_room() for router in self._routers.values())

    def live_turns(self) -> dict[str, int]:
        """Return the turns on each replica of the table."""
        found: dict[str, int] = {}
        for router in self._routers.values():
            found |= router.live_turns()
        return found

    def set_table(
        self,
        entries: Iterable[ReplicaEntry],
        jobs: Iterable[str],
        now_s: float,
        renewed: set[str],
    ) -> None:
        """Take a new table: each router gets the replicas that are leased to its job."""
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
        """Return the router of the replica. With several jobs an unleased replica has none."""
        if not self._names:
            return ANY
        if len(self._names) == 1:
            [only] = self._names
            return only if entry.job in ("", only) else None
        return entry.job if entry.job in self._names else None


@dataclass(frozen=True, slots=True)
class JobVersions:
    """Versions of a job at the scheduler: the latest one, and its bound on staleness."""

    latest: int
    max_staleness: int


class DefaultVersions:
    """Default oldest versions of turns, for callers that cannot send `min_version`.

    Latest is the announced version of a job; without announcements, the newest on a replica.
    """

    def __init__(self, rules: Sequence[StalenessRule]) -> None:
        self._rules = {rule.job: rule for rule in rules}
        self.announced: Mapping[str, JobVersions] = {}
        """Versions of each registered job at the scheduler; empty without one."""
        self._newest = 0

    def set_table(self, entries: Iterable[ReplicaEntry]) -> None:
        """Take the replicas of a new table."""
        self._newest = max((entry.policy_version for entry in entries), default=0)

    def min_version_of(self, job: str, asked: int | None, exact: int | None) -> int | None:
        """Return a turn's oldest acceptable version: its own, else the gateway's default."""
        return self.oldest(job) if asked is None and exact is None else asked

    def oldest(self, job: str) -> int | None:
        """Return the `min_version` of a job's turns without one; None: any version will do."""
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
