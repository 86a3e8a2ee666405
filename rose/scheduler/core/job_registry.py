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
    """Announced versions of one job.

    latest: the newest, 0 (the model of the job) before the first. first: the version before which
    all weights are another run's, 0 where the chain has no base.

    A base that names itself as its parent begins the chain anew: a run that did not go on from the
    one before. Numbers go on growing, so replicas come to it as to any newer version.
    """

    def __init__(self, job: str, versions: Iterable[VersionRecord] = (), floor: int = 0) -> None:
        """`floor`: versions up to it are used up, though they were dropped."""
        self.job = job
        self._floor = floor
        self._versions = {record.version: record for record in versions}
        self.latest = max(self._versions, default=0)
        bases = (record.version for record in self._versions.values() if record.is_base)
        self.first = max(bases, default=0)

    @property
    def used(self) -> int:
        """The greatest number that a version of the job ever had."""
        return max(self.latest, self._floor)

    @property
    def newest(self) -> VersionRecord | None:
        """The newest announced version, None before the first."""
        return self._versions.get(self.latest)

    @property
    def records(self) -> list[VersionRecord]:
        """All of them, oldest first."""
        return [self._versions[version] for version in sorted(self._versions)]

    def check(self, record: VersionRecord) -> bool:
        """Return True if a version is new, False if exactly this one is known already.

        The newest may be announced again under another url: its publisher moved. Raises
        `RefusedError` when the version is not new, far ahead, or its parent is unknown.
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
        """Take a version that `check` passes; whether it was news."""
        news = self.check(record)
        if news:
            for past in self.replaced_by(record):
                del self._versions[past.version]
            self._versions[record.version] = record
            self.latest = max(self.latest, record.version)
            self.first = record.version if record.is_base else self.first
        return news

    def replaced_by(self, record: VersionRecord) -> list[VersionRecord]:
        """Return the versions that this one makes obsolete: all before a base."""
        if not record.is_base:
            return []
        return [each for each in self.records if each.version < record.version]

    def cut(self) -> None:
        """Forget all but the newest."""
        self._versions = {record.version: record for record in self.records[-1:]}

    def drop(self) -> None:
        """Forget all of them, but not which numbers were used."""
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
    """All jobs that were ever registered, with their chains; only those not ended count."""

    def __init__(
        self,
        jobs: Iterable[JobRecord],
        versions: Iterable[VersionRecord],
        standing: Iterable[str] = (),
    ) -> None:
        """`standing`: jobs that an operator wants to have their dedicated replicas at all times."""
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
        """Registered jobs that were not ended, by name."""
        return self._live

    @property
    def only(self) -> JobRecord | None:
        """The job of peers that name none: there is exactly one."""
        return self._live[0] if len(self._live) == 1 else None

    def _sorted(self) -> tuple[JobRecord, ...]:
        live = (record for record in self._jobs.values() if not record.ended)
        return tuple(sorted(live, key=lambda record: record.job))

    def get(self, job: str) -> JobRecord | None:
        """Return a registered job that was not ended."""
        record = self._jobs.get(job)
        return None if record is None or record.ended else record

    def chain(self, job: str) -> VersionChain:
        """Return the job's versions: none of one that was never registered."""
        return self._chains.get(job) or VersionChain(job)

    def announced(self, job: str) -> VersionChain:
        """Return the versions of a job that was not ended. Raises RefusedError for another."""
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
        """Return the record of a job to register, with its kept fields. Raises as `check_job`.

        A trainer that names no model means that of a standing job.
        """
        known = self._jobs.get(record.job)
        if known is not None:
            keeps = not record.model and record.job in self._standing
            model = known.model if keeps else record.model
            record = replace(record, floor=known.floor, model=model)
        self.check_job(record)
        return record

    def register(self, record: JobRecord) -> None:
        """Take a job, or new bounds of it. Raises as `check_job` does."""
        record = self.registering(record)
        self._jobs[record.job] = record
        self._live = self._sorted()
        self._chains.setdefault(record.job, VersionChain(record.job))

    def ending(self, job: str) -> tuple[JobRecord, list[VersionRecord]]:
        """Return an ended job's record and the versions to forget. Raises RefusedError."""
        return self._without_trainer(self._expect(job)), self._chains[job].records[:-1]

    def end(self, job: str) -> None:
        """End the job: it gets no more capacity. Raises as `ending` does."""
        self._jobs[job], _ = self.ending(job)
        self._live = self._sorted()
        self._chains[job].cut()

    def dropping(self, job: str) -> tuple[JobRecord, list[VersionRecord]]:
        """Return a dropped job's record and all its versions, to forget. Raises RefusedError.

        Its name and the numbers that were used stay: nodes may still hold weights under them.
        """
        record = self._jobs.get(job)
        if record is None:
            raise RefusedError(f"job {job} is unknown; `rose jobs list` lists jobs")
        record = replace(self._without_trainer(record), floor=self.chain(job).used)
        return record, self._chains[job].records

    def drop(self, job: str) -> None:
        """Forget its chain, and end it. Raises as `dropping` does."""
        self._jobs[job], _ = self.dropping(job)
        self._live = self._sorted()
        self._chains[job].drop()

    def _without_trainer(self, record: JobRecord) -> JobRecord:
        stands = record.job in self._standing
        return replace(record, ended=not stands, standing=stands)

    def commands(self) -> list[pb.NodeCommand]:
        """The newer end of each chain, oldest first: what a node that attaches has to catch up."""
        live = self.live
        each = max(1, TOLD_VERSIONS // max(1, len(live)))
        return [
            version_command(record)
            for job in live
            for record in self._chains[job.job].records[-each:]
        ]

    def bound(self, job: str) -> StalenessBound:
        """Return the bound on how far a replica may be behind the job's newest version."""
        record = self.get(job)
        return StalenessBound(record.max_staleness if record else 0)

    def _expect(self, job: str) -> JobRecord:
        record = self.get(job)
        if record is None:
            raise RefusedError(f"job {job} is unknown; call RegisterJob first")
        return record


def with_standing(saved: Saved, standing: Iterable[JobRecord]) -> Saved:
    """Return the saved state with the standing jobs that no trainer has registered.

    Jobs that were ended stand again: their operator wants them at each start. Nothing of this is
    written, so a leader whose store is full has them too.
    """
    jobs = {record.job: record for record in saved.jobs}
    for record in standing:
        known = jobs.get(record.job)
        if known is None or known.ended:
            kept = known or record
            jobs[record.job] = replace(kept, ended=False, standing=True, model=record.model)
    return replace(saved, jobs=tuple(jobs.values()))


def version_command(record: VersionRecord) -> pb.NodeCommand:
    """Return the command of one version."""
    return pb.NodeCommand(
        version=pb.Version(
            job=record.job, version=record.version, parent=record.parent, url=record.url
        )
    )
