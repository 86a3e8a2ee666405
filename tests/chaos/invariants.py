"""Invariants: what must never happen, asked whenever something happens that could be it.

Whoever asks sees the whole world: the store as it is, what was promised to whom, and true time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elastic_scheduler import HarvestMode
from rose.rpc import rose_pb2 as pb
from rose.scheduler.messages import LogRecord
from rose.scheduler.persistence import EPOCHS, POLICIES, STOP, VERSIONS, Saved, load, stop_of
from rose.store import Delete, Put, StoreEntry
from rose.store.election import LEADER
from rose.store.fenced import FENCE
from tests.chaos.simulated_store import SimulatedStore, Txn
from tests.chaos.simulation import InvariantError

# After a stop is promised: a leader that was cut off leads for 2 s at most, its last renewal may be
# late, and lives for 5 s; clocks differ a little.
STOP_BOUND_S = 2.0 + 4.75 + 5.0 + 0.5
# Clocks of the world differ by less than this share.
DRIFT = 1.03
# A message is late by up to 1.5 s, a partition is seen after 3 s of silence, and the last grant on
# the page lives for 0.25 s.
GRACE_S = 3.0 + 1.5 + 0.25
CLOSED = (HarvestMode.OFF, HarvestMode.HOLD_AND_DRAIN)


@dataclass(slots=True)
class Promised:
    """What clients were told is done."""

    jobs: set[str] = field(default_factory=set)
    versions: dict[str, int] = field(default_factory=dict)
    policies: set[str] = field(default_factory=set)


class Invariants:
    """Each method raises InvariantError, with the line that says what was broken."""

    def __init__(self, now_s: Callable[[], float], note: Callable[[str], None]) -> None:
        self._now_s = now_s
        self._note = note
        self.store: SimulatedStore | None = None
        self.promised = Promised()
        self.steps = self.delivered = self.grants = self.adopted = 0
        self._newest_epoch: dict[str, int] = {}
        self._granted_to: dict[tuple[str, int], str] = {}
        # Since when a stop is promised that nobody has taken back or asked to; else None.
        self._stopped_s: float | None = None
        self._delivered: set[str] = set()

    # ---- the store ----

    def before_write(self, sender: str, txn: Txn) -> None:
        """Only the current term writes, and nothing that was promised is lost."""
        entries = self._entries
        others = [each.key for each in txn.writes if each.key not in (LEADER, FENCE)]
        leader = entries.get(LEADER)
        if others and (leader is None or leader.revision != txn.term):
            now = leader.revision if leader else "nobody's"
            self._broken(f"{sender} of term {txn.term} wrote {others} while the term is {now}")
        for write in txn.writes:
            self._kept(write)

    def _kept(self, write: Put | Delete) -> None:
        key, gone = write.key, isinstance(write, Delete)
        if isinstance(write, Put) and key.startswith(EPOCHS):
            before = load([self._entries[key]]).epochs if key in self._entries else {}
            after = load([StoreEntry(key, write.value, 1)]).epochs
            replica = key.removeprefix(EPOCHS)
            # The same again is a write whose answer was lost.
            if after[replica] < before.get(replica, 0):
                self._broken(f"{key} fell from {before[replica]} to {after[replica]}")
        if gone and (key.startswith(VERSIONS) or key == STOP):
            self._broken(f"{key} was deleted")
        if gone and key.removeprefix(POLICIES) in self.promised.policies:
            self._broken(f"{key} was deleted, and nobody asked for it")

    def saved(self) -> Saved:
        """What a scheduler would start from now."""
        return load(self._entries.values())

    def loaded(self, saved: Saved) -> None:
        """A new leader knows everything that was promised."""
        self._check_promises(saved, "a new leader")

    def end(self) -> None:
        """The store holds everything that was promised."""
        self._check_promises(self.saved(), "the store")

    def _check_promises(self, saved: Saved, who: str) -> None:
        promised = self.promised
        jobs = {each.job for each in saved.jobs}
        if promised.jobs - jobs:
            self._broken(f"{who} does not know the jobs {sorted(promised.jobs - jobs)}")
        for job, version in promised.versions.items():
            if version not in {each.version for each in saved.versions if each.job == job}:
                self._broken(f"{who} does not know version {version} of {job}")
        policies = {each.name for each in saved.policies}
        if promised.policies - policies:
            self._broken(f"{who} lacks the policies {sorted(promised.policies - policies)}")

    # ---- schedulers ----

    def recorded(self, scheduler: str, record: LogRecord) -> None:
        """Epochs grow, and none is granted twice."""
        if record.event in ("replica_broken", "policy_broken"):
            self._broken(f"{scheduler}: {record.event} {record.fields}")
        if record.event not in ("lease_granted", "lease_adopted"):
            return
        fields = record.fields
        replica, epoch, job = str(fields["replica"]), int(str(fields["epoch"])), str(fields["job"])
        self._note(f"{scheduler} {record.event} {replica}@{epoch} to {job}")
        newest = self._newest_epoch.get(replica, 0)
        if record.event == "lease_adopted":
            self.adopted += 1
            if self._granted_to.get((replica, epoch)) != job or epoch != newest:
                self._broken(f"{replica}@{epoch} was adopted for {job}; the newest is {newest}")
            return
        self.grants += 1
        if epoch <= newest:
            self._broken(f"{replica}@{epoch} was granted to {job} after {replica}@{newest}")
        stored = self.saved()
        if stored.epochs.get(replica, 0) < epoch:
            self._broken(f"{replica}@{epoch} was granted before it was durable")
        self._newest_epoch[replica] = epoch
        self._granted_to[replica, epoch] = job

    def commanded(self, node: str, command: pb.NodeCommand) -> None:
        """A version is told once it is durable."""
        if command.WhichOneof("command") == "version":
            said = command.version
            if not self._announced(said.job, said.version):
                self._broken(f"{node} is told {said.job}/{said.version}, which is not durable")

    # ---- nodes ----

    def stepped(
        self, replica: str, epoch: int | None, silent_s: float, stale_after_s: float
    ) -> None:
        """A guest took a step. `silent_s`: since the word was sent by which its lease lives."""
        self.steps += 1
        if epoch is None or (replica, epoch) not in self._granted_to:
            self._broken(f"a guest of {replica} stepped under {epoch}, which nobody granted")
        if silent_s > stale_after_s * DRIFT + GRACE_S:
            self._broken(f"{replica} stepped, {silent_s:.1f} s after its lease was renewed")
        since_s = self._stopped_s
        if since_s is not None and self._now_s() > since_s + STOP_BOUND_S:
            self._broken(f"{replica} stepped {self._now_s() - since_s:.1f} s after a stop")

    def activated(self, replica: str, job: str, version: int) -> None:
        """A version is active only if it was announced for that job."""
        if version and not self._announced(job, version):
            self._broken(f"{replica} activated {job}/{version}, which was never announced")

    # ---- clients ----

    def stop_promised(self, mode: HarvestMode) -> None:
        """A stop was answered: it is durable, and holds from now on."""
        entry = self._entries.get(STOP)
        if mode in CLOSED:
            if entry is None or stop_of(entry.value) not in CLOSED:
                self._broken(f"{mode.value} was promised, and is not durable")
            self._stopped_s = self._now_s()

    def resume_asked(self) -> None:
        """From now on a stop may end at any time."""
        self._stopped_s = None

    # ---- turns ----

    def turn_delivered(
        self,
        turn: str,
        job: str,
        tokens: list[int],
        wanted: list[int],
        stamps: Sequence[tuple[str, int]],
        spans: Sequence[tuple[int, int]],
    ) -> None:
        """Once, whole, and of its job.

        `stamps`: job and version of each token as it was sampled. `spans`: version and position of
        each, as delivered.
        """
        if turn in self._delivered:
            self._broken(f"{turn} was delivered twice")
        self._delivered.add(turn)
        self.delivered += 1
        if tokens != wanted:
            self._broken(f"{turn} was delivered as {tokens}, not {wanted}")
        sampled = [(version, position) for position, (_, version) in enumerate(stamps)]
        if list(spans) != sampled or any(name != job for name, _ in stamps):
            self._broken(f"{turn} of {job} has tokens of {stamps}, stamped as {spans}")

    @property
    def _entries(self) -> dict[str, StoreEntry]:
        assert self.store is not None
        return self.store.entries

    def _announced(self, job: str, version: int) -> bool:
        return f"{VERSIONS}{job}/{version:020d}" in self._entries

    def _broken(self, line: str) -> None:
        raise InvariantError(line)
