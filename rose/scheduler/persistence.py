"""Persistent state of the scheduler, and the writer that makes it durable.

| key | value (JSON) |
| --- | --- |
| `epochs/{replica}` | newest lease epoch |
| `harvest` , `harvest/{replica}` | mode |
| `stop` | {"mode"}: the operator's stop, which any scheduler obeys; written beside `harvest` |
| `policies/{name}` | {"policy", "halted"}: a capacity policy, and why its canary is halted |
| `job` | {"job", "max_staleness"} |
| `versions/{version, 20 digits}` | {"version", "parent", "url"} |

`StoreWriter` does not block the event loop: one write at a time, tried until it is durable.

    write --> in a thread --> durable --> waiting callers go on
                  ^  |
                  +--+ the store is locked, full or gone: again, after a pause

Another program that opens the file can lock it for any time. Meanwhile live leases are renewed and
tables are sent; changes that need the store wait, and `stalled_s` says so.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import CapacityPolicy, policy_of
from elastic_scheduler.errors import PolicyError
from elastic_scheduler.leases.harvest_mode import stricter
from elastic_scheduler.leases.lease_table import MAX_EPOCH, MAX_VERSION
from rose.errors import ConfigError, UnavailableError
from rose.scheduler.messages import StoreWrite
from rose.scheduler.store import Store, StoreEntry

EPOCHS, HARVEST, JOB, VERSIONS = "epochs/", "harvest", "job", "versions/"
POLICIES, STOP = "policies/", "stop"


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
    policies: tuple[CapacityPolicy, ...] = ()
    halted: dict[str, str] = field(default_factory=dict)


def load(store: Store) -> Saved:
    """Read all of it. Raises `ConfigError` when the store holds something else."""
    try:
        return _load(store)
    except (ValueError, TypeError, KeyError, PolicyError) as error:
        raise ConfigError(
            f"the store holds what no scheduler wrote ({error!r}); give another --store"
        ) from error


def _load(store: Store) -> Saved:
    job = store.get(JOB)
    own = HARVEST + "/"
    policies = {e.key.removeprefix(POLICIES): json.loads(e.value) for e in store.list(POLICIES)}
    return Saved(
        epochs={entry.key.removeprefix(EPOCHS): _epoch(entry) for entry in store.list(EPOCHS)},
        mode=_mode(store.get(HARVEST), store.get(STOP)),
        overrides={
            entry.key.removeprefix(own): HarvestMode(json.loads(entry.value))
            for entry in store.list(own)
        },
        job=JobRecord(**json.loads(job.value)) if job else None,
        versions=tuple(_version(entry) for entry in store.list(VERSIONS)),
        policies=tuple(policy_of(said["policy"]) for said in policies.values()),
        halted={name: said["halted"] for name, said in policies.items() if said.get("halted")},
    )


def _mode(harvest: StoreEntry | None, stop: StoreEntry | None) -> HarvestMode | None:
    """The stricter of the two: 0.2.0 knows `harvest` alone, and may have been here meanwhile."""
    said = [HarvestMode(json.loads(harvest.value))] if harvest else []
    said += [stop_of(stop.value)] if stop else []
    return reduce(stricter, said) if said else None


def stop_of(value: bytes) -> HarvestMode:
    """The mode under `stop`. Raises ValueError, TypeError or KeyError for something else."""
    return HarvestMode(json.loads(value)["mode"])


def _epoch(entry: StoreEntry) -> int:
    epoch = int(json.loads(entry.value))
    if not 0 <= epoch <= MAX_EPOCH:
        raise ValueError(f"{entry.key} is {epoch}")
    return epoch


def _version(entry: StoreEntry) -> VersionRecord:
    record = VersionRecord(**json.loads(entry.value))
    if not 0 <= record.parent < record.version <= MAX_VERSION:
        raise ValueError(f"{entry.key} has parent {record.parent}")
    return record


def save_epoch(replica: str, epoch: int) -> StoreWrite:
    """The newest epoch of a replica."""
    return StoreWrite(EPOCHS + replica, _encode(epoch))


def save_mode(mode: HarvestMode, replica: str | None) -> StoreWrite:
    """The mode of all, or of one replica; ACTIVE for one replica means no entry."""
    if replica is None:
        return StoreWrite(HARVEST, _encode(mode.value))
    key = f"{HARVEST}/{replica}"
    return StoreWrite(key, None if mode is HarvestMode.ACTIVE else _encode(mode.value))


def save_stop(mode: HarvestMode) -> StoreWrite:
    """The operator's stop, for every scheduler of the store."""
    return StoreWrite(STOP, _encode({"mode": mode.value}))


def save_policy(policy: CapacityPolicy, halted: str | None = None) -> StoreWrite:
    """A capacity policy, and why its canary is halted."""
    value = {"policy": json.loads(policy.to_json()), "halted": halted or ""}
    return StoreWrite(POLICIES + policy.name, _encode(value))


def drop_policy(name: str) -> StoreWrite:
    """A capacity policy is in force no more."""
    return StoreWrite(POLICIES + name, None)


def save_job(job: JobRecord) -> StoreWrite:
    """The job and its staleness bound."""
    return StoreWrite(JOB, _encode({"job": job.job, "max_staleness": job.max_staleness}))


def save_version(record: VersionRecord) -> StoreWrite:
    """One version; its key sorts as its number does."""
    value = {"version": record.version, "parent": record.parent, "url": record.url}
    return StoreWrite(f"{VERSIONS}{record.version:020d}", _encode(value))


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


RETRY_S = 0.1
# A write that waits for longer is not a disk's pause: operators are told.
STALLED_S = 5.0

OnEvent = Callable[..., None]


class StoreWriter:
    """Writes to one store, in order. `on_event` gets store_stalled and store_answers."""

    def __init__(self, store: Store, on_event: OnEvent, stalled_s: float = STALLED_S) -> None:
        self._store = store
        self._on_event = on_event
        self._stalled_after_s = stalled_s
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "rose-store")
        self._since_s: float | None = None
        self._wrong = "its disk does not answer"
        self._said = False

    @property
    def stalled_s(self) -> float:
        """How long the oldest write has waited; 0 while none waits for longer than usual."""
        if self._since_s is None:
            return 0.0
        waited_s = time.monotonic() - self._since_s
        return waited_s if waited_s >= self._stalled_after_s else 0.0

    async def write(self, writes: Sequence[StoreWrite]) -> None:
        """Return once all of them are durable, however long that takes."""
        async with self._turn:
            self._since_s = time.monotonic()
            try:
                for each in writes:
                    await self._until_durable(each)
            finally:
                self._since_s = None
            if self._said:
                self._said = False
                self._on_event("store_answers")

    async def read(self, key: str) -> StoreEntry | None:
        """The entry of a key, None without one or while the store does not answer."""
        async with self._turn:
            loop = asyncio.get_running_loop()
            try:
                return await loop.run_in_executor(self._thread, self._store.get, key)
            except UnavailableError:
                return None

    async def _until_durable(self, write: StoreWrite) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self._thread, _put, self._store, write)
            except UnavailableError as error:
                self._wrong = str(error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    def check(self) -> None:
        """Say so, once, when a write has waited for long: also where the disk just hangs."""
        if not self._said and self.stalled_s:
            self._said = True
            self._on_event("store_stalled", message=self._wrong)

    def close(self) -> None:
        """Wait for the write that is under way, so that the store may be closed."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _put(store: Store, write: StoreWrite) -> None:
    if write.value is None:
        store.delete(write.key)
    else:
        store.put(write.key, write.value)
