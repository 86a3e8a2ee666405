"""Simulated machine: a node daemon and the engine of its guest, which outlives the daemon.

    scheduler ──stream──► SimulatedNode ── grant, on the page ──► SimulatedEngine ──► steps
                            │ lease, switch, caps, contact           ▲ turns of gateways
                            └──────── admit, drain, update ──────────┘

The product's own: `SchedulerSession`, `NodeDaemon._obey`, `Replica`, `LeaseAgent`,
`HarvestSwitch`, `SchedulerCaps`, `AnnouncedVersions`, `GrantController`; the
engine asks `decide` before each step. Stand-ins, for what starts processes or fetches files: of
the engine's HTTP, `Supervisor` and `Updates`. A copy: the guard's tick, after
`rose.node.guest.guard`. Host and page are always well: what they can do wrong is tested
elsewhere. Both processes are of one machine and read one clock.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from executor.control_page.page import HostView
from executor.control_page.seqlock_records import Grant, GuestState, HostState, SeatState
from executor.freeze_reason import FreezeReason
from executor.grant_controller import GrantController, GuardConfig, Observation, VoidLeases, Write
from executor.step_decision import GateLimits, Run, decide
from rose.contract.replica import ReplicaState
from rose.errors import RefusedError, UnavailableError
from rose.node.daemon import NodeDaemon
from rose.node.guest.supervisor import EngineState
from rose.node.lease import LeaseAgent, Revoked
from rose.node.order_spans import OrderSpans
from rose.node.orders import STALE_AFTER_S, HarvestSwitch, SchedulerCaps
from rose.node.replica import Replica, build_reports
from rose.node.scheduler_session import NodeIdentity, SchedulerSession
from rose.node.weight_updates import AnnouncedVersions
from rose.rpc import rose_pb2 as pb
from slo import StepModel, StepProfile
from tests.chaos.invariants import Invariants
from tests.chaos.simulated_grpc import LoopProcess, SimulatedLeaderChannel, addresses_of
from tests.chaos.simulation import SimulatedProcess, Simulation, Stream

GUARD_TICK_S = 0.1
STEP_S = 0.12
WATCH_S = 0.25
CALL_S = 0.03
FETCH_S = (0.3, 0.3, 0.3, 4.0)
# A guest that stands still for longer is ended.
HANG_S = 2.0
MODEL = "m"
TELEMETRY_EACH = 6
IGNORANT = {"staleAfter ignored", "a lease lives for ever"}
_NS = 1_000_000_000
_MODEL = StepModel(StepProfile(base_s=0.001, per_token_s=1e-6))
_LIMITS = GateLimits()
_GUARD = GuardConfig(token_budget=256, max_sequences=16)


@dataclass(frozen=True, slots=True)
class Generate:
    """A gateway's attempt at a turn: its tokens from `position` on."""

    turn: int
    job: str
    attempt: int
    position: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of an attempt, and the job and version that sampled them."""

    attempt: int
    tokens: tuple[int, ...]
    job: str
    version: int


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The engine ended an attempt: `why` as in `elastic_scheduler.turn_journal.End`."""

    attempt: int
    why: str


@dataclass(slots=True)
class Page:
    """Control page of the machine: it outlives both processes."""

    grant: Grant | None = None


def token_of(turn: int, position: int) -> int:
    """Return the token that any replica generates at a position of a turn."""
    return turn * 1_000 + position


@dataclass(slots=True)
class _Turn:
    stream: Stream
    asked: Generate
    made: int = 0


class SimulatedEngine(SimulatedProcess):
    """Engine of a guest: it steps as its page allows, for the turns that it was admitted to."""

    def __init__(
        self,
        world: Simulation,
        name: str,
        replica: str,
        page: Page,
        invariants: Invariants,
        bugs: frozenset[str],
    ) -> None:
        super().__init__(world, name)
        self._bugs = bugs
        self.replica = replica
        self._page = page
        self._invariants = invariants
        self.node: SimulatedNode | None = None
        self.epoch = 0

    def started(self) -> None:
        self.epoch = 0
        self.admits = False
        self._admitted_job = ""
        self.job, self.version, self.late = "", 0, ""
        self._turns: dict[int, _Turn] = {}
        self.every(STEP_S, self._step)

    def admit(self, epoch: int, job: str) -> None:
        """Take turns of the job under its lease. Raises RefusedError for an epoch of the past."""
        if epoch < self.epoch:
            raise RefusedError(f"epoch {epoch} is over, {self.epoch} holds")
        self.epoch, self.admits, self._admitted_job = epoch, True, job

    def drain(self) -> int:
        """Take no more turns, and end those that run."""
        self.admits = False
        return self._revoke(list(self._turns.values()))

    def take_weights(self, job: str, version: int) -> bool:
        """After `rose.replica.engine_update`: for the leased job only, and no turn outlives it."""
        if "takes weights of an old lease" not in self._bugs:
            if self.admits and self._admitted_job != job:
                return False
            self._revoke([turn for turn in self._turns.values() if turn.asked.job != job])
        self.job, self.version = job, version
        return True

    def _revoke(self, turns: list[_Turn]) -> int:
        for each in turns:
            each.stream.send(self.name, AttemptEnded(each.asked.attempt, "revoked"))
            del self._turns[each.stream.number]
        return len(turns)

    def stream_heard(self, stream: Stream, message: object) -> None:
        if isinstance(message, Generate):
            # After `rose.replica.endpoint`: its lease is here, and so are its weights.
            if not self.admits or {self.job, self._admitted_job} != {message.job}:
                stream.send(self.name, AttemptEnded(message.attempt, "refused"))
                return
            self._turns[stream.number] = _Turn(stream, message)

    def stream_ended(self, stream: Stream) -> None:
        self._turns.pop(stream.number, None)

    def _step(self) -> None:
        self._invariants.lives(self.replica)
        now_ns = int(self.now_s() * _NS)
        decided = decide(host_view(now_ns), self._page.grant, _MODEL, now_ns, _LIMITS)
        if not isinstance(decided, Run):
            return
        assert self.node is not None
        self.node.guest_steps()
        for each in list(self._turns.values()):
            self._generate(each)

    def _generate(self, turn: _Turn) -> None:
        asked = turn.asked
        token = token_of(asked.turn, asked.position + turn.made)
        turn.made += 1
        turn.stream.send(self.name, Chunk(asked.attempt, (token,), self.job, self.version))
        if turn.made == asked.max_tokens:
            turn.stream.send(self.name, AttemptEnded(asked.attempt, "finished"))
            del self._turns[turn.stream.number]


def host_view(now_ns: int) -> HostView:
    """A host that is well and idle."""
    seat = SeatState(taken_ns=now_ns - 60 * _NS, beat_ns=now_ns)
    return HostView(HostState(heartbeat_ns=now_ns), seat, seated=True, vetoed=False, replaced=False)


class EngineCalls:
    """In the place of `ReplicaClient`: calls of the engine, whose answers may never come."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    async def state(self) -> ReplicaState:
        """Its own account of itself."""
        engine = self._engine
        await self._reach(engine.life)
        return ReplicaState(
            policy_version=engine.version,
            proven=True,
            admitting=engine.admits,
            epoch=engine.epoch,
            running=0,
            waiting=0,
            tokens_total=0,
            job=engine.job,
        )

    async def admit(self, epoch: int, job: str = "", latest: int | None = None) -> None:
        """Open admission for a job's lease."""
        life = self._engine.life
        await self._reach(life)
        self._engine.admit(epoch, job)
        await self._reach(life)

    async def drain(self, epoch: int, reason: str) -> int:
        """Close admission; how many turns that ended."""
        life = self._engine.life
        await self._reach(life)
        aborted = self._engine.drain()
        await self._reach(life)
        return aborted

    async def _reach(self, life: int) -> None:
        """One way to it, or back."""
        await asyncio.sleep(CALL_S)
        engine = self._engine
        if not engine.up or engine.paused or engine.life != life:
            raise UnavailableError(f"{engine.name} does not answer")


class SimulatedUpdates:
    """In the place of `Updates`: comes to the newest version of the leased job, one at a time."""

    def __init__(
        self,
        engine: SimulatedEngine,
        chain: AnnouncedVersions,
        activated: Callable[[str, int], None],
    ) -> None:
        self._engine = engine
        self._chain = chain
        self._activated = activated
        self._wake = asyncio.Event()
        self._wanted = ""
        self._life = 0
        self.job, self.version, self.late = "", 0, ""

    def serve(self, job: str, version: int, *, other_model: bool) -> None:
        """Come to the job's weights."""
        assert not other_model
        self._wanted = job
        self._wake.set()

    def wake(self) -> None:
        """There may be a newer version."""
        self._wake.set()

    def engine_up(self, version: int, job: str) -> None:
        """An engine answers, with these weights."""
        self.job, self.version, self._life = job, version, self._engine.life
        self._wake.set()

    def engine_down(self) -> None:
        """End the engine."""
        self.job, self.version, self._life = "", 0, 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            engine, job, life = self._engine, self._wanted, self._life
            newest = self._chain.newest_of(job)
            version = newest.version if newest else 0
            if not job or not life or (self.job, self.version) == (job, version):
                continue
            # Over a slow link it outlasts a lease.
            await asyncio.sleep(engine.world.rng.choice(FETCH_S))
            self._wake.set()
            here = engine.up and not engine.paused and engine.life == life == self._life
            if here and engine.take_weights(job, version):
                self.job, self.version = job, version
                self._activated(job, version)


class SimulatedSupervisor:
    """In the place of `Supervisor`: starts the guest, ends it, and sees what becomes of it."""

    def __init__(self, node: "SimulatedNode", engine: SimulatedEngine) -> None:
        self._node = node
        self._engine = engine
        self._life = 0
        self._silent_s = 0.0
        self.state = EngineState.STARTING
        self.restarts = 0

    def restart(self, reason: str) -> None:
        """End it; the next one is started."""
        self._node.world.crash(self._engine.name)

    async def run(self, replica: Replica) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            await self._look(replica)

    async def _look(self, replica: Replica) -> None:
        engine, node = self._engine, self._node
        self._silent_s = self._silent_s + WATCH_S if engine.paused else 0.0
        if self._silent_s >= HANG_S:
            self.restart("it hangs")
        if self._life and (not engine.up or engine.life != self._life):
            await self._entered(replica, EngineState.BACKOFF)
        if node.barred and engine.up:
            node.world.crash(engine.name)
            await self._entered(replica, EngineState.STOPPED)
        elif node.may_start and not engine.up:
            node.world.start(engine.name)
        elif engine.up and not engine.paused and not self._life:
            self._life = engine.life
            await self._entered(replica, EngineState.HEALTHY)

    async def _entered(self, replica: Replica, state: EngineState) -> None:
        self.state = state
        if state is not EngineState.HEALTHY:
            self._life = 0
        try:
            await replica.entered(state)
        except UnavailableError as error:
            self.restart(str(error))


class SimulatedReplica(Replica):
    """The product's replica, between stand-ins of its engine."""

    def __init__(self, node: "SimulatedNode", engine: SimulatedEngine) -> None:
        folders = {MODEL: Path(MODEL)}
        self.config = SimpleNamespace(  # type: ignore[assignment]
            id=engine.replica,
            kind="guest",
            ranks=1,
            kept_kv=lambda model_dir: None,
            port=0,  # At which nothing listens, as far as the kernel knows.
            kv_tokens=100_000,
            decode_tok_s=1_000.0,
            prefill_tok_s=10_000.0,
            max_sequences=16,
            model_name=MODEL,
            folders=folders,
            start_timeout_s=60.0,
            offers=1,
            lora=None,
        )
        self.further = []
        self.url = "http://127.0.0.1:8000"
        self._proxy = None
        self._events = node.events  # type: ignore[assignment]
        self._session = node.session
        self._client = EngineCalls(engine)  # type: ignore[assignment]
        self.lease_agent = LeaseAgent(
            engine.replica,
            self._client,
            node.events,  # type: ignore[arg-type]
            self._lease_told,
            self._broken,
            node.lease_clock_s,
        )
        self.updates = SimulatedUpdates(engine, node._chain, node.activated)  # type: ignore[assignment]
        self.poller = SimpleNamespace(state=GuestState())  # type: ignore[assignment]
        self._trusted = True
        self.model = self._wanted_model = self._started_model = MODEL
        self.supervisor = SimulatedSupervisor(node, engine)  # type: ignore[assignment]


class IgnorantCaps(SchedulerCaps):
    """Caps with a planted bug: no lease ends before the scheduler's time."""

    forever = False

    def lease_ttl_s(self, ttl_s: float) -> float:
        return 1e6 if self.forever else ttl_s

    @property
    def cut_off(self) -> bool:
        return False


class NodeEvents:
    """In the place of the event log."""

    def __init__(self, node: "SimulatedNode") -> None:
        self._node = node

    def write(self, event: str, **fields: object) -> None:
        """One line of the log. No scheduler of the simulation says what a node must refuse."""
        if event in ("session_stalled", "lease_taken_back"):
            self._node.world.note(f"{self._node.name}: {event} {fields}")
        if event == "command_refused":
            self._node.world.failed(AssertionError(f"{self._node.name}: {event} {fields}"))


class SimulatedNode(LoopProcess):
    """Daemon of one machine with one guest."""

    def __init__(
        self,
        world: Simulation,
        name: str,
        schedulers: tuple[str, ...],
        engine: SimulatedEngine,
        page: Page,
        invariants: Invariants,
        bugs: frozenset[str],
    ) -> None:
        super().__init__(world, name)
        self._addresses = addresses_of(schedulers)
        self._engine = engine
        self._page = page
        self._invariants = invariants
        self._bugs = bugs
        # True time at which the newest message that renews the lease was read, and the lease's
        # duration.
        self._renewed_s, self._lease_s = 0.0, STALE_AFTER_S
        # The lease of the grant on the page, which lives on when the daemon does not.
        self._granted_under: int | None = None
        engine.node = self

    def begin(self) -> None:
        self.events = NodeEvents(self)
        self._reported = 0
        self._harvest = HarvestSwitch(self.now_s)
        self._caps = (IgnorantCaps if self._bugs & IGNORANT else SchedulerCaps)(self._clock_s)
        if isinstance(self._caps, IgnorantCaps):
            self._caps.forever = "a lease lives for ever" in self._bugs
        self._orders = SimpleNamespace(harvest=self._harvest, caps=self._caps)
        self._spans = OrderSpans()
        self._guard = GrantController(_GUARD, self._page.grant)
        self._chain = AnnouncedVersions()
        self._network = SimpleNamespace(follow=lambda known: None, enrol=lambda urls: None)
        self.session = SchedulerSession(
            self._addresses,
            NodeIdentity(self.name),
            self._reports,
            self._obey,
            self.events,  # type: ignore[arg-type]
            caps=self._caps,
            clock=self._clock_s,
        )
        self.session._leader = SimulatedLeaderChannel(self, self._addresses)
        if "asks one scheduler only" in self._bugs:
            self.session._leader.missed = lambda error=None: None  # type: ignore[method-assign]
        self._replica = replica = SimulatedReplica(self, self._engine)
        self._replicas = {replica.config.id: replica}
        self.keep(self.session.run)
        self.keep(replica.lease_agent.run)
        self.keep(replica.updates.run)
        self.keep(lambda: replica.supervisor.run(replica))  # type: ignore[call-arg]
        self._tick_guard()
        self.every(GUARD_TICK_S, lambda: self.loop.run(self._tick_guard))

    @property
    def attached(self) -> bool:
        """True while it hears a scheduler."""
        return self.up and self._caps.lost_s() == 0.0

    @property
    def leased_to(self) -> str:
        """The job whose lease it holds now, "" without one."""
        agent = self._replica.lease_agent
        return agent.job if self.up and agent.lease_epoch() is not None else ""

    @property
    def barred(self) -> bool:
        """True while its guest must not exist."""
        off = self._harvest.off(self._engine.replica)
        return off and "a stop leaves its guest" not in self._bugs

    @property
    def may_start(self) -> bool:
        """True if a guest may be started."""
        return self._harvest.known and not self._harvest.off(self._engine.replica)

    def guest_steps(self) -> None:
        """The engine took a step: whether it may is asked by true time."""
        self._invariants.stepped(
            self._engine.replica,
            self._granted_under,
            self.world.now_s - self._renewed_s,
            self._lease_s,
        )

    def activated(self, job: str, version: int) -> None:
        """The engine has proven a version."""
        self._invariants.activated(self._engine.replica, job, version)
        self._replica.activated(job, version)

    # ---- clocks ----

    def _clock_s(self) -> float:
        """Return the clock of its session."""
        deaf = {"a pause counts for nothing", "reads on after a stall"} & self._bugs
        return self.now_s() - (self.paused_s if deaf else 0.0)

    def lease_clock_s(self) -> float:
        """Return the clock of its lease agent."""
        deaf = "a pause counts for nothing" in self._bugs
        return self.now_s() - (self.paused_s if deaf else 0.0)

    # ---- scheduler ----

    def _reports(self) -> list[pb.NodeReport]:
        offers, telemetry = build_reports(self.name, list(self._replicas.values()))
        self._reported += 1
        # The host is idle and says so now and then.
        return [offers] if self._reported % TELEMETRY_EACH else [offers, telemetry]

    def _obey(self, command: pb.NodeCommand) -> None:
        """The daemon's own way with it; what renews the lease is noted."""
        kind, word = command.WhichOneof("command"), self.word
        if kind == "release" and "a release is not obeyed" in self._bugs:
            return
        before = self._replica.lease_agent.core.status()
        NodeDaemon._obey(self, command)  # type: ignore[arg-type]
        after = self._replica.lease_agent.core.status()
        if kind == "lease" and (after.epoch, after.until_s) != (before.epoch, before.until_s):
            assert word is not None
            self._renewed_s, self._lease_s = self.world.now_s, self._caps.stale_after_s
            waited_s = self.world.now_s - word.arrived_s
            self._invariants.renewed(self._engine.replica, waited_s)

    def _ignore(self, command: pb.NodeCommand) -> None:
        """An empty command says only that the leader lives."""
        assert not command.ByteSize()

    # ---- the guest's grant ----

    def _tick_guard(self) -> None:
        """After `GuardThread`: one grant."""
        agent = self._replica.lease_agent
        now_ns = int(self.now_s() * _NS)
        if "a pause counts for nothing" in self._bugs:
            self._guard._last_step_ns = None
        seen = Observation(
            host_view(now_ns),
            lease_epoch=agent.lease_epoch(),
            caps=self._caps.harvest,
            cut_off=self._caps.cut_off,
        )
        for action in self._guard.step(seen, now_ns):
            match action:
                case Write(grant):
                    self._page.grant, self._granted_under = grant, seen.lease_epoch
                case VoidLeases():
                    agent.happened(Revoked(FreezeReason.STALLED))
