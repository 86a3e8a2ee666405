"""Shell of the gateway under the virtual clock: production's, but for HTTP and tokens.

    turn ──► TurnRunner ──► Dispatcher (router, queue, stalls) ──► ModelledAttempt ──► engine
                 └── TurnAttempts, Hedging (second copies), TurnJournal

Dispatcher, runner, races, hedging, journals and demand reports are production's own coroutines and
cores. `ModelledAttempt` stands in for one streamed request. The real gateway receives each token;
this one counts new tokens twice a second, and at once when a turn begins, ends or is interrupted.
Its rule for silent replicas uses the time of the last token, as in production.
"""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from elastic_scheduler import Deliver, End, Outcome, ReplicaKind
from rose.contract.replica import Sampling
from rose.gateway.backends.http_pool import Upstream
from rose.gateway.demand import DemandMeter
from rose.gateway.replicas.dispatcher import Dispatcher, Ending, LiveAttempt
from rose.gateway.replicas.watch import entry_of
from rose.gateway.settings import GatewaySettings
from rose.gateway.stats import GatewayStats
from rose.gateway.turn_request import Origin, TurnRequest
from rose.gateway.turns.attempt import AttemptStream, TurnAttempts
from rose.gateway.turns.hedging import Hedging
from rose.gateway.turns.runner import TurnRunner
from rose.gateway.turns.token_stream import TokenStream
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.messages import Event
from rose.scheduler.wire import demanded
from rose.simulation.clock import NS, EventQueue
from rose.simulation.engine.batching import Sequence
from rose.simulation.fleet.node import ModelledReplica

SWEEP_S = 0.5
DEMAND_S = 1.0
_ENDS = {"revoked": End.REVOKED, "broken": End.BROKEN}


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """Turn that a trajectory asks for. output_tokens: what the model will make, unknown to the
    gateway.

    budget_tokens: the most that it may make, which is all that gateway and router know.
    """

    request_id: str
    origin: Origin
    prompt_tokens: int
    output_tokens: int
    budget_tokens: int
    min_version: int
    prefix: str = ""
    prefix_tokens: int = 0


class ModelledAttempt:
    """Attempt at a turn on a modelled engine, in the place of a streamed HTTP request."""

    def __init__(self, gateway: "ModelledGateway", turn: TurnAttempts, live: LiveAttempt) -> None:
        self._gateway = gateway
        self._turn = turn
        self._live = live
        self._dispatcher = gateway.dispatcher
        journal = turn.journal
        self._before = journal.generated
        self._number = journal.begin(live.entry.id, live.entry.kind.value).number
        self.replica = gateway.replicas.get(live.entry.id)
        self._version = live.entry.policy_version
        self._seen = 0
        self._over: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.outcome: Outcome | None = None
        self.engine_ended = False
        request_id = turn.request.request_id
        asked = gateway.asked[request_id.partition(".copy")[0]]
        self._sequence = Sequence(
            f"{request_id}.{self._number}",
            asked.prompt_tokens + self._before,
            max(1, asked.output_tokens - self._before),
            self,
            session=asked.origin.session,
            prefix=asked.prefix,
            prefix_tokens=asked.prefix_tokens,
        )

    async def run(self, upstream: Upstream) -> Ending:
        """Run the attempt on its replica; return how it ended and why, as `AttemptStream.run`."""
        del upstream
        end: End | None = None
        try:
            end, reason = await self._live.run(self._made)
        finally:
            self._stop()
            if self.outcome is None:
                self._dispatcher.finish(self._live, end)
        if self.outcome is None:
            self._end(end)
        return end, reason

    async def _made(self) -> Ending:
        return await self._over if self._begin() else (End.REFUSED, "it takes no turns")

    def look(self) -> None:
        """Journal the tokens that were made since the last look."""
        replica = self.replica
        if replica is None:
            return
        made = replica.engine.made(self._sequence)
        new = made - self._seen
        if new <= 0:
            return
        self._seen = made
        journal = self._turn.journal
        zeros = array("q", bytes(8 * new))
        journal.append(self._number, zeros, array("d", bytes(8 * new)), self._version)
        self._dispatcher.journaled(self._live, new)
        if not self._sequence.over:
            self._live.last_token_s = replica.engine.last_end_ns / NS
        if replica.kind is ReplicaKind.GUEST:
            self._gateway.borrowed_tokens += new

    # ---- owner of the sequence ----

    def first_token(self, now_ns: int) -> None:
        """Journal the first token."""
        self.look()

    def finished(self, now_ns: int) -> None:
        """Journal the last tokens, deliver the turn, free its place in the dispatcher, and end the
        attempt.
        """
        self.look()
        # The turn is complete: deliver it and free its place before anything else.
        self._live.task = None
        self._end(End.FINISHED)
        self._dispatcher.finish(self._live, End.FINISHED)
        self._settle((End.FINISHED, "stop"))

    def aborted(self, reason: str) -> None:
        """Journal the tokens made, and end the attempt as revoked or broken."""
        self.look()
        self._settle((_ENDS[reason], reason))

    def _end(self, end: End) -> None:
        self.outcome = self._turn.journal.end(self._number, end, "stop")
        if isinstance(self.outcome, Deliver):
            self._dispatcher.stats.turns += self._turn.deliver()

    def _settle(self, ending: Ending) -> None:
        if not self._over.done():
            self._over.set_result(ending)

    def _begin(self) -> bool:
        replica = self.replica
        if replica is None or not replica.admits:
            return False
        # Version that the attempt samples from now on; after an update its KV is computed anew.
        self._version = replica.version
        self._gateway.live[self] = None
        replica.engine.submit(self._sequence)
        return True

    def _stop(self) -> None:
        if self in self._gateway.live:
            del self._gateway.live[self]
            self.look()
            if self.replica is not None and not self._sequence.over:
                self.replica.engine.abort(self._sequence)

    def activated(self) -> None:
        """Journal the tokens made so far; later ones are of the replica's new version."""
        self.look()
        if self.replica is not None:
            self._version = self.replica.version


class ModelledRunner(TurnRunner):
    """Production's TurnRunner whose attempts are modelled."""

    gateway: "ModelledGateway"

    def _attempt(self, turn: TurnAttempts, live: LiveAttempt) -> AttemptStream:
        return cast("AttemptStream", ModelledAttempt(self.gateway, turn, live))


class ModelledGateway:
    """Model of the gateway process, made of production's dispatcher, runner and hedging."""

    def __init__(self, queue: EventQueue, say: Callable[[Event], None]) -> None:
        self.replicas: dict[str, ModelledReplica] = {}
        self.asked: dict[str, AskedTurn] = {}
        # A dict keeps the order in which attempts began; a set's order depends on addresses.
        self.live: dict[ModelledAttempt, None] = {}
        self.borrowed_tokens = 0
        # Seconds from leases of borrowed replicas to their first tokens.
        self.switch_s = 0.0
        self.stats = GatewayStats()
        self._queue = queue
        self.say = say
        settings = GatewaySettings(port=0, scheduler="modelled:1", max_waiting=1 << 20)
        self._settings = settings
        self.dispatcher = Dispatcher(settings, self.stats, self._now_s, self._note)
        self._hedging = Hedging(self.dispatcher)
        self._meter = DemandMeter(self.dispatcher, "gateway", queue.now_s)
        no_upstream = cast("Upstream", None)
        self._runner = ModelledRunner(self.dispatcher, no_upstream, self._hedging)
        self._runner.gateway = self

    def start(self) -> None:
        """Schedule the sweeps and the demand reports."""
        self._queue.every_s(SWEEP_S, self._sweep, 0.0011)
        self._queue.every_s(DEMAND_S, self._report, 0.0017)

    def set_table(self, table: pb.ReplicaTable) -> None:
        """Give the dispatcher the table of replicas and jobs that the scheduler published."""
        entries = tuple(entry_of(row) for row in table.replicas)
        self.dispatcher.set_table(entries, tuple(row.job for row in table.jobs))

    async def make(self, asked: AskedTurn) -> tuple[int, int]:
        """Run a turn to its end; return the oldest version of its tokens, and how many tokens
        guests made.

        Raises TurnError.
        """
        request = TurnRequest(
            asked.request_id,
            # A list, since each attempt copies it, and copying a range takes ten times as long.
            [0] * asked.prompt_tokens,
            Sampling(max_tokens=asked.budget_tokens),
            asked.origin,
            min_version=asked.min_version or None,
            batch=True,
            life="0",
            prefix_keys=(),
        )
        self.asked[asked.request_id] = asked
        feed = TokenStream(request.journal(self._settings.max_attempts))
        try:
            await self._runner.run(request, feed)
        finally:
            del self.asked[asked.request_id]
        guests = (each for each in feed.segments if each.kind == ReplicaKind.GUEST.value)
        borrowed = sum(each.end - each.start for each in guests)
        return min((span.version for span in feed.versions), default=0), borrowed

    def activated(self, replica: ModelledReplica) -> None:
        """Tell every attempt on a replica that the replica serves another version from now on."""
        for attempt in self.live:
            if attempt.replica is replica:
                attempt.activated()

    def _sweep(self) -> None:
        for attempt in tuple(self.live):
            attempt.look()
        self.dispatcher.sweep()
        self._hedging.sweep()

    def _report(self) -> None:
        report = self._meter.report(self._queue.now_s)
        self.say(demanded(report))
        self._meter.told(report)
        for each in report.switches:
            replica = self.replicas.get(each.replica)
            if replica is not None and replica.kind is ReplicaKind.GUEST:
                self.switch_s += each.took_s

    def _now_s(self) -> float:
        return self._queue.now_ns / NS

    def _note(self, event: str, **fields: object) -> None:
        """Do nothing: the simulation writes no event log."""
