"""What survives a restart of the scheduler, and under which keys.

| key | value (JSON) |
| --- | --- |
| `epochs/{replica}` | newest lease epoch |
| `harvest` , `harvest/{replica}` | mode |
| `job` | {"job", "max_staleness"} |
| `versions/{version, 20 digits}` | {"version", "parent", "url"} |
"""

import json
from dataclasses import dataclass, field

from elastic_scheduler import HarvestMode
from elastic_scheduler.offer import MAX_EPOCH, MAX_VERSION
from rose.errors import ConfigError
from rose.scheduler.messages import Write
from rose.store import Entry, Store

EPOCHS, HARVEST, JOB, VERSIONS = "epochs/", "harvest", "job", "versions/"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The job that this scheduler leases to; `max_staleness` in policy versions."""

    job: str
    max_staleness: int


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A published policy version: GET {url}/manifests/{version}."""

    version: int
    parent: int
    url: str


@dataclass(frozen=True, slots=True)
class Saved:
    """Everything that a scheduler starts from. `mode` is None until an operator set one."""

    epochs: dict[str, int] = field(default_factory=dict)
    mode: HarvestMode | None = None
    overrides: dict[str, HarvestMode] = field(default_factory=dict)
    job: JobRecord | None = None
    versions: tuple[VersionRecord, ...] = ()


def load(store: Store) -> Saved:
    """Read all of it. Raises `ConfigError` when the store holds something else."""
    try:
        return _load(store)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the store holds what no scheduler wrote ({error!r}); give another --store"
        ) from error


def _load(store: Store) -> Saved:
    mode, job = store.get(HARVEST), store.get(JOB)
    own = HARVEST + "/"
    return Saved(
        epochs={entry.key.removeprefix(EPOCHS): _epoch(entry) for entry in store.list(EPOCHS)},
        mode=HarvestMode(json.loads(mode.value)) if mode else None,
        overrides={
            entry.key.removeprefix(own): HarvestMode(json.loads(entry.value))
            for entry in store.list(own)
        },
        job=JobRecord(**json.loads(job.value)) if job else None,
        versions=tuple(_version(entry) for entry in store.list(VERSIONS)),
    )


def _epoch(entry: Entry) -> int:
    epoch = int(json.loads(entry.value))
    if not 0 <= epoch <= MAX_EPOCH:
        raise ValueError(f"{entry.key} is {epoch}")
    return epoch


def _version(entry: Entry) -> VersionRecord:
    record = VersionRecord(**json.loads(entry.value))
    if not 0 <= record.parent < record.version <= MAX_VERSION:
        raise ValueError(f"{entry.key} has parent {record.parent}")
    return record


def save_epoch(replica: str, epoch: int) -> Write:
    """The newest epoch of a replica."""
    return Write(EPOCHS + replica, _encode(epoch))


def save_mode(mode: HarvestMode, replica: str | None) -> Write:
    """The mode of all, or of one replica; ACTIVE for one replica means no entry."""
    if replica is None:
        return Write(HARVEST, _encode(mode.value))
    key = f"{HARVEST}/{replica}"
    return Write(key, None if mode is HarvestMode.ACTIVE else _encode(mode.value))


def save_job(job: JobRecord) -> Write:
    """The job and its staleness bound."""
    return Write(JOB, _encode({"job": job.job, "max_staleness": job.max_staleness}))


def save_version(record: VersionRecord) -> Write:
    """One version; its key sorts as its number does."""
    value = {"version": record.version, "parent": record.parent, "url": record.url}
    return Write(f"{VERSIONS}{record.version:020d}", _encode(value))


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
