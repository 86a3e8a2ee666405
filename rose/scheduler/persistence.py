"""Persistent state of the scheduler, and the writer that makes it durable.

| key | value (JSON) |
| --- | --- |
| `epochs/{replica}` | {"epoch", "job", "node", "at_s"}: newest lease epoch: whose, where, since |
| `epoch_floor` | {"epoch"}: no lease has an epoch up to it; of a store that was restored |
| `harvest/{replica}` | mode |
| `stop` | {"mode"}: the operator's stop, which any scheduler obeys |
| `policies/{name}` | {"policy", "halted", "object"}: why its canary is halted, whose it is |
| `slo_budgets` | {deployment: [[at_s, good, bad], …]}: good and bad requests of 30 days |
| `jobs/{job}` | `JobRecord`: {"job", "max_staleness", "model", "weight", "max_guests", …} |
| `runs/{job}` | {"job", "run", "process", "holder", "since_s", "ended"}: who trains it |
| `versions/{job}/{version, 20 digits}` | {"job", "version", "parent", "url", "run"} |

The keys `leader` and `fence` are the election's (`rose.store`); `restoring` is there while a backup
is written back (`rose.scheduler.restore`): no scheduler starts from an unfinished restore.

`StoreWriter` makes one write at a time, tried until it is durable.

    write --> the store --> durable --> waiting callers go on
                 ^  |
                 +--+ it is locked, full or gone: again, after a pause

Another program that opens the file can lock it for any time. Meanwhile live leases are renewed and
tables are sent; changes that need the store wait, and `stalled_s` says so.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import CapacityPolicy, policy_of
from elastic_scheduler.capacity.budget_hold import BudgetSlices
from elastic_scheduler.errors import PolicyError
from elastic_scheduler.leases.lease_table import MAX_EPOCH, MAX_VERSION
from rose.errors import ConfigError, UnavailableError
from rose.scheduler.core.limits import MAX_WEIGHT
from rose.scheduler.core.runs import RunRecord
from rose.store import Delete, Put, Store, StoreEntry, Write

EPOCHS, OVERRIDES, JOBS, VERSIONS = "epochs/", "harvest/", "jobs/", "versions/"
POLICIES, STOP, RUNS = "policies/", "stop", "runs/"
EPOCH_FLOOR, RESTORING, SLO_BUDGETS = "epoch_floor", "restoring", "slo_budgets"
# Keys that only builds before 0.3.0 wrote: `harvest` may be a stop, so none of them is passed over.
REFUSED = frozenset({"harvest", "job"})
RETRY_S = 0.1
# A write that waits for longer is not a disk's pause: operators are told.
STALLED_S = 5.0


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Stored job. max_staleness: policy versions that its replicas may be behind the newest.

    model: its version 0, "" for the model that replicas were started with. weight: its priority
    among jobs. max_guests: most guests that it may have, 0 for no bound. ended: it gets no
    replicas. floor: greatest version number used before its versions were dropped. standing: an
    operator wants it to have its dedicated replicas, and no trainer has registered it.
    """

    job: str
    max_staleness: int
    model: str = ""
    weight: float = 1.0
    max_guests: int = 0
    ended: bool = False
    floor: int = 0
    standing: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.weight <= MAX_WEIGHT:
            raise ConfigError(
                f"the weight of {self.job} is {self.weight}; give one above 0, up to {MAX_WEIGHT:g}"
            )


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """Stored weight version of a job; its manifest is at {url}/manifests/{version}.

    parent: version that it is a delta to, or its own number for a base that replaces all before it.
    run: run of the trainer that announced it, "" if unknown.
    """

    job: str
    version: int
    parent: int
    url: str
    run: str = ""

    @property
    def is_base(self) -> bool:
        return self.parent == self.version


@dataclass(frozen=True, slots=True)
class Saved:
    """Everything in the store from which a scheduler starts. mode: None until an operator set one.

    epochs: newest lease epoch by replica; epoch_jobs: the job of that lease. nodes: nodes that had
    a lease, with the Unix time of the last grant. halted: reasons of halted canaries by policy.
    objects: names of policies that are Kubernetes objects. epoch_floor: every new epoch is greater.
    slo_budgets: requests of the last 30 days by deployment.
    """

    epochs: dict[str, int] = field(default_factory=dict)
    epoch_jobs: dict[str, str] = field(default_factory=dict)
    mode: HarvestMode | None = None
    overrides: dict[str, HarvestMode] = field(default_factory=dict)
    jobs: tuple[JobRecord, ...] = ()
    versions: tuple[VersionRecord, ...] = ()
    policies: tuple[CapacityPolicy, ...] = ()
    halted: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, float] = field(default_factory=dict)
    runs: tuple[RunRecord, ...] = ()
    objects: frozenset[str] = frozenset()
    epoch_floor: int = 0
    slo_budgets: Mapping[str, BudgetSlices] = field(default_factory=dict)


def load(entries: Iterable[StoreEntry]) -> Saved:
    """Return the saved state in a store's entries. Raises `ConfigError` if they are another's.

    An unfinished restore, or a release before 0.3.0, raises too.
    """
    entries = tuple(entries)
    if any(entry.key == RESTORING for entry in entries):
        raise ConfigError("a restore of this store did not end; run `rose store restore` again")
    if any(entry.key in REFUSED for entry in entries):
        raise ConfigError("a release before 0.3.0 wrote this store; give another --store")
    try:
        return _load(sorted(entries, key=lambda entry: entry.key))
    except (ValueError, TypeError, KeyError, PolicyError) as error:
        raise ConfigError(
            f"the store holds what no scheduler wrote ({error!r}); give another --store"
        ) from error


def _load(entries: Sequence[StoreEntry]) -> Saved:
    found = {entry.key: entry for entry in entries}
    epochs = {name: _epoch(entry) for name, entry in _below(EPOCHS, entries)}
    policies = {name: json.loads(entry.value) for name, entry in _below(POLICIES, entries)}
    return Saved(
        epochs={replica: epoch for replica, (epoch, _) in epochs.items()},
        epoch_jobs={replica: job for replica, (_, job) in epochs.items() if job},
        mode=stop_of(found[STOP].value) if STOP in found else None,
        overrides={
            name: HarvestMode(json.loads(entry.value)) for name, entry in _below(OVERRIDES, entries)
        },
        jobs=tuple(JobRecord(**json.loads(entry.value)) for _, entry in _below(JOBS, entries)),
        versions=tuple(_version(entry) for _, entry in _below(VERSIONS, entries)),
        policies=tuple(policy_of(said["policy"]) for said in policies.values()),
        halted={name: said["halted"] for name, said in policies.items() if said.get("halted")},
        objects=frozenset(name for name, said in policies.items() if said.get("object")),
        nodes=_nodes(entries),
        runs=tuple(RunRecord(**json.loads(entry.value)) for _, entry in _below(RUNS, entries)),
        epoch_floor=_floor(found.get(EPOCH_FLOOR)),
        slo_budgets=_slo_budgets(found.get(SLO_BUDGETS)),
    )


def _slo_budgets(entry: StoreEntry | None) -> dict[str, BudgetSlices]:
    said = json.loads(entry.value) if entry else {}
    found = {
        name: tuple((float(at_s), int(good), int(bad)) for at_s, good, bad in slices)
        for name, slices in said.items()
    }
    if any(min(good, bad) < 0 for slices in found.values() for _, good, bad in slices):
        raise ValueError(f"{SLO_BUDGETS} has fewer requests than none")
    return found


def _nodes(entries: Iterable[StoreEntry]) -> dict[str, float]:
    """Return the nodes of the newest leases, with the Unix times of the last grants."""
    said = [json.loads(entry.value) for _, entry in _below(EPOCHS, entries)]
    nodes: dict[str, float] = {}
    for each in said:
        if each.get("node"):
            node = str(each["node"])
            nodes[node] = max(nodes.get(node, 0.0), float(each.get("at_s", 0.0)))
    return nodes


def _below(prefix: str, entries: Iterable[StoreEntry]) -> list[tuple[str, StoreEntry]]:
    return [(e.key.removeprefix(prefix), e) for e in entries if e.key.startswith(prefix)]


def stop_of(value: bytes) -> HarvestMode:
    """Return the mode in the value of the key `stop`. Raises ValueError, TypeError or KeyError."""
    return HarvestMode(json.loads(value)["mode"])


def _epoch(entry: StoreEntry) -> tuple[int, str]:
    """Return the lease epoch in an entry, and the lease's job."""
    value = json.loads(entry.value)
    epoch = int(value["epoch"])
    if not 0 <= epoch <= MAX_EPOCH:
        raise ValueError(f"{entry.key} is {epoch}")
    return epoch, str(value["job"])


def _floor(entry: StoreEntry | None) -> int:
    epoch = int(json.loads(entry.value)["epoch"]) if entry else 0
    if not 0 <= epoch <= MAX_EPOCH:
        raise ValueError(f"{EPOCH_FLOOR} is {epoch}")
    return epoch


def _version(entry: StoreEntry) -> VersionRecord:
    record = VersionRecord(**json.loads(entry.value))
    if not 0 <= record.parent <= record.version <= MAX_VERSION:
        raise ValueError(f"{entry.key} has parent {record.parent}")
    return record


def save_epoch(
    replica: str, epoch: int, job: str, node: str = "", at_s: float | None = None
) -> Put:
    """Return the write of a replica's newest lease epoch, its job and node; at_s: Unix seconds."""
    value: dict[str, object] = {"epoch": epoch, "job": job}
    if node:
        value |= {"node": node, "at_s": round(at_s or 0.0)}
    return Put(EPOCHS + replica, _encode(value))


def save_epoch_floor(epoch: int) -> Put:
    """Return the write of the epoch floor: all later leases have greater epochs."""
    return Put(EPOCH_FLOOR, _encode({"epoch": epoch}))


def save_override(mode: HarvestMode, replica: str) -> Write:
    """Return the write of one replica's mode; ACTIVE deletes the entry."""
    if mode is HarvestMode.ACTIVE:
        return Delete(OVERRIDES + replica)
    return Put(OVERRIDES + replica, _encode(mode.value))


def save_stop(mode: HarvestMode) -> Put:
    """Return the write of the operator's stop, which every scheduler of the store follows."""
    return Put(STOP, _encode({"mode": mode.value}))


def save_slo_budgets(saved: Mapping[str, BudgetSlices]) -> Put:
    """Return the write of the last 30 days' requests by deployment."""
    return Put(SLO_BUDGETS, _encode(saved))


def save_policy(
    policy: CapacityPolicy, halted: str | None = None, *, of_object: bool = False
) -> Put:
    """Return the write of a capacity policy, and of the reason why its canary is halted.

    of_object: the policy is a Kubernetes object.
    """
    value: dict[str, object] = {"policy": json.loads(policy.to_json()), "halted": halted or ""}
    if of_object:
        value["object"] = True
    return Put(POLICIES + policy.name, _encode(value))


def save(record: JobRecord | RunRecord | VersionRecord) -> Put:
    """Return the write of a job, of the run that has a job, or of a version."""
    return Put(_key(record), _encode(asdict(record)))


def forget(record: JobRecord | RunRecord | VersionRecord) -> Delete:
    """Return the deletion of a record."""
    return Delete(_key(record))


def _key(record: JobRecord | RunRecord | VersionRecord) -> str:
    match record:
        case JobRecord():
            return JOBS + record.job
        case RunRecord():
            return RUNS + record.job
        case VersionRecord():
            # The key sorts as the number does.
            return f"{VERSIONS}{record.job}/{record.version:020d}"


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


OnEvent = Callable[..., None]


class StoreWriter:
    """Writer of one store, in order, which retries a write until it is durable.

    on_event: takes `store_stalled`, sent by `check`, and `store_answers`.
    """

    def __init__(self, store: Store, on_event: OnEvent, stalled_s: float = STALLED_S) -> None:
        self._store = store
        self._on_event = on_event
        self._stalled_after_s = stalled_s
        self._turn = asyncio.Lock()
        self._since_s: float | None = None
        self._wrong = "its disk does not answer"
        self._said = False

    @property
    def stalled_s(self) -> float:
        """Seconds for which the oldest write has waited; 0 while that is less than 5 s."""
        if self._since_s is None:
            return 0.0
        waited_s = time.monotonic() - self._since_s
        return waited_s if waited_s >= self._stalled_after_s else 0.0

    async def write(self, writes: Sequence[Write]) -> None:
        """Return once all writes are durable, however long that takes.

        Raises `LeadershipLostError` when another scheduler leads; then none of them is ever done.
        """
        if not writes:
            return
        async with self._turn:
            self._since_s = time.monotonic()
            try:
                await self._until_durable(writes)
            finally:
                self._since_s = None
            if self._said:
                self._said = False
                self._on_event("store_answers")

    async def _until_durable(self, writes: Sequence[Write]) -> None:
        while True:
            try:
                await self._store.txn((), writes)
            except UnavailableError as error:
                self._wrong = str(error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    def check(self) -> None:
        """Report `store_stalled` once when a write has waited for long; call this regularly."""
        if not self._said and self.stalled_s:
            self._said = True
            self._on_event("store_stalled", message=self._wrong)
