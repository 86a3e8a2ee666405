"""A scheduler core with a hand-turned clock, and shorthands for what it is told and says."""

from elastic_scheduler import HarvestMode, Offer, Policy, ReplicaKind, make_policy
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.job_registry import with_standing
from rose.scheduler.core.leasing import LeaseTimes
from rose.scheduler.core.messages import (
    Action,
    Answer,
    Attached,
    Command,
    Event,
    JobRegistered,
    LogRecord,
    Offered,
    PublishTable,
    Reserve,
    Save,
    StoredEvent,
    Tick,
    VersionAnnounced,
)
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.persistence import JobRecord, load
from rose.store import Write
from tests.fakes.memory_store import InMemoryStore

JOB = "grpo"


def offer(replica: str = "g0", **changes: object) -> Offer:
    fields: dict[str, object] = {
        "replica": replica,
        "kind": ReplicaKind.GUEST,
        "url": "http://127.0.0.1:9000",
        "node": "n0",
        "kv_tokens": 4096,
        "decode_tok_s": 100.0,
        "prefill_tok_s": 1000.0,
        "policy_version": 0,
        "healthy": True,
        "ttl_s": 3.0,
        "epoch": 0,
        "max_sequences": 8,
    }
    return Offer(**{**fields, **changes})  # type: ignore[arg-type]


class CoreBench:
    """Steps a core, keeps its actions, and persists as the shell would: at once, or when let."""

    def __init__(
        self,
        mode: HarvestMode = HarvestMode.ACTIVE,
        store: InMemoryStore | None = None,
        standing: tuple[JobRecord, ...] = (),
    ) -> None:
        self.store = store or InMemoryStore()
        saved = load(self.store.entries)
        saved = with_standing(saved, standing)
        names = [job.job for job in standing]
        times = LeaseTimes(5.0, 1.0, 1.0)
        self.core = SchedulerCore(saved, mode, times, standing=names)
        self.now_s = 100.0
        self.actions: list[Action] = []
        self.table = pb.ReplicaTable()
        self.locked = False
        self.waiting: list[Reserve] = []

    def step(self, event: Event) -> list[Action]:
        if isinstance(event, StoredEvent):
            for write in self.core.writes(event):
                self.write(write)
        self.actions = self._take(self.core.step(event, self.now_s))
        return self.actions

    def unlock(self) -> list[Action]:
        """The store answers again: what waited is durable."""
        self.locked = False
        waiting, self.waiting = self.waiting, []
        self.actions = self._take([*waiting])
        return self.actions

    def _take(self, actions: list[Action]) -> list[Action]:
        taken = list(actions)
        for action in taken:  # it grows
            if isinstance(action, PublishTable):
                assert action.table.revision > self.table.revision
                self.table = action.table
            if isinstance(action, Save):
                self.write(action.write)
            if isinstance(action, Reserve) and self.locked:
                self.waiting.append(action)
            elif isinstance(action, Reserve):
                self.write(action.write)
                taken += self.core.step(action.then, self.now_s)
        return taken

    def write(self, write: Write) -> None:
        self.store.write(write.key, write.value)

    def at(self, now_s: float) -> "CoreBench":
        self.now_s = now_s
        self.step(Tick())
        return self

    def with_job(self, max_staleness: int = 1) -> "CoreBench":
        self.step(JobRegistered(JOB, max_staleness))
        return self

    def attach(self, stream: int = 1, node: str = "n0") -> list[pb.NodeCommand]:
        self.step(Attached(node, stream))
        return self.commands(stream)

    def offered(self, *offers: Offer, stream: int = 1) -> list[pb.NodeCommand]:
        self.step(Offered(stream, offers or (offer(),)))
        return self.commands(stream)

    def announce(self, version: int, parent: int | None = None, url: str = "http://t") -> None:
        self.step(VersionAnnounced(JOB, version, version - 1 if parent is None else parent, url))

    def commands(self, stream: int = 1) -> list[pb.NodeCommand]:
        return [a.command for a in self.actions if isinstance(a, Command) and a.stream == stream]

    def kinds(self, stream: int = 1) -> list[str | None]:
        return [command.WhichOneof("command") for command in self.commands(stream)]

    def lease(self, stream: int = 1) -> pb.Lease:
        [found] = [c.lease for c in self.commands(stream) if c.HasField("lease")]
        return found

    def records(self) -> list[str]:
        return [action.event for action in self.actions if isinstance(action, LogRecord)]

    def answer(self) -> int:
        [found] = [action.value for action in self.actions if isinstance(action, Answer)]
        return found

    def row(self, replica: str = "g0") -> pb.Replica:
        [found] = [row for row in self.table.replicas if row.id == replica]
        return found


def bench_with(policy: str | Policy | None = None) -> CoreBench:
    """Return a bench with a job and a node, whose scheduler leases by a policy or by its name."""
    bench = CoreBench()
    times = LeaseTimes(5.0, 1.0, 1.0)
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    bench.core = SchedulerCore(load(()), HarvestMode.ACTIVE, times, chosen)
    bench.with_job()
    bench.attach()
    return bench
