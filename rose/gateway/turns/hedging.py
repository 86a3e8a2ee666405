"""Hedging: second copies of turns, for the slowest members of groups.

    first copy ──────────────────────────┬─ whole: its journal is the turn's, the other is cancelled
       └─ fork: a copy on another replica ┤
                                          └─ fails: the other continues; of the last: the turn's

It wraps turns from outside: each copy is a `TurnAttempts` with a journal and text of its own, and
the first whole one wins. Readers see nothing before that: delivered tokens cannot be taken back.

Callers allow copies, and `HedgedGroup` decides when one is worth it; `Hedging` supplies a member's
remaining need and the cost of a copy. Turns define their group: `group_id`, its size, how many
copies it may have. Turns that come when all members are there already belong to no group and get no
copies.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from elastic_scheduler import HedgedGroup, MemberView, Quote
from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.replicas.dispatcher import Dispatcher, LiveAttempt
from rose.gateway.turn_request import Origin, TurnRequest
from rose.gateway.turns.attempt import TurnAttempts
from rose.gateway.turns.token_stream import TokenStream
from rose.process.background_tasks import described

# Number of kept groups without a running member; those idle for longest are forgotten first.
IDLE_GROUPS_KEPT = 4_096
# Least remaining time of a turn that gets a copy: below it the prefill of a copy is not worth it.
LEAST_LEFT_S = 0.2
NEVER_S = float("inf")
Work = Callable[[TurnAttempts], Awaitable[None]]


class _RunningGroup:
    """Members of one hedged group by place: `fresh` places have not begun, `vacant` ones ended
    without an answer, `racing` ones run.
    """

    def __init__(self, origin: Origin) -> None:
        self.size, self.hedges = origin.group_size, origin.hedges
        names = [str(number) for number in range(self.size)]
        self.core = HedgedGroup(tuple(names), self.hedges)
        self.fresh = names[::-1]
        self.vacant: list[str] = []
        self.racing: dict[str, HedgedTurn] = {}
        self.running = 0
        # False once its copies could not be judged: it gets no more of them.
        self.sound = True

    def suits(self, origin: Origin) -> bool:
        return (self.size, self.hedges) == (origin.group_size, origin.hedges)

    def take(self) -> str | None:
        """Take a place of the group for one more member and return it; None if all are taken."""
        places = self.vacant or self.fresh
        if not places:
            return None
        place = places.pop()
        self.core.restart(place)
        return place


class HedgedAttempts(TurnAttempts):
    """Attempts of one copy of a hedged turn; a second copy holds its place before it begins."""

    def __init__(self, turn: "HedgedTurn", request: TurnRequest) -> None:
        super().__init__(request, turn.feed)
        self.number = 0
        self.taken: LiveAttempt | None = None
        self._turn = turn

    async def place(self, dispatcher: Dispatcher) -> LiveAttempt:
        taken, self.taken = self.taken, None
        return taken or await super().place(dispatcher)

    def deliver(self) -> bool:
        return self._turn.won_by(self) and super().deliver()

    def goes_on(self) -> bool:
        """Record that this copy failed, and return True if it is tried again: only if no other copy
        runs.
        """
        return self._turn.failed(self.number)


class HedgedTurn:
    """One member of a hedged group with all its copies; the first whole copy becomes the turn's
    answer.
    """

    def __init__(
        self,
        group: _RunningGroup,
        place: str,
        feed: TokenStream,
        work: Work,
        dispatcher: Dispatcher,
    ) -> None:
        self._group = group
        self._place = place
        self._work = work
        self._dispatcher = dispatcher
        self._won = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended: asyncio.Queue[int] = asyncio.Queue()
        self.feed = feed
        self.copies: list[HedgedAttempts] = []

    @property
    def live(self) -> list[tuple[HedgedAttempts, LiveAttempt]]:
        """List of (copy, its place) for each copy of the turn that is on a replica now."""
        return [(copy, copy.live) for copy in self.copies if copy.live is not None]

    async def run(self, request: TurnRequest) -> None:
        """Run the turn's copies until one is whole. Raises the TurnError of the last copy if all
        fail.
        """
        first = HedgedAttempts(self, request)
        first.journal, first.text = first.forked()
        self._start(first)
        try:
            while not self._won:
                number = await self._ended.get()
                error = self._error(number)
                if error is not None:
                    try:
                        raise error
                    finally:
                        # The error's frames reference this frame, which must not reference the
                        # error.
                        del error
            # The rest reads the end of its stream, so that its connection can be reused.
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            if not self._won:
                furthest = max(self.copies, key=lambda copy: copy.journal.generated)
                self.feed.show(furthest.journal, furthest.text)
            # Copies and tasks reference each other and this turn.
            self.copies.clear()
            self._tasks.clear()

    def fork(self, number: int, copy: HedgedAttempts, place: LiveAttempt) -> None:
        """Start copy `number` of the turn on `place`; it continues from the tokens of `copy`."""
        name = f"{copy.request.request_id}.copy{number}"
        forked = HedgedAttempts(self, replace(copy.request, request_id=name))
        forked.journal, forked.text = copy.forked()
        forked.need = copy.need_now()
        forked.number, forked.taken = number, place
        self._start(forked)

    def won_by(self, copy: HedgedAttempts) -> bool:
        """Make this whole copy the turn's answer, cancel the others and return True; return False
        if another copy was first.
        """
        won = self._group.core.finished(self._place, copy.number)
        if won is None:
            return False
        self._won = True
        self._dispatcher.stats.hedge_wins += copy.number > 0
        for number in won.cancel:
            self._tasks[number].cancel()
        return True

    def failed(self, number: int) -> bool:
        """Record that a copy ended without an answer; return True if no other copy runs."""
        return self._group.core.failed(self._place, number)

    def _start(self, copy: HedgedAttempts) -> None:
        self.copies.append(copy)
        task = asyncio.ensure_future(self._work(copy))
        self._tasks[copy.number] = task
        task.add_done_callback(lambda _: self._over(copy))

    def _over(self, copy: HedgedAttempts) -> None:
        if copy.taken is not None:
            # The copy was cancelled before it began.
            self._dispatcher.finish(copy.taken, None)
            copy.taken = None
        self._ended.put_nowait(copy.number)

    def _error(self, number: int) -> BaseException | None:
        """Return the error with which the turn ends; None with an answer or a running copy."""
        task = self._tasks[number]
        if self._won:
            return None
        if task.cancelled():
            return asyncio.CancelledError()
        error = task.exception()
        if isinstance(error, TurnError) and not self.failed(number):
            return None
        return error


class Hedging:
    """Manager of a gateway's hedged groups: it starts second copies of their slowest turns."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._groups: dict[tuple[str, str], _RunningGroup] = {}
        self._idle: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    async def run(self, request: TurnRequest, feed: TokenStream, work: Work) -> None:
        """Run a turn to its end as a member of its hedged group; `work` makes the attempts of one
        copy.

        A turn that comes when the group is full runs without copies. Raises BadRequest for a turn
        that contradicts the others of its group, or TurnError.
        """
        origin = request.origin
        key = (origin.job, origin.scope + origin.group)
        group = self._group_of(key, origin)
        place = group.take()
        if place is None:
            await work(TurnAttempts(request, feed))
            return
        group.running += 1
        self._idle.pop(key, None)
        group.racing[place] = turn = HedgedTurn(group, place, feed, work, self._dispatcher)
        try:
            await turn.run(request)
        finally:
            group.running -= 1
            group.racing.pop(place, None)
            if not group.core.is_done(place):
                group.vacant.append(place)
            self._settle(key, group)

    def sweep(self) -> None:
        """Start each second copy expected to shorten its group now; called each `SWEEP_S`."""
        for key, group in tuple(self._groups.items()):
            if group.sound and group.racing and not group.fresh and group.core.may_hedge:
                try:
                    self._consider(group)
                except Exception as error:  # noqa: BLE001 - the others get their copies
                    group.sound = False
                    self._dispatcher.on_event(
                        "group_not_judged", group=key[1], message=described(error)
                    )

    def _group_of(self, key: tuple[str, str], origin: Origin) -> _RunningGroup:
        group = self._groups.get(key)
        if group is not None and group.core.complete:
            group = None
        if group is not None and not group.suits(origin):
            if group.running:
                raise BadRequest(
                    f"group {origin.group} has group_size {group.size} and hedges {group.hedges}: "
                    "send the same with all its turns",
                    "group_size",
                )
            group = None
        if group is None:
            group = self._groups[key] = _RunningGroup(origin)
        return group

    def _settle(self, key: tuple[str, str], group: _RunningGroup) -> None:
        """Forget the group if it is complete; if it has no running member, forget the oldest such
        groups above the limit.
        """
        if self._groups.get(key) is not group or group.running:
            return
        if group.core.complete:
            del self._groups[key]
            return
        self._idle[key] = None
        if len(self._idle) > IDLE_GROUPS_KEPT:
            del self._groups[self._idle.popitem(last=False)[0]]

    def _consider(self, group: _RunningGroup) -> None:
        left_s = {place: self._left_s(turn) for place, turn in group.racing.items()}
        place = max(left_s, key=lambda name: left_s[name])
        # A member that waits for a replica holds the group up for an unknown time.
        if not LEAST_LEFT_S <= left_s[place] < NEVER_S:
            return
        (copy, live), *others = group.racing[place].live
        if others or not copy.journal.can_begin:
            return
        quote = self._dispatcher.copy_of(live, copy.need_now())
        if quote is None:
            return
        # The others' copies would take about as long: they have the same prompt and replica.
        views = tuple(MemberView(name, left_s[name], quote.cost_s) for name in left_s)
        hedge = group.core.consider(views, quote.places)
        if hedge is not None:
            self._start(group.racing[place], copy, quote, hedge.copy, hedge.saves_s)

    def _start(
        self, turn: HedgedTurn, copy: HedgedAttempts, quote: Quote, number: int, saves_s: float
    ) -> None:
        place = self._dispatcher.place_copy(
            quote, f"a copy that is expected to save its group {saves_s:.2g} s"
        )
        self._dispatcher.stats.hedges += 1
        self._dispatcher.on_event(
            "hedge",
            request_id=copy.request.request_id,
            replica=quote.replica,
            saves_s=saves_s,
            journaled=copy.journal.generated,
        )
        turn.fork(number, copy, place)

    def _left_s(self, turn: HedgedTurn) -> float:
        """Return the seconds that a member still needs by its fastest copy; infinite while it has
        no replica.
        """
        return min(
            (
                0.0 if copy.journal.whole else self._dispatcher.left_s(live, copy.need_now())
                for copy, live in turn.live
            ),
            default=NEVER_S,
        )
