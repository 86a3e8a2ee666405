"""Second copies for the slowest members of groups, where their callers allow them.

`HedgedGroup` decides; what a member still needs and what a copy would cost is known here only. A
group is what its turns say: `group_id`, how many they are, how many copies they may have. Turns
that come when all members are there already are nobody's members: they get no copies.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_scheduler import HedgedGroup, MemberView, Quote, Won
from rose.background import described
from rose.gateway.dispatcher import Dispatcher, EventSink, LiveAttempt
from rose.gateway.errors import BadRequest
from rose.gateway.origin import Origin
from rose.gateway.race import Race, TurnCopy
from rose.gateway.stats import GatewayStats

# Groups of which no member runs now; those idle for longest are forgotten first.
IDLE_GROUPS_KEPT = 4_096
# A turn that is nearly done is not worth the prefill of a copy, whatever the figures say.
LEAST_LEFT_S = 0.2
NEVER_S = float("inf")


class _Group:
    """A group's members by place: `fresh` nobody took yet, `vacant` ended without an answer."""

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
        """A place for one more member; None: all are there."""
        places = self.vacant or self.fresh
        if not places:
            return None
        place = places.pop()
        self.core.restart(place)
        return place


class Member:
    """One turn's place in its group."""

    def __init__(self, group: _Group, place: str) -> None:
        self._group = group
        self._place = place

    def entered(self, race: Race) -> None:
        """The turn runs from now on."""
        self._group.racing[self._place] = race

    def finished(self, copy: int) -> Won | None:
        """As `HedgedGroup.finished`."""
        return self._group.core.finished(self._place, copy)

    def failed(self, copy: int) -> bool:
        """As `HedgedGroup.failed`."""
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
        """Groups that are remembered."""
        return len(self._groups)

    @contextmanager
    def member(self, origin: Origin) -> Iterator[Member | None]:
        """A turn's membership for as long as it runs; None where it may have no copies.

        Raises BadRequest for a turn that contradicts the running others of its group.
        """
        group = self._group(origin) if origin.hedges else None
        place = None if group is None else group.take()
        if group is None or place is None:
            yield None
            return
        group.running += 1
        self._idle.pop((origin.job, origin.group), None)
        try:
            yield Member(group, place)
        finally:
            group.running -= 1
            group.racing.pop(place, None)
            if not group.core.is_done(place):
                group.vacant.append(place)
            self._settle((origin.job, origin.group), group)

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
        key = (origin.job, origin.group)
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
        """Forget a group that is complete, and of those that nobody works on the oldest."""
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
        # A member that waits for a replica holds the group up for nobody knows how long.
        if not LEAST_LEFT_S <= left_s[place] < NEVER_S:
            return
        (copy, live), *others = group.racing[place].live
        if others or not copy.journal.can_begin:
            return
        quote = self._dispatcher.copy_of(live, copy.need_now())
        if quote is None:
            return
        # The others' copies would be about as long: they have the same prompt and replica.
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
        """Seconds that a member still needs, by its best copy; infinite while it has no place."""
        return min((self._one_left_s(copy, live) for copy, live in race.live), default=NEVER_S)

    def _one_left_s(self, copy: TurnCopy, live: LiveAttempt) -> float:
        if copy.journal.whole:
            return 0.0
        return self._dispatcher.left_s(live, copy.need_now())
