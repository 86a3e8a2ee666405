"""Copies of one turn, and hedging: second copies for the slowest members of groups.

    first copy ──────────────────────────┬─ whole: its journal is the turn's, the other is cancelled
       └─ fork: a copy on another replica ┤
                                          └─ fails: the other continues; of the last: the turn's

Each copy has a journal and text of its own, and the first whole one wins. A turn that may have no
other copy is a race of one: readers see its journal as it grows. Of other turns, and of those that
start over where they continue (`Sampling.counts_output`), they see nothing before one copy is
whole, since delivered tokens cannot be taken back.

Callers allow copies, and `HedgedGroup` decides when one is worth it; `Hedging` supplies a member's
remaining need and the cost of a copy. Turns define their group: `group_id`, its size, how many
copies it may have. Turns that come when all members are there already belong to no group and get no
copies.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from elastic_scheduler import HedgedGroup, MemberView, Quote, TurnJournal, TurnNeed, Won
from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.replicas.dispatcher import Dispatcher, EventSink, LiveAttempt
from rose.gateway.stats import GatewayStats
from rose.gateway.text_codec import TextTrack
from rose.gateway.turn_request import Origin, TurnRequest
from rose.gateway.turns.token_stream import TokenStream
from rose.process.background_tasks import described


@dataclass(slots=True, eq=False)
class TurnCopy:
    """Successive attempts at one turn. `live` is the running one; `avoid` failed last.

    `place` was taken before the copy began.
    """

    request: TurnRequest
    journal: TurnJournal
    text: TextTrack | None
    need: TurnNeed
    avoid: str = ""
    place: LiveAttempt | None = None
    live: LiveAttempt | None = None
    number: int = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the turn."""
        return None if self.text is None else self.text.matched

    @property
    def stop_reason(self) -> int | str | None:
        """vLLM's stop reason: the stop string or stop token that ended the turn, else None."""
        if self.journal.finish_reason != "stop" or self.matched is not None:
            return self.matched
        last = self.journal.tokens[-1] if self.journal.tokens else None
        sampling, text = self.request.sampling, self.text
        if text is not None and last == text.plan.codec.end_of_sequence and not sampling.ignore_eos:
            return None
        return last if last in (sampling.stop_token_ids or ()) else None

    def belongs_to(self, live: LiveAttempt) -> None:
        """Continue as a turn of the job that the place is leased to, whatever its name was."""
        self.request.job = live.job
        self.need = replace(self.need, job=live.need.job)

    def restart(self) -> None:
        """Drop its output: elsewhere its tokens would not count as output."""
        self.journal = self.journal.restarted()
        self.text = (
            None if self.request.text is None else self.request.text.track(self.request.token_ids)
        )

    def need_now(self) -> TurnNeed:
        """Return the need of the rest of the turn."""
        journal = self.journal
        return replace(
            self.need,
            prompt_tokens=journal.length,
            budget_tokens=journal.remaining,
            made_tokens=journal.generated,
        )


class Judge(Protocol):
    """Owner of a turn's answer: a member of a hedged group."""

    def entered(self, race: "Race") -> None:
        """Record that the turn runs from now on, and may be forked."""
        ...

    def finished(self, copy: int) -> Won | None:
        """Take the copy's whole answer; return None if another was first."""
        ...

    def failed(self, copy: int) -> bool:
        """Record that the copy ended without one; return True if it was the last."""
        ...


class _Alone:
    """Owner of a turn that may have no other copy."""

    def entered(self, race: "Race") -> None:
        """Do nothing: it is never forked."""

    def finished(self, copy: int) -> Won:
        return Won("", copy, ())

    def failed(self, copy: int) -> bool:
        del copy
        return True


ALONE = _Alone()


class Race:
    """All copies of one turn, and the one owner of its end. `run` it; `fork` it while it runs."""

    def __init__(
        self,
        request: TurnRequest,
        feed: TokenStream,
        judge: Judge,
        work: Callable[["Race", TurnCopy], Awaitable[None]],
        give_back: Callable[[LiveAttempt], None],
        stats: GatewayStats,
    ) -> None:
        self._judge = judge
        self._work = work
        self._give_back = give_back
        self._stats = stats
        self._won = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended: asyncio.Queue[int] = asyncio.Queue()
        self.feed = feed
        self.copies = [TurnCopy(request, feed.journal, feed.text, request.need())]

    @property
    def live(self) -> list[tuple[TurnCopy, LiveAttempt]]:
        """Copies that are on a replica now."""
        return [(copy, copy.live) for copy in self.copies if copy.live is not None]

    async def run(self) -> None:
        """Return when a copy was whole. Raises the TurnError of the last one that failed."""
        self._judge.entered(self)
        try:
            if self._judge is ALONE:
                first = self.copies[0]
                if first.request.sampling.counts_output:
                    # The turn may start over, and delivered tokens cannot be taken back.
                    first.journal, first.text = _forked(first)
                # A single copy needs no task but the turn's own.
                await self._work(self, self.copies[0])
            else:
                await self._run_copies()
        finally:
            # They reference each other and this race.
            self.copies.clear()
            self._tasks.clear()

    async def _run_copies(self) -> None:
        first = self.copies[0]
        first.journal, first.text = _forked(first)
        self._start(first)
        try:
            while not self._won:
                number = await self._ended.get()
                error = self._error(number)
                if error is not None:
                    try:
                        raise error
                    finally:
                        # Its frames reference this one, which must not reference the error.
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

    def fork(self, number: int, copy: TurnCopy, place: LiveAttempt) -> None:
        """Start copy `number`, which continues from the tokens of `copy`, on a place of its own."""
        name = f"{copy.request.request_id}.copy{number}"
        forked = TurnCopy(
            replace(copy.request, request_id=name),
            *_forked(copy),
            copy.need_now(),
            place=place,
            number=number,
        )
        self.copies.append(forked)
        self._start(forked)

    def delivered(self, copy: TurnCopy) -> None:
        """Deliver a whole copy: if it is the first one, the turn is over at this moment."""
        won = self._judge.finished(copy.number)
        if won is None:
            return
        self._won = True
        self.feed.show(copy.journal, copy.text)
        self.feed.end(copy.stop_reason)
        self._stats.turns += 1
        self._stats.hedge_wins += copy.number > 0
        for number in won.cancel:
            self._tasks[number].cancel()

    def goes_on(self, copy: TurnCopy) -> bool:
        """Return True if a copy whose attempt failed tries again: not while another one runs."""
        return self._judge.failed(copy.number)

    def _start(self, copy: TurnCopy) -> None:
        task = asyncio.ensure_future(self._work(self, copy))
        self._tasks[copy.number] = task
        task.add_done_callback(lambda _: self._over(copy))

    def _over(self, copy: TurnCopy) -> None:
        if copy.place is not None:
            # The copy was cancelled before it began.
            self._give_back(copy.place)
            copy.place = None
        self._ended.put_nowait(copy.number)

    def _error(self, number: int) -> BaseException | None:
        """Return the error with which the turn ends; None if it is won, or another copy runs."""
        task = self._tasks[number]
        if self._won:
            return None
        if task.cancelled():
            return asyncio.CancelledError()
        error = task.exception()
        if isinstance(error, TurnError) and not self._judge.failed(number):
            return None
        return error


def _forked(copy: TurnCopy) -> tuple[TurnJournal, TextTrack | None]:
    """Return a journal that continues this copy's, and its text, settled again from the tokens."""
    text = None if copy.request.text is None else copy.request.text.track(copy.request.token_ids)
    if text is not None:
        text.add(copy.journal.tokens)
    return copy.journal.fork(), text


# Groups without a running member; those idle for longest are forgotten first.
IDLE_GROUPS_KEPT = 4_096
# A turn that is nearly done is not worth the prefill of a copy, whatever the figures say.
LEAST_LEFT_S = 0.2
NEVER_S = float("inf")


class _Group:
    """A group's members by place: `fresh` not begun, `vacant` ended without an answer."""

    def __init__(self, origin: Origin) -> None:
        self.size, self.hedges = origin.group_size, origin.hedges
        names = [str(number) for number in range(self.size)]
        self.core = HedgedGroup(tuple(names), self.hedges)
        self.fresh = names[::-1]
        self.vacant: list[str] = []
        self.racing: dict[str, Race] = {}
        self.running = 0
        # False once its copies could not be judged: it gets no more of them.
        self.sound = True

    def suits(self, origin: Origin) -> bool:
        return (self.size, self.hedges) == (origin.group_size, origin.hedges)

    def take(self) -> str | None:
        """Return a place for one more member; None if all are there."""
        places = self.vacant or self.fresh
        if not places:
            return None
        place = places.pop()
        self.core.restart(place)
        return place


class HedgedTurn:
    """One turn's place in its group."""

    def __init__(self, group: _Group, place: str) -> None:
        self._group = group
        self._place = place

    def entered(self, race: Race) -> None:
        """Record that the turn runs from now on, and may get a copy."""
        self._group.racing[self._place] = race

    def finished(self, copy: int) -> Won | None:
        """Take the copy's whole answer; return None if another was first."""
        return self._group.core.finished(self._place, copy)

    def failed(self, copy: int) -> bool:
        """Record that the copy ended without one; return True if it was the last."""
        return self._group.core.failed(self._place, copy)


class Hedging:
    """All hedged groups of one gateway."""

    def __init__(self, dispatcher: Dispatcher, stats: GatewayStats, on_event: EventSink) -> None:
        self._dispatcher = dispatcher
        self._stats = stats
        self._on_event = on_event
        self._groups: dict[tuple[str, str], _Group] = {}
        self._idle: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    @contextmanager
    def judge(self, origin: Origin) -> Iterator[Judge]:
        """Return a turn's place in its group while it runs; ALONE if it may have no copies.

        Raises BadRequest for a turn that contradicts the running others of its group.
        """
        group = self._group(origin) if origin.hedges else None
        place = None if group is None else group.take()
        if group is None or place is None:
            yield ALONE
            return
        group.running += 1
        self._idle.pop((origin.job, origin.scope + origin.group), None)
        try:
            yield HedgedTurn(group, place)
        finally:
            group.running -= 1
            group.racing.pop(place, None)
            if not group.core.is_done(place):
                group.vacant.append(place)
            self._settle((origin.job, origin.scope + origin.group), group)

    def sweep(self) -> None:
        """Start the copies that pay by now; called every `SWEEP_S`."""
        for key, group in tuple(self._groups.items()):
            if group.sound and group.racing and not group.fresh and group.core.may_hedge:
                try:
                    self._consider(group)
                except Exception as error:  # noqa: BLE001 - the others get their copies
                    group.sound = False
                    self._on_event("group_not_judged", group=key[1], message=described(error))

    def _group(self, origin: Origin) -> _Group:
        key = (origin.job, origin.scope + origin.group)
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
            group = self._groups[key] = _Group(origin)
        return group

    def _settle(self, key: tuple[str, str], group: _Group) -> None:
        """Forget a complete group, and the oldest of those without a running member."""
        if self._groups.get(key) is not group or group.running:
            return
        if group.core.complete:
            del self._groups[key]
            return
        self._idle[key] = None
        if len(self._idle) > IDLE_GROUPS_KEPT:
            del self._groups[self._idle.popitem(last=False)[0]]

    def _consider(self, group: _Group) -> None:
        left_s = {place: self._left_s(race) for place, race in group.racing.items()}
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

    def _start(self, race: Race, copy: TurnCopy, quote: Quote, number: int, saves_s: float) -> None:
        place = self._dispatcher.place_copy(
            quote, f"a copy that is expected to save its group {saves_s:.2g} s"
        )
        self._stats.hedges += 1
        self._on_event(
            "hedge",
            request_id=copy.request.request_id,
            replica=quote.replica,
            saves_s=saves_s,
            journaled=copy.journal.generated,
        )
        race.fork(number, copy, place)

    def _left_s(self, race: Race) -> float:
        """Return the seconds that a member still needs, by its best copy; else infinite."""
        return min((self._one_left_s(copy, live) for copy, live in race.live), default=NEVER_S)

    def _one_left_s(self, copy: TurnCopy, live: LiveAttempt) -> float:
        if copy.journal.whole:
            return 0.0
        return self._dispatcher.left_s(live, copy.need_now())
