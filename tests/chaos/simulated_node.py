"""Simulated machine: a node daemon and the engine of its guest, which outlives the daemon.

    scheduler ──stream──► SimulatedNode ── grant, on the page ──► SimulatedEngine ──► steps
                            │ lease, switch, caps, contact           ▲ turns of gateways
                            └──────── admit, drain, update ──────────┘

The daemon's decisions are those of `LeaseStateMachine`, `HarvestSwitch`, `ToldCaps`, `Contact` and
`GrantController`; the engine asks `decide` before each step. Host and page are always well: what
they can do wrong is tested elsewhere. Both processes are of one machine and read one clock.
"""

from dataclasses import dataclass, field

from elastic_scheduler import Offer, ReplicaKind
from executor.control_page.host_seat import HostView
from executor.control_page.seqlock_records import Grant, HostState, SeatState
from executor.grant_controller import GrantController, GuardConfig, Seen, VoidLeases, Write
from executor.step_decision import GateLimits, Run, decide
from rose.errors import ConfigError, RefusedError
from rose.node.grants.caps import Contact, ToldCaps
from rose.node.guest.harvest_switch import HarvestSwitch
from rose.node.lease_agent import check_order
from rose.node.lease_fsm import (
    Admit,
    Drain,
    Ended,
    EngineAdmitted,
    EngineDown,
    EngineDrained,
    EngineUp,
    Event,
    Granted,
    LeaseStateMachine,
    LeaseTakenBack,
    LeaseTick,
    Released,
    Revoked,
)
from rose.rpc import rose_pb2 as pb
from rose.scheduler.messages import Activated, Held, Offered, ReplicaDrained, TakenBack
from slo import StepModel, StepProfile
from tests.chaos.invariants import Invariants
from tests.chaos.simulated_scheduler import Hello
from tests.chaos.simulation import SimulatedProcess, Simulation, Stream

GUARD_TICK_S = 0.1
STEP_S = 0.12
REPORT_S = 0.5
WATCH_S = 0.25
SILENT_S = 3.0
CONNECT_PAUSE_S = 0.2
CALL_S = 0.03
FETCH_S = 0.3
OFFER_TTL_S = 3.0
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
    """What any replica generates at a position of a turn."""
    return turn * 1_000 + position


@dataclass(slots=True)
class _Turn:
    stream: Stream
    asked: Generate
    made: int = 0


class SimulatedEngine(SimulatedProcess):
    """Engine of a guest: it steps as its page allows, for the turns that it was admitted to."""

    def __init__(
        self, world: Simulation, name: str, replica: str, page: Page, invariants: Invariants
    ) -> None:
        super().__init__(world, name)
        self.replica = replica
        self._page = page
        self._invariants = invariants
        self.node: SimulatedNode | None = None
        self.epoch = 0

    def started(self) -> None:
        self.epoch = 0
        self.admits = False
        self._admitted_job = ""
        self.job, self.version = "", 0
        self._turns: dict[int, _Turn] = {}
        self.every(STEP_S, self._step)

    def admit(self, epoch: int, job: str) -> None:
        """Take turns of the job under its lease; an epoch of the past changes nothing."""
        if epoch >= self.epoch:
            self.epoch, self.admits, self._admitted_job = epoch, True, job

    def drain(self) -> int:
        """Take no more turns, and end those that run."""
        turns, self._turns, self.admits = list(self._turns.values()), {}, False
        for each in turns:
            each.stream.send(self.name, AttemptEnded(each.asked.attempt, "revoked"))
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


@dataclass(slots=True)
class _Told:
    """Versions that the node was told of, by job."""

    versions: dict[str, int] = field(default_factory=dict)


class SimulatedNode(SimulatedProcess):
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
        self._schedulers = schedulers
        self._engine = engine
        self._replica = engine.replica
        self._page = page
        self._invariants = invariants
        self._bugs = bugs
        self._caps = ToldCaps()
        # When the newest word was sent by which the lease lives, by true time.
        self._asked_s = self._woke_s = 0.0
        # The lease of the grant on the page, which lives on when the daemon does not.
        self._granted_under: int | None = None
        self._fsm = LeaseStateMachine()
        engine.node = self

    def started(self) -> None:
        self._fsm = LeaseStateMachine()
        self._harvest = HarvestSwitch(self.now_s)
        self._contact = Contact(self.now_s)
        self._caps = ToldCaps(self._contact.lost_s)
        self._guard = GrantController(_GUARD, self._page.grant)
        self._told = _Told()
        self._job = ""
        self._calling = False
        self._updating = False
        self._seen_life = 0
        self._stream: Stream | None = None
        self._at = 0
        self._heard_s = self.now_s()
        self.after(0.1, self._connect)
        self._tick_guard()
        self.every(GUARD_TICK_S, self._tick_guard)
        self.every(REPORT_S, self._report)
        self.every(WATCH_S, self._watch_engine)

    def guest_steps(self) -> None:
        """The engine took a step: whether it may is asked by true time."""
        # A grant that lay in the socket of a daemon that stood still counts from when it goes on.
        silent_s = self.world.now_s - max(self._asked_s, self._woke_s)
        self._invariants.stepped(
            self._replica, self._granted_under, silent_s, self._caps.stale_after_s
        )

    # ---- scheduler ----

    def _connect(self) -> None:
        self._stream = self.open_stream(self._schedulers[self._at])
        self._heard_s = self.now_s()
        self._stream.send(self.name, Hello(self.name))
        self._report()

    def stream_ended(self, stream: Stream) -> None:
        if stream is self._stream:
            self._lost()

    def _lost(self) -> None:
        if self._stream is not None:
            self._stream.close(self.name)
        self._stream = None
        self._contact.lost()
        self._at = (self._at + 1) % len(self._schedulers)
        self.after(CONNECT_PAUSE_S, self._connect)

    def stream_heard(self, stream: Stream, message: object) -> None:
        if stream is not self._stream or not isinstance(message, pb.NodeCommand):
            return
        self._heard_s = self.now_s()
        self._contact.heard()
        try:
            check_order(message)
        except (RefusedError, ConfigError) as error:
            self.world.note(f"{self.name} refused: {error}")
            return
        self._obey(message, stream.sent_s)

    def _obey(self, command: pb.NodeCommand, sent_s: float) -> None:
        match command.WhichOneof("command"):
            case "lease":
                self._lease(command.lease, sent_s)
            case "release":
                self._happened(Released(command.release.epoch, command.release.reason))
            case "version":
                said = command.version
                known = self._told.versions
                known[said.job] = max(known.get(said.job, 0), said.version)
                self._update()
            case "harvest":
                self._harvest.take(command.harvest)
            case "caps":
                self._caps.take(command.caps)

    def _lease(self, lease: pb.Lease, sent_s: float) -> None:
        if lease.epoch < self._fsm.status().epoch and "takes any epoch" not in self._bugs:
            return
        ttl_s = self._caps.lease_ttl_s(lease.ttl_s)
        if "staleAfter ignored" in self._bugs:
            ttl_s = lease.ttl_s
        if "a lease lives for ever" in self._bugs:
            ttl_s = 1e6
        if "takes any epoch" in self._bugs:
            self._fsm._held.epoch = min(self._fsm._held.epoch, lease.epoch)
        self._job = lease.job
        before = self._fsm.status()
        self._happened(Granted(lease.epoch, ttl_s))
        after = self._fsm.status()
        if (after.epoch, after.until_s) != (before.epoch, before.until_s):
            self._asked_s = sent_s
            self._woke_s = self.resumed_s if lease.epoch > before.epoch else 0.0
        self._update()

    def _report(self) -> None:
        stream = self._stream
        if stream is None:
            return
        if self.now_s() > self._heard_s + SILENT_S:
            self._lost()
            return
        engine, status, now_s = self._engine, self._fsm.status(), self.now_s()
        known = engine.up and self._seen_life == engine.life
        offer = Offer(
            self._replica,
            ReplicaKind.GUEST,
            f"http://127.0.0.1/{self._replica}",
            self.name,
            100_000,
            1_000.0,
            10_000.0,
            engine.version if known else 0,
            known,
            OFFER_TTL_S,
            status.epoch,
            16,
            job=engine.job if known else "",
        )
        held = ()
        if status.active(now_s):
            held = (Held(self._replica, self._job, status.epoch, status.until_s - now_s),)
        stream.send(self.name, Offered(stream.number, (offer,), (), held))

    # ---- lease ----

    def _lease_epoch(self) -> int | None:
        status = self._fsm.status()
        return status.epoch if status.active(self._lease_clock_s()) else None

    def _lease_clock_s(self) -> float:
        if "a pause counts for nothing" in self._bugs:
            return self.now_s() - self.paused_s
        return self.now_s()

    def _happened(self, event: Event) -> None:
        for action in self._fsm.step(event, self._lease_clock_s()):
            match action:
                case LeaseTakenBack(epoch, reason):
                    self._say(lambda n, e=epoch, r=reason: TakenBack(n, self._replica, e, r))  # type: ignore[misc]
                case Ended(epoch, _, aborted, asked):
                    if asked:
                        self._say(
                            lambda n, e=epoch, a=aborted: ReplicaDrained(n, self._replica, e, a)  # type: ignore[misc]
                        )
                case Admit() | Drain():
                    self._call(action)

    def _say(self, report: object) -> None:
        if self._stream is not None:
            self._stream.send(self.name, report(self._stream.number))  # type: ignore[operator]

    def _call(self, call: Admit | Drain) -> None:
        """One call of the engine at a time; its answer may come late, or never."""
        if self._calling:
            return
        self._calling = True
        engine, life = self._engine, self._engine.life

        def reached() -> None:
            answers = engine.up and not engine.paused and engine.life == life
            aborted = 0
            if answers and isinstance(call, Admit):
                engine.admit(call.epoch, self._job)
            elif answers:
                aborted = engine.drain()
            self.after(CALL_S, lambda: answered(answers, aborted))

        def answered(answers: bool, aborted: int) -> None:
            self._calling = False
            if not answers:
                return
            if isinstance(call, Admit):
                self._happened(EngineAdmitted(call.epoch, call.life))
            else:
                self._happened(EngineDrained(call.life, aborted))

        self.after(CALL_S, reached)

    # ---- engine ----

    def _watch_engine(self) -> None:
        """After the supervisor: it starts the guest, ends it, and sees what becomes of it."""
        engine = self._engine
        if self._seen_life and (not engine.up or engine.life != self._seen_life):
            self._seen_life = 0
            self._happened(EngineDown())
        barred = self._harvest.off(self._replica)
        if barred and engine.up and "a stop leaves its guest" not in self._bugs:
            self.world.crash(engine.name)
            self._happened(EngineDown())
            self._seen_life = 0
        elif not barred and self._harvest.known and not engine.up:
            self.world.start(engine.name)
        elif engine.up and not engine.paused and not self._seen_life:
            self._seen_life = engine.life
            self._happened(EngineUp(engine.epoch, engine.admits))

    def _update(self) -> None:
        """Come to the newest version of the leased job, one at a time."""
        engine, job = self._engine, self._job
        version = self._told.versions.get(job, 0)
        if self._updating or not job or (engine.job, engine.version) == (job, version):
            return
        if not engine.up or self._seen_life != engine.life:
            return
        self._updating = True
        life = engine.life

        def fetched() -> None:
            self._updating = False
            if not engine.up or engine.life != life or engine.paused:
                return
            engine.job, engine.version = job, version
            self._invariants.activated(self._replica, job, version)
            self._say(lambda n: Activated(n, self._replica, version, True, "", job))
            self._update()

        self.after(FETCH_S, fetched)

    def _tick_guard(self) -> None:
        self._happened(LeaseTick())
        self._update()
        now_ns = int(self.now_s() * _NS)
        if "a pause counts for nothing" in self._bugs:
            self._guard._last_step_ns = None
        ignored = {"staleAfter ignored", "a lease lives for ever"} & self._bugs
        seen = Seen(
            host_view(now_ns),
            lease_epoch=self._lease_epoch(),
            caps=self._caps.harvest,
            cut_off=self._caps.cut_off and not ignored,
        )
        for action in self._guard.step(seen, now_ns):
            match action:
                case Write(grant):
                    self._page.grant, self._granted_under = grant, seen.lease_epoch
                case VoidLeases():
                    self._happened(Revoked("the node stood still"))
