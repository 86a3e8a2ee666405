"""Dispatcher: assigns turns to replicas, and queues turns that have to wait.

acquire --> waiting --pump--> live --finish--> (gone)
               |               |  lease lost, replica gone: interrupted as REVOKED, at once
               |               |  no token for stall_s, elsewhere cheaper: interrupted, STALLED
               +- no acceptable version, or no place in time: TurnError
"""

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import count

from elastic_scheduler import End, Quote, Router, TurnNeed, TurnPlacement
from rose.gateway.errors import (
    BadRequest,
    NoReplica,
    QueueFull,
    TurnError,
    VersionUnavailable,
    fresh,
)
from rose.gateway.replicas.jobs import DefaultVersions, JobRouters
from rose.gateway.replicas.table import ReplicaApi, ReplicaEntry
from rose.gateway.settings import GatewaySettings
from rose.gateway.stats import GatewayStats, LeaseLatencyClock
from rose.process.background_tasks import described

# Time without new turns for a replica after an attempt ended badly: until the table follows.
REST_S = {End.REFUSED: 0.25, End.BROKEN: 0.5, End.STALLED: 0.3, End.REVOKED: 0.25}

EventSink = Callable[..., None]
# End of an attempt, and the reason in words.
Ending = tuple[End, str]


@dataclass(slots=True, eq=False)
class LiveAttempt:
    """Place of one turn on a replica, from its grant to `Dispatcher.finish`.

    job: the registered job that the replica is leased to, "" where jobs are labels. may_move: True
    if a stalled turn may be moved to another replica.
    """

    entry: ReplicaEntry
    router: Router
    job: str
    placement: TurnPlacement
    need: TurnNeed
    last_token_s: float
    task: "asyncio.Task[object] | None" = None
    interrupted: End | None = None
    may_move: bool = True

    async def run(self, work: Callable[[], Awaitable[Ending]]) -> Ending:
        """Run `work` in this task and return its end and reason; if `interrupt` comes first, cancel
        it and return that end.
        """
        self.task = asyncio.current_task()
        try:
            if self.interrupted is not None:
                return self.interrupted, "lease lost"
            return await work()
        except asyncio.CancelledError:
            # The cancellation came from `interrupt`, or the caller is gone as well: only one of
            # `interrupt` alone continues.
            if self.interrupted is None or self.task is None or self.task.uncancel() > 0:
                raise
            return self.interrupted, self.interrupted.value
        finally:
            self.task = None

    def interrupt(self, end: End) -> None:
        """Cancel the running attempt with this end (lease lost, stalled); its turn continues on
        another replica. Only the first call counts.
        """
        if self.interrupted is None:
            self.interrupted = end
            if self.task is not None:
                self.task.cancel()


@dataclass(slots=True, eq=False)
class _WaitingTurn:
    need: TurnNeed
    avoid: str
    since_s: float
    batch: bool
    granted: "asyncio.Future[LiveAttempt | TurnError]"
    turn: tuple[int, int, int]


def _in_turn(waiter: _WaitingTurn) -> tuple[int, int, int]:
    return waiter.turn


# Router, versions, and True for a turn whose prefix a replica holds, or that may displace others'.
_Constraint = tuple[Router, int | None, int | None, bool]


class Dispatcher:
    """Dispatcher of turns: it holds the replica table, the routers and the queue of waiting turns;
    `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        stats: GatewayStats,
        clock: Callable[[], float],
        on_event: EventSink,
    ) -> None:
        self.settings = settings
        self.stats = stats
        self._clock = clock
        self.on_event = on_event
        self.jobs = JobRouters()
        self.default_versions = DefaultVersions(settings.max_staleness)
        self._entries: dict[str, ReplicaEntry] = {}
        # Live attempts in order of their beginning, so that one history has one outcome.
        self._live: dict[LiveAttempt, None] = {}
        # Sorted by priority (lower first); of equal ones turns that continue, then by arrival.
        self._waiting: list[_WaitingTurn] = []
        # Constraints of turns that could not be placed in the last pass over the queue.
        self._blocked: set[_Constraint] = set()
        self._arrivals = count()
        # Event that is set when a turn comes and there was none.
        self.work_began = asyncio.Event()
        # Tokens by job since the last demand report; None if nothing reports demand.
        self.made_tokens: Counter[str] | None = None
        self.switches = LeaseLatencyClock()

    @property
    def waiting(self) -> int:
        """Number of turns that wait for a replica."""
        return len(self._waiting)

    @property
    def attached(self) -> dict[str, str]:
        """API names of the stock engines in the table, by replica id."""
        rows = self._entries.values()
        return {row.id: row.api.value for row in rows if row.api is not ReplicaApi.ROSE}

    @property
    def entries(self) -> Collection[ReplicaEntry]:
        """All rows of the gateway's replica table, as it is now."""
        return self._entries.values()

    @property
    def usable(self) -> int:
        """Number of replicas that get turns: leased and healthy ones."""
        return sum(entry.leased and entry.healthy for entry in self._entries.values())

    def places(self, job: str) -> int:
        """Return the number of turns that a job's healthy replicas take at a time."""
        mine, rows = self.jobs.of(job), self._entries.values()
        leased = (row for row in rows if row.leased and row.healthy)
        return sum(row.max_sequences for row in leased if self.jobs.of(row.job) is mine)

    def idle(self, job: str) -> bool:
        """Return True if one more turn of a job would begin at once, and none of it waits."""
        mine = self.jobs.of(job)
        waits = any(self.jobs.of(each.need.job) is mine for each in self._waiting)
        return mine.has_room() and not waits

    def owed(self) -> Iterator[tuple[str, int]]:
        """Yield (job, expected remaining tokens) of each running or waiting turn."""
        for live in self._live:
            yield live.need.job, live.placement.owed_tokens
        for waiter in self._waiting:
            router = self.jobs.of(waiter.need.job)
            yield waiter.need.job, router.expected_tokens(waiter.need)

    def set_table(self, entries: tuple[ReplicaEntry, ...], jobs: tuple[str, ...] = ()) -> None:
        """Replace the replica table and the registered jobs; attempts whose lease is over are
        interrupted before this returns.
        """
        now_s = self._clock()
        self.switches.set_table(entries, now_s)
        self.default_versions.set_table(entries)
        old, self._entries = self._entries, {entry.id: entry for entry in entries}
        for entry in old.values():
            if entry.leased and not entry.continues(self._entries.get(entry.id)):
                self.on_event("replica_lost", replica=entry.id, epoch=entry.lease_epoch)
        # A replica under a new lease starts with a clean load: its old turns are ended below.
        renewed = {e.id for e in entries if e.id in old and _begins_anew(old[e.id], e)}
        self.jobs.set_table(entries, jobs, now_s, renewed)
        for waiter in self._waiting:
            self._name_job(waiter)
        for live in self._live:
            if not live.entry.continues(self._entries.get(live.entry.id)):
                live.interrupt(End.REVOKED)
        self.pump()

    def check_admission(self, need: TurnNeed) -> None:
        """Raise QueueFull if too many turns of the job wait, or BadRequest if the turn fits on no
        replica.
        """
        if self._queue_full(need.job, self.settings.max_waiting):
            most = self.settings.max_waiting
            raise QueueFull(f"{most} turns wait already (--max-waiting); send it again later")
        if not self.jobs.of(need.job).fits(need):
            raise BadRequest("prompt and max_tokens together exceed the KV memory of every replica")

    def _queue_full(self, job: str, most: int) -> bool:
        """Return True if `most` turns of the job wait already; each job is counted by itself."""
        if len(self._waiting) < most:
            return False
        mine = self.jobs.of(job)
        return sum(self.jobs.of(each.need.job) is mine for each in self._waiting) >= most

    def _name_job(self, waiter: _WaitingTurn) -> None:
        """Give a waiting turn the only registered job if it names none, or end its wait with
        UnknownJob if its job is gone.
        """
        if waiter.granted.done():
            return
        try:
            waiter.need = replace(waiter.need, job=self.jobs.resolve(waiter.need.job))
        except TurnError as error:
            waiter.granted.set_result(fresh(error))

    async def acquire(
        self, need: TurnNeed, avoid: str = "", priority: int = 0, *, batch: bool = False
    ) -> LiveAttempt:
        """Wait for a place on a replica and return it; give it back with `finish`.

        avoid: the replica that just failed this turn, "" for a turn that begins. batch: True for
        one of many turns of a request, which may wait for each other as long as tokens come.

        Raises QueueFull if too many wait, VersionUnavailable or NoReplica if waiting did not help,
        and UnknownJob if the job was ended.
        """
        need = replace(need, job=self.jobs.resolve(need.job))
        if not self._live and not self._waiting:
            self.work_began.set()
        granted: asyncio.Future[LiveAttempt | TurnError] = (
            asyncio.get_running_loop().create_future()
        )
        # A turn that continues has waited before: it goes first among its equals.
        turn = (priority, 0 if avoid else 1, next(self._arrivals))
        waiter = _WaitingTurn(need, avoid, self._clock(), batch, granted, turn)
        insort(self._waiting, waiter, key=_in_turn)
        if not self._is_behind(waiter):
            self.pump()
        over = not avoid and not granted.done()
        if over and self._queue_full(need.job, self.settings.max_waiting + 1):
            # Each sample of a request counts here: all were admitted before the first waited.
            self._waiting.remove(waiter)
            raise QueueFull(
                f"over {self.settings.max_waiting} turns would wait (--max-waiting); "
                "send this request again later"
            )
        try:
            place = await granted
        except asyncio.CancelledError:
            self._leave(waiter)
            raise
        if isinstance(place, TurnError):
            raise fresh(place)
        return place

    def _is_behind(self, waiter: _WaitingTurn) -> bool:
        """Return True if this newest waiter stands behind a turn with the same constraints that
        could not be placed.

        Every event that could change that calls `pump`, so the queue need not be tried for each new
        turn.
        """
        last = len(self._waiting) > 1 and self._waiting[-1] is waiter
        return last and self._constraint(waiter, waiter.since_s) in self._blocked

    def _constraint(self, waiter: _WaitingTurn, now_s: float) -> _Constraint:
        need, router = waiter.need, self.jobs.of(waiter.need.job)
        # A turn that continues, or would soon fail for want of a place, waits for no memory.
        late = not waiter.batch and now_s - waiter.since_s > self.settings.queue_wait_s / 2
        displaces = bool(waiter.avoid) or late or router.holds(need)
        return router, need.min_version, need.exact_version, displaces

    def _leave(self, waiter: _WaitingTurn) -> None:
        """Remove a cancelled waiter from the queue, or give its just granted place back."""
        granted = waiter.granted
        if granted.done() and not granted.cancelled():
            place = granted.result()
            if isinstance(place, LiveAttempt):
                self.finish(place, None)
        elif waiter in self._waiting:
            self._waiting.remove(waiter)

    def finish(self, live: LiveAttempt, end: End | None) -> None:
        """End an attempt and free its place; `end` says how it ended, None if the turn is no longer
        wanted. Waiting turns are placed then.
        """
        now_s = self._clock()
        self.switches.ended(live.entry.id, live.entry.lease_epoch, now_s)
        self._live.pop(live, None)
        live.router.end(
            live.placement,
            now_s,
            revoked=end is End.REVOKED,
            finished=end is End.FINISHED,
            wanted=end is not None,
        )
        if end is not None:
            self.stats.ends[end.value] += 1
            rest_s = REST_S.get(end)
            if rest_s is not None and live.entry.continues(self._entries.get(live.entry.id)):
                live.router.rest(live.entry.id, now_s + rest_s)
        if self._waiting:
            self.pump()

    def journaled(self, live: LiveAttempt, tokens: int) -> None:
        """Count tokens of a live attempt that were added to its journal, for router, statistics and
        stall detection.
        """
        live.last_token_s = self._clock()
        live.router.progress(live.placement, tokens, live.last_token_s)
        self.stats.tokens[live.entry.id] += tokens
        if self.made_tokens is not None:
            self.made_tokens[live.need.job] += tokens
        if self.switches.awaiting:
            self.switches.token(live.entry.id, live.entry.lease_epoch, live.last_token_s)

    def heard(self, live: LiveAttempt) -> None:
        """Count a live attempt as silent from now on, since its replica did something for it."""
        live.last_token_s = self._clock()

    def pump(self) -> None:
        """Place waiting turns, in queue order, as long as there is room."""
        now_s = self._clock()
        blocked = self._blocked = set()
        still: list[_WaitingTurn] = []
        tried = 0
        for waiter in self._waiting:
            if not self.jobs.has_room():
                break
            tried += 1
            constraint = self._constraint(waiter, now_s)
            router, *_, displaces = constraint
            if waiter.granted.done():
                continue
            name = None
            if constraint not in blocked and router.has_room():
                name = router.choose(waiter.need, now_s, waiter.avoid, displaces=displaces)
            if name is None:
                blocked.add(constraint)
                still.append(waiter)
            else:
                self._place(waiter, name, now_s)
        self._waiting = still + self._waiting[tried:]

    def sweep(self) -> None:
        """Interrupt stalled turns that another replica would serve sooner, and fail waiting turns
        that cannot be served; called every `SWEEP_S`.
        """
        now_s = self._clock()
        claimed: Counter[str] = Counter()
        stalled_s = now_s - self.settings.stall_s
        for live in tuple(self._live):
            if live.last_token_s >= stalled_s:
                continue
            try:
                self._judge(live, now_s, claimed)
            except Exception as fault:  # noqa: BLE001 - the others are judged all the same
                live.may_move = False
                self.on_event("turn_not_judged", replica=live.entry.id, message=described(fault))
        settings, unversioned = self.settings, self._unversioned()
        patient_s = now_s - min(settings.version_wait_s, settings.queue_wait_s)
        for waiter in self._waiting:
            if waiter.since_s > patient_s and waiter.need.exact_version is None and not unversioned:
                # No verdict is possible on this turn yet, as on nearly all of thousands.
                continue
            error = self._verdict(waiter, now_s)
            if error is not None and not waiter.granted.done():
                waiter.granted.set_result(error)
        self.pump()
        self._waiting = [w for w in self._waiting if not w.granted.done()]

    def _judge(self, live: LiveAttempt, now_s: float, claimed: Counter[str]) -> None:
        """Interrupt a stalled turn as STALLED if another replica would finish it sooner."""
        waited_s = now_s - live.last_token_s
        if live.may_move and live.interrupted is None:
            other = live.router.escape(live.need, live.entry.id, waited_s, now_s, claimed)
            if other is not None:
                claimed[other] += 1
                live.interrupt(End.STALLED)

    def _verdict(self, waiter: _WaitingTurn, now_s: float) -> TurnError | None:
        """Return the error with which a waiting turn fails now, because waiting cannot help; None
        if it may wait on.
        """
        try:
            return self._hopeless(waiter, now_s)
        except Exception as error:  # noqa: BLE001 - the others are judged all the same
            self.on_event("turn_not_judged", message=described(error))
            return TurnError("the gateway gave the turn up: send it again")

    def _unversioned(self) -> bool:
        """Return True if the table has replicas and all of them are stock engines, which never
        report a version.
        """
        rows = self._entries.values()
        return bool(rows) and all(row.api is not ReplicaApi.ROSE for row in rows)

    def left_s(self, live: LiveAttempt, need: TurnNeed) -> float:
        """Return the seconds that a live turn is expected to take still; `need` is its rest."""
        return live.router.left_s(live.placement, need, self._clock() - live.last_token_s)

    def copy_of(self, live: LiveAttempt, need: TurnNeed) -> Quote | None:
        """Return a quote (replica and cost) for a second copy of a live turn; None if there is no
        place or other turns wait.
        """
        if self._waiting:
            return None
        return live.router.copy_of(need, live.entry.id, self._clock())

    def place_copy(self, quote: Quote, why: str) -> LiveAttempt:
        """Take the quoted place for a second copy of a turn and return it; give it back with
        `finish`.
        """
        now_s = self._clock()
        router = self.jobs.of(quote.ask.need.job)
        return self._admit(router, router.take(quote, why, now_s), now_s)

    def _place(self, waiter: _WaitingTurn, name: str, now_s: float) -> None:
        router = self.jobs.of(waiter.need.job)
        placement = router.begin(name, waiter.need, now_s)
        waiter.granted.set_result(self._admit(router, placement, now_s))

    def _admit(self, router: Router, placement: TurnPlacement, now_s: float) -> LiveAttempt:
        self.switches.tried(placement.replica, now_s)
        entry, need = self._entries[placement.replica], placement.need
        job = self.jobs.registered(need.job)
        live = LiveAttempt(entry, router, job, placement, need, now_s)
        self._live[live] = None
        self.stats.attempts += 1
        return live

    def _hopeless(self, waiter: _WaitingTurn, now_s: float) -> TurnError | None:
        need, waited_s = waiter.need, now_s - waiter.since_s
        router = self.jobs.of(need.job)
        if not router.reachable(need):
            return VersionUnavailable(
                f"version {need.exact_version} is over on every replica; ask for a newer one"
            )
        wanted = need.min_version if need.exact_version is None else need.exact_version
        if wanted is not None and self._unversioned():
            return VersionUnavailable(
                "no replica here says which version it runs: "
                "leave min_version and exact_version out"
            )
        too_late = wanted is not None and waited_s > self.settings.version_wait_s
        if too_late and not router.has_version(need):
            return VersionUnavailable(f"no replica runs version {wanted} after {waited_s:.0f} s")
        limit_s = self.settings.queue_wait_s
        if waited_s <= limit_s:
            return None
        if waiter.batch and now_s - router.heard_s <= limit_s:
            # A turn of a batch waits for the batch's other turns as long as its replicas work.
            limit_s = self.settings.batch_wait_s
        if waited_s <= limit_s:
            return None
        return NoReplica(f"no replica was free for {waited_s:.0f} s; send the turn again later")


def _begins_anew(old: ReplicaEntry, new: ReplicaEntry) -> bool:
    """Return True if turns of the replica's old row cannot continue under its new one, and either
    is leased.
    """
    return (old.leased or new.leased) and not old.continues(new)
