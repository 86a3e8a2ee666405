"""The one job of this scheduler and its chain of policy versions.

One job at a time may lease in this version, and a store belongs to the first job registered in it:
replicas say which version they run but not of which job, so weights of two jobs could not be told
apart.
"""

from elastic_scheduler import StalenessBound
from rose.errors import ConfigError, RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.persistence import JobRecord, VersionRecord

# Steps of training are skipped, a run goes on from another's: but no version can be announced after
# which none is left.
MAX_VERSION_LEAD = 2**20
# What a node that attaches is told. It finds older ones in its publisher's catalog.
TOLD_VERSIONS = 1_024


class VersionRegistry:
    """Registered job, announced versions, and what they mean for a replica's health."""

    def __init__(self, job: JobRecord | None, versions: tuple[VersionRecord, ...]) -> None:
        self.job = job
        self._versions = {record.version: record for record in versions}

    @property
    def latest(self) -> int:
        """Newest announced version, 0 (the model every engine started from) before the first."""
        return max(self._versions, default=0)

    def check_job(self, job: str) -> None:
        """Raise `RefusedError` for a second job."""
        if not job:
            raise ConfigError("a job needs a name; send RegisterJob.job")
        self._expect(job)

    def register(self, job: str, max_staleness: int) -> None:
        """Take the job, or a new staleness bound of it. Raises as `check_job` does."""
        self.check_job(job)
        self.job = JobRecord(job, max_staleness)

    def check(self, job: str, record: VersionRecord) -> bool:
        """Whether a version is news; False when exactly this one is known already.

        The newest may be announced again under another url: its publisher moved. Raises
        `RefusedError` when the version is not new, far ahead, or its parent is unknown.
        """
        if self.job is None:
            raise RefusedError(f"job {job} is unknown; call RegisterJob first")
        self._expect(job)
        known = self._versions.get(record.version)
        if known == record:
            return False
        moved = known is not None and known.version == self.latest and known.parent == record.parent
        if record.version <= self.latest and not moved:
            raise RefusedError(
                f"version {record.version} of {job} is not newer than {self.latest}; versions only"
                f" grow: go on from {self.latest}, or start a new store for a new run"
            )
        if record.version > self.latest + MAX_VERSION_LEAD:
            raise RefusedError(
                f"version {record.version} of {job} is far ahead of {self.latest}; announce one of"
                f" at most {self.latest + MAX_VERSION_LEAD}"
            )
        self._check_parent(record)
        return True

    def announce(self, job: str, record: VersionRecord) -> bool:
        """Take a version that `check` passes; whether it was news."""
        news = self.check(job, record)
        if news:
            self._versions[record.version] = record
        return news

    def commands(self) -> list[pb.NodeCommand]:
        """The chain's newer end, oldest first: what a node that attaches needs to catch up."""
        newer = sorted(self._versions)[-TOLD_VERSIONS:]
        return [self.command(self._versions[version]) for version in newer]

    def command(self, record: VersionRecord) -> pb.NodeCommand:
        """One version as nodes are told."""
        assert self.job is not None
        return pb.NodeCommand(
            version=pb.Version(
                job=self.job.job, version=record.version, parent=record.parent, url=record.url
            )
        )

    @property
    def bound(self) -> StalenessBound:
        """How far a replica may be behind `latest`."""
        return StalenessBound(self.job.max_staleness if self.job else 0)

    def _expect(self, job: str) -> None:
        if self.job is not None and self.job.job != job:
            raise RefusedError(
                f"this scheduler serves job {self.job.job}; give job {job} a scheduler and a"
                " --store of its own"
            )

    def _check_parent(self, record: VersionRecord) -> None:
        known = not self._versions or record.parent == 0 or record.parent in self._versions
        if record.parent >= record.version or not known:
            raise RefusedError(
                f"version {record.version} has parent {record.parent}, which no node can hold;"
                " announce the parent first"
            )
