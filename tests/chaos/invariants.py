"""Invariants: what must never happen, asked whenever something happens that could be it.

Whoever asks sees the whole world: the store as it is, what was promised to whom, and true time.
Bounds on time are those that the docs promise (a lease lives for `staleAfter`, 5 s at most, after
its node read the last word), and what the parts between may add. Where there is no fault anywhere
they are a second or two, well within `reclaimDeadline` (5 s).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from elastic_scheduler import HarvestMode
from rose.node.scheduler_session import STALL_S
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.messages import LogRecord
from rose.scheduler.persistence import EPOCHS, POLICIES, STOP, VERSIONS, Saved, load, stop_of
from rose.store import Delete, Put, StoreEntry
from rose.store.wrappers import FENCE, LEADER
from tests.chaos.simulated_store import SimulatedStore, Txn
from tests.chaos.simulation import InvariantError

# Clocks of the world differ by less than this share.
DRIFT = 1.03
# A guest's step goes by the grant on its page, which counts for 0.25 s and is written each 0.1 s.
PAGE_S = 0.25 + 0.1
# A word of a scheduler waits in a node's socket for no longer than the node may stand still
# unnoticed.
SOCKET_S = STALL_S * DRIFT
# Messages that a scheduler sent before it heard of a stop may be under way: a partition is seen
# after
# 3 s of silence, by looks each 0.3 s, and a message is late by up to 1.5 s. Then a lease lives for
# 5 s. It is the last, since no scheduler renews one after a stop (`commanded`).
STOP_BOUND_S = 3.3 + 1.5 + SOCKET_S + 5.0 * DRIFT + PAGE_S
# After a fault: its lease and its silence are over, and everybody has found the leader.
RECOVERED_S = 6.0
# With no fault anywhere: a release, or the order to end the guest, and its supervisor's look.
CALM_STOP_S = 1.0
# A stop that was left in the store, with no fault anywhere: a look of the watch that may fail
# once, for calls that are given up after 0.5 s, and a request of the scheduler's own before it.
CALM_WATCH_S = 2.0
# The operator writes a stop into the store, which nothing fences.
OPERATOR = "operator"
CLOSED = (HarvestMode.OFF, HarvestMode.HOLD_AND_DRAIN)


@dataclass(slots=True)
class Promised:
    """Results that were confirmed to clients."""

    jobs: set[str] = field(default_factory=set)
    versions: dict[str, int] = field(default_factory=dict)
    # Newest life of each job's trainer that was told it has the job.
    runs: dict[str, int] = field(default_factory=dict)
    policies: set[str] = field(default_factory=set)


class Invariants:
    """Each method raises InvariantError, with the line that says what was broken."""

    def __init__(
        self,
        now_s: Callable[[], float],
        note: Callable[[str], None],
        failed: Callable[[BaseException], None],
        calm_since_s: Callable[[], float],
    ) -> None:
        """`calm_since_s`: since when there is no fault, infinity while there is one.

        failed: takes what broke; who asked may not pass it on.
        """
        self._now_s = now_s
        self._note = note
        self._failed = failed
        self._calm_since_s = calm_since_s
        self.store: SimulatedStore | None = None
        self.promised = Promised()
        self.steps = self.delivered = self.grants = self.adopted = 0
        self._newest_epoch: dict[str, int] = {}
        self._granted_to: dict[tuple[str, int], str] = {}
        # Since when a stop is promised that nobody has taken back or asked to; else None. The same
        # of one that was left in the store, and of one that ends guests.
        self._stopped_s: float | None = None
        self._stored_s: float | None = None
        self._ended_s: float | None = None
        self._delivered: set[str] = set()

    # ---- the store ----

    def before_write(self, sender: str, txn: Txn) -> None:
        """Only the current term writes, and nothing that was promised is lost."""
        entries = self._entries
        others = [each.key for each in txn.writes if each.key not in (LEADER, FENCE)]
        leader = entries.get(LEADER)
        if others and sender != OPERATOR and (leader is None or leader.revision != txn.term):
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
        """Return the state from which a scheduler would start now."""
        return load(self._entries.values())

    def loaded(self, term: int, saved: Saved) -> None:
        """A new leader knows everything that was promised.

        One that stood still over the end of its term may hear what it asked for in it; it can
        write nothing, and `commanded` sees that it commands nothing.
        """
        leader = self._entries.get(LEADER)
        if leader is not None and leader.revision == term:
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
        lives = {each.job: int(each.process) for each in saved.runs}
        for job, life in promised.runs.items():
            # A later one may have written itself down, and not have heard of it yet.
            if lives.get(job, 0) < life:
                self._broken(
                    f"{who} gives {job} to life {lives.get(job)} of its trainer, not {life}"
                )
        policies = {each.name for each in saved.policies}
        if promised.policies - policies:
            self._broken(f"{who} lacks the policies {sorted(promised.policies - policies)}")

    # ---- schedulers ----

    def recorded(self, scheduler: str, record: LogRecord) -> None:
        """Epochs grow, and none is granted twice."""
        if record.event in ("replica_broken", "policy_broken", "peer_broken", "tick_broken"):
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
            stored = self.saved().epochs.get(replica, 0)
            if epoch != stored:
                self._broken(f"{replica}@{epoch} was adopted; {stored} may be anybody's by now")
            return
        self.grants += 1
        if epoch <= newest:
            self._broken(f"{replica}@{epoch} was granted to {job} after {replica}@{newest}")
        stored = self.saved()
        if stored.epochs.get(replica, 0) < epoch:
            self._broken(f"{replica}@{epoch} was granted before it was durable")
        self._newest_epoch[replica] = epoch
        self._granted_to[replica, epoch] = job

    def commanded(self, scheduler: str, term: int, node: str, command: pb.NodeCommand) -> None:
        """Only who leads commands, a version is told once it is durable, a stop ends renewals."""
        leader = self._entries.get(LEADER)
        if leader is None or leader.revision != term:
            self._broken(f"{scheduler} of term {term} commands {node}, and does not lead")
        match command.WhichOneof("command"):
            case "version":
                said = command.version
                if not self._announced(said.job, said.version):
                    self._broken(f"{node} is told {said.job}/{said.version}, which is not durable")
            case "lease":
                self._leased(scheduler, command.lease)
            case "renewals":
                for lease in command.renewals.leases:
                    self._leased(scheduler, lease)

    def _leased(self, scheduler: str, lease: pb.Lease) -> None:
        what = f"{scheduler} leases {lease.replica}@{lease.epoch}"
        if self._stopped_s is not None:
            self._broken(f"{what} {self._now_s() - self._stopped_s:.3f} s after a stop")
        if self._overdue(self._stored_s, CALM_WATCH_S):
            self._broken(f"{what}, and a stop has been in the store since {self._stored_s}")

    def _overdue(self, since_s: float | None, bound_s: float) -> bool:
        """Return True if that lasts longer, and this long after the last fault."""
        if since_s is None:
            return False
        return self._now_s() > max(since_s, self._calm_since_s() + RECOVERED_S) + bound_s

    # ---- nodes ----

    def renewed(self, replica: str, waited_s: float) -> None:
        """A word was obeyed that had waited in the node's socket for so long."""
        if waited_s > SOCKET_S:
            self._broken(f"{replica} was leased by a word that waited for {waited_s:.2f} s")

    def stepped(
        self, replica: str, epoch: int | None, silent_s: float, stale_after_s: float
    ) -> None:
        """A guest took a step. `silent_s`: since the word was read by which its lease lives."""
        self.steps += 1
        if epoch is None or (replica, epoch) not in self._granted_to:
            self._broken(f"a guest of {replica} stepped under {epoch}, which nobody granted")
        if silent_s > stale_after_s * DRIFT + PAGE_S:
            self._broken(f"{replica} stepped, {silent_s:.2f} s after its lease was renewed")
        since_s = self._stopped_s
        if since_s is None:
            return
        if self._now_s() > since_s + STOP_BOUND_S or self._overdue(since_s, CALM_STOP_S):
            self._broken(f"{replica} stepped {self._now_s() - since_s:.2f} s after a stop")

    def lives(self, replica: str) -> None:
        """A guest's engine is there."""
        if self._overdue(self._ended_s, CALM_STOP_S):
            self._broken(f"the guest of {replica} lives, and was to end at {self._ended_s:.3f}")

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
            self._ended_s = self._now_s() if mode is HarvestMode.OFF else None

    def stop_stored(self) -> None:
        """A stop is in the store, and whoever leads finds it there."""
        self._stored_s = self._now_s()

    def asked(self, mode: HarvestMode) -> None:
        """From now on a stop may end at any time, or leave guests be."""
        if mode not in CLOSED:
            self._stopped_s = self._stored_s = None
        if mode is not HarvestMode.OFF:
            self._ended_s = None

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

    def _broken(self, line: str) -> NoReturn:
        error = InvariantError(line)
        self._failed(error)
        raise error
