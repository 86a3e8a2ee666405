"""Jobs of this scheduler: what each may have, and its chain of policy versions.

A job that was ended keeps its name and its newest version: registered again it goes on from there,
so that (job, version) never means two things to a node that still holds the older one.
"""

from collections.abc import Iterable
from dataclasses import replace

from elastic_scheduler import StalenessBound
from rose.errors import ConfigError, RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.persistence import JobRecord, Saved, VersionRecord

# Steps of training are skipped, a run goes on from another's: but no version can be announced after
# which none is left.
MAX_VERSION_LEAD = 2**20
# Versions sent to a node that attaches; older ones are in the publishers' catalogs.
TOLD_VERSIONS = 1_024
# Fewer than a gateway tells apart in its reports.
MAX_REGISTERED = 48
MAX_KEPT = 4_096


class VersionChain:
    """Announced weight versions of one job.

    latest: the newest version, 0 (the job's base model) before the first. first: version before
    which all weights are another run's, 0 if the chain has no base.

    A base, which names itself as its parent, begins the chain anew for a run that does not continue
    the one before. Version numbers go on growing, so replicas move to a base as to any newer
    version.
    """

    def __init__(self, job: str, versions: Iterable[VersionRecord] = (), floor: int = 0) -> None:
        """Begin with stored versions.

        floor: greatest version number used before versions were dropped.
        """
        self.job = job
        self._floor = floor
        self._versions = {record.version: record for record in versions}
        self.latest = max(self._versions, default=0)
        bases = (record.version for record in self._versions.values() if record.is_base)
        self.first = max(bases, default=0)

    @property
    def used(self) -> int:
        """Greatest version number that the job ever used, dropped versions included."""
        return max(self.latest, self._floor)

    @property
    def newest(self) -> VersionRecord | None:
        """Record of the newest announced version, None before the first."""
        return self._versions.get(self.latest)

    @property
    def records(self) -> list[VersionRecord]:
        """Records of all versions in the chain, oldest first."""
        return [self._versions[version] for version in sorted(self._versions)]

    def check(self, record: VersionRecord) -> bool:
        """Return True if a version is new, False if the identical record is known.

        The newest version may be announced again under another URL. Raises `RefusedError` for a
        number already used, one more than 2^20 ahead, or an unknown parent.
        """
        known = self._versions.get(record.version)
        if known == record:
            return False
        moved = known is not None and known.version == self.latest and known.parent == record.parent
        if record.version <= self.used and not moved:
            raise RefusedError(
                f"version {record.version} of {self.job} is not newer than {self.used}; versions"
                f" only grow: go on from there, or publish {self.used + 1} anew, as a base"
            )
        if record.version > self.used + MAX_VERSION_LEAD:
            raise RefusedError(
                f"version {record.version} of {self.job} is far ahead of {self.used}; announce"
                f" one of at most {self.used + MAX_VERSION_LEAD}"
            )
        self._check_parent(record)
        return True

    def announce(self, record: VersionRecord) -> bool:
        """Add a version to the chain; return True if it is new.

        Raises RefusedError as `check` does.

        A base deletes all versions before it.
        """
        news = self.check(record)
        if news:
            for past in self.replaced_by(record):
                del self._versions[past.version]
            self._versions[record.version] = record
            self.latest = max(self.latest, record.version)
            self.first = record.version if record.is_base else self.first
        return news

    def replaced_by(self, record: VersionRecord) -> list[VersionRecord]:
        """Return the versions that a new one makes obsolete: all before a base, else none."""
        if not record.is_base:
            return []
        return [each for each in self.records if each.version < record.version]

    def cut(self) -> None:
        """Delete all versions but the newest."""
        self._versions = {record.version: record for record in self.records[-1:]}

    def drop(self) -> None:
        """Delete all versions, and keep the greatest used number so that none is used again."""
        self._floor, self.latest, self.first = self.used, 0, 0
        self._versions = {}

    def _check_parent(self, record: VersionRecord) -> None:
        known = not self._versions or record.parent == 0 or record.parent in self._versions
        if record.parent > record.version or not (known or record.is_base):
            raise RefusedError(
                f"version {record.version} has parent {record.parent}, which no node can hold;"
                " announce the parent first"
            )


class JobRegistry:
    """All jobs that were ever registered, with their version chains; ended ones are not live."""

    def __init__(
        self,
        jobs: Iterable[JobRecord],
        versions: Iterable[VersionRecord],
        standing: Iterable[str] = (),
    ) -> None:
        """Begin with stored jobs and versions. standing: jobs that live even without a trainer."""
        self._standing = frozenset(standing)
        self._jobs = {record.job: record for record in jobs}
        by_job: dict[str, list[VersionRecord]] = {}
        for record in versions:
            by_job.setdefault(record.job, []).append(record)
        self._chains = {
            name: VersionChain(name, by_job.get(name, ()), job.floor)
            for name, job in self._jobs.items()
        }
        for job in self._jobs.values():
            if job.ended:
                self._chains[job.job].cut()
        # Asked for each offer of each report.
        self._live = self._sorted()

    @property
    def live(self) -> tuple[JobRecord, ...]:
        """Registered jobs that have not ended, by name."""
        return self._live

    @property
    def only(self) -> JobRecord | None:
        """The live job if there is exactly one, else None; peers that name no job mean this one."""
        return self._live[0] if len(self._live) == 1 else None

    def _sorted(self) -> tuple[JobRecord, ...]:
        live = (record for record in self._jobs.values() if not record.ended)
        return tuple(sorted(live, key=lambda record: record.job))

    def get(self, job: str) -> JobRecord | None:
        """Return the record of a live job, None for an unknown or ended one."""
        record = self._jobs.get(job)
        return None if record is None or record.ended else record

    def chain(self, job: str) -> VersionChain:
        """Return the job's version chain, an empty one for an unknown job."""
        return self._chains.get(job) or VersionChain(job)

    def announced(self, job: str) -> VersionChain:
        """Return the version chain of a live job. Raises RefusedError for any other."""
        self._expect(job)
        return self._chains[job]

    def check_job(self, record: JobRecord) -> None:
        """Raise `ConfigError` or `RefusedError` for a job that cannot be registered."""
        if not record.job:
            raise ConfigError("a job needs a name; send RegisterJob.job")
        known = self._jobs.get(record.job)
        if known is not None and known.model != record.model and self.chain(record.job).latest:
            raise RefusedError(
                f"job {record.job} has versions of model {known.model or 'without a name'}; give a"
                f" run of {record.model or 'another model'} a job name of its own"
            )
        if known is None and len(self._jobs) >= MAX_KEPT:
            raise RefusedError(f"{MAX_KEPT} jobs were registered in this store; start a new one")
        if self.get(record.job) is None and len(self.live) >= MAX_REGISTERED:
            raise RefusedError(
                f"{MAX_REGISTERED} jobs are registered; end one: `rose jobs end JOB`"
            )

    def registering(self, record: JobRecord) -> JobRecord:
        """Return the record to store for a job to register, with its stored version floor.

        A standing job registered without a model keeps its model. Raises as `check_job` does.
        """
        known = self._jobs.get(record.job)
        if known is not None:
            keeps = not record.model and record.job in self._standing
            model = known.model if keeps else record.model
            record = replace(record, floor=known.floor, model=model)
        self.check_job(record)
        return record

    def register(self, record: JobRecord) -> None:
        """Add a live job, or replace its limits. Raises as `check_job` does."""
        record = self.registering(record)
        self._jobs[record.job] = record
        self._live = self._sorted()
        self._chains.setdefault(record.job, VersionChain(record.job))

    def ending(self, job: str) -> tuple[JobRecord, list[VersionRecord]]:
        """Return the record to store for a job that ends, and its versions to delete.

        Raises RefusedError for a job that is not live.
        """
        return self._without_trainer(self._expect(job)), self._chains[job].records[:-1]

    def end(self, job: str) -> None:
        """End a job and delete all but its newest version; a standing job lives on untrained.

        Raises RefusedError as `ending` does.
        """
        self._jobs[job], _ = self.ending(job)
        self._live = self._sorted()
        self._chains[job].cut()

    def dropping(self, job: str) -> tuple[JobRecord, list[VersionRecord]]:
        """Return the record to store for a dropped job, and all its versions to delete.

        The record keeps the name and the greatest used version number, since nodes may hold such
        weights. Raises RefusedError for an unknown job.
        """
        record = self._jobs.get(job)
        if record is None:
            raise RefusedError(f"job {job} is unknown; `rose jobs list` lists jobs")
        record = replace(self._without_trainer(record), floor=self.chain(job).used)
        return record, self._chains[job].records

    def drop(self, job: str) -> None:
        """End a job and delete its whole version chain. Raises RefusedError as `dropping` does."""
        self._jobs[job], _ = self.dropping(job)
        self._live = self._sorted()
        self._chains[job].drop()

    def _without_trainer(self, record: JobRecord) -> JobRecord:
        stands = record.job in self._standing
        return replace(record, ended=not stands, standing=stands)

    def commands(self) -> list[pb.NodeCommand]:
        """Return version commands for a node that attaches: the newest of each job, oldest first.

        All jobs together get about 1,024 commands.
        """
        live = self.live
        each = max(1, TOLD_VERSIONS // max(1, len(live)))
        return [
            version_command(record)
            for job in live
            for record in self._chains[job.job].records[-each:]
        ]

    def bound(self, job: str) -> StalenessBound:
        """Return how many versions a replica may be behind the job's newest; 0 for unknown jobs."""
        record = self.get(job)
        return StalenessBound(record.max_staleness if record else 0)

    def _expect(self, job: str) -> JobRecord:
        record = self.get(job)
        if record is None:
            raise RefusedError(f"job {job} is unknown; call RegisterJob first")
        return record


def with_standing(saved: Saved, standing: Iterable[JobRecord]) -> Saved:
    """Return the saved state with standing jobs added, and ended ones of their names revived.

    Nothing is written to the store.
    """
    jobs = {record.job: record for record in saved.jobs}
    for record in standing:
        known = jobs.get(record.job)
        if known is None or known.ended:
            kept = known or record
            jobs[record.job] = replace(kept, ended=False, standing=True, model=record.model)
    return replace(saved, jobs=tuple(jobs.values()))


def version_command(record: VersionRecord) -> pb.NodeCommand:
    """Return the node command that announces one weight version."""
    return pb.NodeCommand(
        version=pb.Version(
            job=record.job, version=record.version, parent=record.parent, url=record.url
        )
    )
