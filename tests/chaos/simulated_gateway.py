"""Simulated gateway: turns by the real journal, placed by the newest table of the leader.

A turn goes to a healthy replica that is leased to its job. An attempt that falls silent is given
up, and its stream left open: what it still sends must not count. `TurnJournal` and `LeaderFinder`
are the product's own; how a replica is picked is a copy, and nothing hangs on it here.
"""

import itertools
from dataclasses import dataclass, field

from elastic_scheduler.turn_journal import Continue, Deliver, End, GiveUp, TurnJournal
from rose.rpc import rose_pb2 as pb
from rose.rpc.leader_channel import LeaderFinder
from tests.chaos.invariants import Invariants
from tests.chaos.simulated_grpc import (
    WATCH_REPLICAS,
    Begin,
    Call,
    Status,
    addresses_of,
    name_of,
)
from tests.chaos.simulated_node import AttemptEnded, Chunk, Generate, token_of
from tests.chaos.simulation import SimulatedProcess, Simulation, Stream

TICK_S = 0.3
STALL_S = 1.0
SILENT_S = 3.0
LEAST_PAUSE_S = 0.02
REPORT_DEMAND = "/rose.v1.Scheduler/ReportDemand"
MOST_TURNS = 6
PROMPT_TOKENS = 4
MAX_ATTEMPTS = 1_000


@dataclass(slots=True)
class _PlacedTurn:
    number: int
    job: str
    max_tokens: int
    journal: TurnJournal
    begun_s: float
    attempt: int = 0
    heard_s: float = 0.0
    # Job and version of each journaled token, as its chunk said.
    stamps: list[tuple[str, int]] = field(default_factory=list)


class SimulatedGateway(SimulatedProcess):
    """Keeps a few turns of each job in flight."""

    def __init__(
        self,
        world: Simulation,
        schedulers: tuple[str, ...],
        engines: dict[str, str],
        jobs: tuple[str, ...],
        invariants: Invariants,
        bugs: frozenset[str],
    ) -> None:
        """`engines`: names of the engines by replica."""
        super().__init__(world, "gateway")
        self._addresses = addresses_of(schedulers)
        self._engines = engines
        self._jobs = jobs
        self._invariants = invariants
        self._bugs = bugs
        self._calls = itertools.count(1)
        self._numbers = itertools.count(1)  # Request ids are new, whoever is started anew.

    def started(self) -> None:
        self._table = pb.ReplicaTable()
        self._turns: dict[int, _PlacedTurn] = {}
        self._attempts: dict[int, tuple[_PlacedTurn, int]] = {}
        self._watch: Stream | None = None
        self._finder = LeaderFinder(self._addresses)
        self._heard_s = self.now_s()
        self.after(0.1, self._connect)
        self.every(TICK_S, self._tick)
        self.every(1.0, self._report)

    def jobs_waiting(self, least_s: float) -> set[str]:
        """Jobs with a turn that was begun that long ago, and has not ended."""
        return {turn.job for turn in self._turns.values() if self.now_s() >= turn.begun_s + least_s}

    def _connect(self) -> None:
        self._watch = self.open_stream(name_of(self._finder.address))
        self._heard_s = self.now_s()
        self._watch.send(self.name, Begin(WATCH_REPLICAS))
        self._watch.send(self.name, pb.WatchReplicasRequest())

    def stream_heard(self, stream: Stream, message: object) -> None:
        if isinstance(message, pb.ReplicaTable):
            if stream is self._watch:
                self._heard_s = self.now_s()
                self._table = message
                self._finder.answered()
            return
        turn, number = self._attempts.get(stream.number, (None, 0))
        if turn is None:
            return
        if "takes chunks of an old attempt" in self._bugs:
            number = turn.attempt
        match message:
            case Chunk():
                taken = turn.journal.append(
                    number, message.tokens, [0.0] * len(message.tokens), message.version
                )
                if taken:
                    turn.heard_s = self.now_s()
                    turn.stamps += [(message.job, message.version)] * len(message.tokens)
            case AttemptEnded():
                reason = "length" if message.why == "finished" else ""
                self._ended(turn, number, End(message.why), reason)
                stream.close(self.name)
                self._attempts.pop(stream.number, None)

    def stream_ended(self, stream: Stream) -> None:
        if stream is self._watch:
            self._watch = None
            said = stream.reason
            self._finder.missed(said.leader if isinstance(said, Status) else "")
            self.after(max(LEAST_PAUSE_S, self._finder.pause_s), self._connect)
            return
        turn, number = self._attempts.pop(stream.number, (None, 0))
        if turn is not None:
            self._ended(turn, number, End.BROKEN)

    def _tick(self) -> None:
        watch = self._watch
        if watch is not None and self.now_s() > self._heard_s + SILENT_S:
            watch.close(self.name)
            self.stream_ended(watch)
        if len(self._turns) < MOST_TURNS:
            self._begin()
        for turn in list(self._turns.values()):
            if not turn.attempt:
                self._place(turn)
            elif self.now_s() > turn.heard_s + STALL_S:
                self._ended(turn, turn.attempt, End.STALLED)

    def _begin(self) -> None:
        number = next(self._numbers)
        max_tokens = self.world.rng.randint(2, 20)
        journal = TurnJournal([0] * PROMPT_TOKENS, max_tokens, max_attempts=MAX_ATTEMPTS)
        job = self._jobs[number % len(self._jobs)]
        self._turns[number] = _PlacedTurn(number, job, max_tokens, journal, self.now_s())

    def _place(self, turn: _PlacedTurn) -> None:
        rows = [
            row.id
            for row in self._table.replicas
            if row.healthy and row.leased and row.job == turn.job and row.id in self._engines
        ]
        if not rows:
            return
        replica = self.world.rng.choice(rows)
        attempt = turn.journal.begin(replica, "guest")
        turn.attempt, turn.heard_s = attempt.number, self.now_s()
        stream = self.open_stream(self._engines[replica])
        self._attempts[stream.number] = (turn, attempt.number)
        position = len(attempt.token_ids) - PROMPT_TOKENS
        asked = Generate(turn.number, turn.job, attempt.number, position, attempt.max_tokens)
        stream.send(self.name, asked)

    def _ended(self, turn: _PlacedTurn, attempt: int, end: End, reason: str = "") -> None:
        match turn.journal.end(attempt, end, reason):
            case Continue():
                turn.attempt = 0
            case Deliver():
                self._turns.pop(turn.number, None)
                self._deliver(turn)
                if "delivers again" in self._bugs and turn.journal.attempts > 1:
                    self._deliver(turn)
            case GiveUp():
                self._turns.pop(turn.number, None)

    def _deliver(self, turn: _PlacedTurn) -> None:
        wanted = [token_of(turn.number, position) for position in range(turn.max_tokens)]
        spans = [
            (span.version, position)
            for span in turn.journal.versions
            for position in range(span.start, span.end)
        ]
        self._invariants.turn_delivered(
            f"turn {turn.number}", turn.job, list(turn.journal.tokens), wanted, turn.stamps, spans
        )

    def _report(self) -> None:
        """Its answer is waited for by nobody: the next report says it all again."""
        report = pb.DemandReport(gateway=self.name)
        for job in self._jobs:
            of = [turn for turn in self._turns.values() if turn.job == job]
            if of:
                owed = sum(turn.journal.remaining for turn in of)
                report.jobs.add(job=job, turns=len(of), owed_tokens=owed, made_tok_s=10.0)
        self.send(name_of(self._finder.address), Call(next(self._calls), REPORT_DEMAND, report))
