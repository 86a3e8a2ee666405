"""Election: which of several schedulers leads, decided without IO.

    FOLLOWER --look: nobody leads--> ask for a lease --> put `leader` under it, only if absent
     ^    ^                                              |                  |
     |    +---------------- somebody else was first -----+                  | done
     +----------- the lease may be over, a write was refused ---------- LEADER

The key `leader` is written once in a term, so its revision names the term: revisions never repeat.
The driver loop is `Leadership`, which runs the work of a term:

    for action in election.step(event, now_s):
        match action:
            case Look():            event = Seen(await store.get("leader")) or CallFailed
            case AskLease(ttl_s):   event = LeaseGiven(...) or CallFailed
            case Campaign(lease):   event = CampaignEnded(term or None) or CallFailed
            case KeepLease(lease):  event = LeaseKept(left_s) or CallFailed
            case GiveUpLease(lease): await store.revoke_lease(lease)
            case Lead(term):        serve
            case StepDown(reason):  serve no more

One call is under way at a time. A call's event carries when it was begun: a lease surely lives for
its TTL from then on, whenever the answer came. The store is called beside the clock: a store that
hangs does not keep a leader from stepping down.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from rose.clock import boot_clock_s
from rose.errors import RefusedError, UnavailableError
from rose.store.protocol import ABSENT, Store, StoreEntry
from rose.store.wrappers import LEADER, FencedStore, LeadershipLostError

TTL_S = 2.0
# A leader is sure of its lease this much less than the store says, for clocks that differ in rate
# and for the moment that stepping down takes.
MARGIN_S = 0.2
KEEP_S = 0.5
LOOK_S = 0.2
RETRY_S = 0.1
TICK_S = 0.05
GIVE_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """Process that may lead: the address for its clients, and a nonce that no other process has."""

    address: str
    nonce: str

    def value(self) -> bytes:
        """Return the value that the key `leader` has while this candidate leads."""
        return json.dumps({"address": self.address, "id": self.nonce}).encode()


def address_of(entry: StoreEntry | None) -> str:
    """Return the leader's address in the entry of the key `leader`, "" if there is none."""
    try:
        said = json.loads(entry.value)["address"] if entry else ""
    except (ValueError, TypeError, KeyError):
        return ""
    return said if isinstance(said, str) else ""


# ---- events ----


@dataclass(frozen=True, slots=True)
class ElectionTick:
    """Event without data for the election state machine: time passed, so deadlines are checked."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Event for the election state machine: the key `leader` was read; None: it is absent."""

    entry: StoreEntry | None


@dataclass(frozen=True, slots=True)
class LeaseGiven:
    """Event for the election state machine: the store granted a lease, asked for at `begun_s`."""

    lease: int
    begun_s: float


@dataclass(frozen=True, slots=True)
class CampaignEnded:
    """Event for the election state machine: this process wrote the key `leader`.

    term: the revision of that write; None: another process's key was there, so nothing was written.
    """

    term: int | None


@dataclass(frozen=True, slots=True)
class LeaseKept:
    """Event for the election state machine: the lease was renewed, at a call begun at `begun_s`.

    left_s: seconds that it lives from then on, 0 if it has ended.
    """

    left_s: float
    begun_s: float


@dataclass(frozen=True, slots=True)
class CallFailed:
    """Event for the election state machine: the store call under way failed or was not answered."""


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """Event for the election state machine: the store refused a write of `term`, which is over."""

    term: int


@dataclass(frozen=True, slots=True)
class TermFailed:
    """Event for the election state machine: the leader's work failed in `term`, for `reason`."""

    term: int
    reason: str


Event = (
    ElectionTick
    | Seen
    | LeaseGiven
    | CampaignEnded
    | LeaseKept
    | CallFailed
    | WriteRefused
    | TermFailed
)

# ---- actions ----


@dataclass(frozen=True, slots=True)
class Look:
    """Action of the election: read the key `leader`, then feed `Seen` or `CallFailed`."""


@dataclass(frozen=True, slots=True)
class AskLease:
    """Action of the election: ask the store for a lease of `ttl_s`, then feed `LeaseGiven`."""

    ttl_s: float


@dataclass(frozen=True, slots=True)
class Campaign:
    """Action of the election: write the key `leader` under the lease if the key is absent.

    The event `CampaignEnded` or `CallFailed` follows.
    """

    lease: int


@dataclass(frozen=True, slots=True)
class KeepLease:
    """Action of the election: renew the lease in the store, then feed `LeaseKept`."""

    lease: int


@dataclass(frozen=True, slots=True)
class GiveUpLease:
    """Action of the election: end the lease in the store, so that others need not wait for it.

    No event follows, even if that fails.
    """

    lease: int


@dataclass(frozen=True, slots=True)
class Lead:
    """Action of the election: begin the leader's work for `term`."""

    term: int


@dataclass(frozen=True, slots=True)
class StepDown:
    """Action of the election: cancel the leader's work now, for `reason`."""

    reason: str


Action = Look | AskLease | Campaign | KeepLease | GiveUpLease | Lead | StepDown


class ElectionRole(StrEnum):
    """Role of a scheduler process in the election."""

    LEADER = "leader"
    FOLLOWER = "follower"


@dataclass(frozen=True, slots=True)
class ElectionStatus:
    """State of the election in one process. address: the leader's, "" while unknown.

    term: 0 for a follower. valid_until_s: time until which a leader surely leads.
    """

    role: ElectionRole
    address: str
    term: int
    lease: int
    valid_until_s: float


class Election:
    """Election state machine of one candidate, without IO.

    Times are seconds of one clock that counts suspended time too.
    """

    def __init__(self, me: Candidate, ttl_s: float = TTL_S) -> None:
        self._me = me
        self._ttl_s = ttl_s
        self._address = ""
        self._lease = 0
        self._given_up = 0
        self._term = 0
        self._valid_until_s = 0.0
        self._next_s = 0.0
        self._calling = False

    def status(self) -> ElectionStatus:
        """Return this process's role, term and lease, and the leader's address as last read."""
        role = ElectionRole.LEADER if self._term else ElectionRole.FOLLOWER
        return ElectionStatus(role, self._address, self._term, self._lease, self._valid_until_s)

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions to carry out, in order, for an event at `now_s`."""
        actions = self._react(event, now_s)
        if self._term and now_s >= self._valid_until_s:
            actions += self._step_down("its lease could not be renewed", now_s)
        if not self._calling and now_s >= self._next_s:
            self._calling = True
            actions.append(KeepLease(self._lease) if self._term else Look())
        return actions

    def _react(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case ElectionTick():
                return []
            case WriteRefused() | TermFailed():
                if event.term != self._term:
                    return []
                reason = "another scheduler leads"
                if isinstance(event, TermFailed):
                    reason = event.reason
                return self._step_down(reason, now_s)
        self._calling = False
        match event:
            case Seen():
                return self._seen(event, now_s)
            case LeaseGiven():
                self._lease = event.lease
                self._sure(event.begun_s, self._ttl_s)
                self._calling = True
                return [Campaign(event.lease)]
            case CampaignEnded():
                return self._campaigned(event, now_s)
            case LeaseKept():
                return self._kept(event, now_s)
            case CallFailed():
                self._next_s = now_s + RETRY_S
                return [] if self._term else self._give_up()

    def _seen(self, event: Seen, now_s: float) -> list[Action]:
        self._address = address_of(event.entry)
        if event.entry is not None and event.entry.value == self._me.value():
            # The entry is of a past term: the store never received the release of its lease.
            self._next_s = now_s + RETRY_S
            return [GiveUpLease(self._given_up)] if self._given_up else []
        if event.entry is not None:
            self._next_s = now_s + LOOK_S
            return []
        self._calling = True
        return [AskLease(self._ttl_s)]

    def _campaigned(self, event: CampaignEnded, now_s: float) -> list[Action]:
        if event.term is None or now_s >= self._valid_until_s:
            self._next_s = now_s + RETRY_S
            return self._give_up()
        self._term, self._address = event.term, self._me.address
        self._next_s = now_s + KEEP_S
        return [Lead(event.term)]

    def _kept(self, event: LeaseKept, now_s: float) -> list[Action]:
        if not self._term:  # It stepped down while this was under way.
            return []
        if event.left_s <= 0:
            return self._step_down("its lease is gone", now_s)
        self._sure(event.begun_s, event.left_s)
        self._next_s = now_s + KEEP_S
        return []

    def _sure(self, begun_s: float, left_s: float) -> None:
        self._valid_until_s = begun_s + min(left_s, self._ttl_s) - MARGIN_S

    def _step_down(self, reason: str, now_s: float) -> list[Action]:
        self._term, self._address, self._next_s = 0, "", now_s + RETRY_S
        return [StepDown(reason), *self._give_up()]

    def _give_up(self) -> list[Action]:
        lease, self._lease = self._lease, 0
        self._given_up = lease or self._given_up
        return [GiveUpLease(lease)] if lease else []


Work = Callable[[FencedStore], Awaitable[None]]


class Leadership:
    """Election of one process: carries out the actions and runs the leader's work.

    work: what a leader does; it is started with the term's store and cancelled when the term ends.
    If it raises `UnavailableError` the process gives the term up, `LeadershipLostError` means that
    the term is over, and any other error ends `run`. on_event(event, **fields): takes
    `scheduler_leads`, `scheduler_steps_down`.
    """

    def __init__(
        self,
        store: Store,
        address: str,
        work: Work,
        on_event: Callable[..., None],
        clock: Callable[[], float] = boot_clock_s,
        tick_s: float = TICK_S,
    ) -> None:
        self._store = store
        self._me = Candidate(address, secrets.token_hex(8))
        self._election = Election(self._me)
        self._work = work
        self._on_event = on_event
        self._clock = clock
        self._tick_s = tick_s
        self._call: asyncio.Task[Event] | None = None
        self._term: asyncio.Task[None] | None = None
        self._ends: set[asyncio.Task[None]] = set()
        self._resigned = False

    @property
    def address(self) -> str:
        """Address of the leader, "" while none is known."""
        return self._election.status().address

    @property
    def term(self) -> int:
        """Term in which this process leads, 0 while it is a standby."""
        return self._election.status().term

    def leads(self, term: int | None = None) -> bool:
        """Return True while this process surely leads, in `term` if that is given."""
        status = self._election.status()
        if self._resigned or (term is not None and term != status.term):
            return False
        return status.term != 0 and self._clock() < status.valid_until_s

    async def run(self) -> None:
        """Take part in the election until cancelled; then give up the lead at once."""
        try:
            while True:
                self._step(ElectionTick())
                await self._wait()
        finally:
            await self._resign()

    def _step(self, event: Event) -> None:
        for action in self._election.step(event, self._clock()):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Lead(term):
                fenced = FencedStore(
                    self._store,
                    term,
                    partial(self.leads, term),
                    lambda: self._step(WriteRefused(term)),
                )
                self._on_event("scheduler_leads", term=term)
                self._term = asyncio.create_task(self._lead(term, fenced, self._term))
            case StepDown(reason):
                self._on_event("scheduler_steps_down", reason=reason)
                if self._term is not None:
                    self._term.cancel()
            case GiveUpLease(lease):
                self._give_up(lease)
            case _:
                self._call = asyncio.create_task(self._called(action))

    async def _lead(
        self, term: int, fenced: FencedStore, before: "asyncio.Task[None] | None"
    ) -> None:
        if before is not None:
            await asyncio.wait((before,))
        try:
            await self._work(fenced)
        except UnavailableError as error:
            self._step(TermFailed(term, str(error)))
        except LeadershipLostError:
            # The process was suspended: a write failed before the expiry was noticed here.
            self._step(WriteRefused(term))

    async def _called(self, action: Look | AskLease | Campaign | KeepLease) -> Event:
        begun_s = self._clock()
        try:
            match action:
                case Look():
                    return Seen(await self._store.get(LEADER))
                case AskLease(ttl_s):
                    return LeaseGiven(await self._store.grant_lease(ttl_s), begun_s)
                case Campaign(lease):
                    value = self._me.value()
                    swap = self._store.compare_and_swap(LEADER, ABSENT, value, lease)
                    return CampaignEnded(await swap)
                case KeepLease(lease):
                    return LeaseKept(await self._store.keep_lease(lease), begun_s)
        except (UnavailableError, RefusedError):
            return CallFailed()

    async def _wait(self) -> None:
        """Wait until a tick is due, a call is answered, or a term's work has ended."""
        running = {task for task in (self._call, self._term) if task is not None}
        if running:
            await asyncio.wait(running, timeout=self._tick_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(self._tick_s)
        if self._term is not None and self._term.done():
            term, self._term = self._term, None
            if not term.cancelled():
                term.result()
        if self._call is not None and self._call.done():
            call, self._call = self._call, None
            self._step(call.result())

    def _give_up(self, lease: int) -> None:
        task = asyncio.create_task(self._end(lease))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _end(self, lease: int) -> None:
        with suppress(UnavailableError, RefusedError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_S):
                await self._store.revoke_lease(lease)

    async def _resign(self) -> None:
        # From now on another may lead at any moment, whatever of this term is still under way.
        self._resigned = True
        for task in (self._call, self._term):
            if task is not None:
                task.cancel()
        await asyncio.gather(
            *(task for task in (self._call, self._term) if task), return_exceptions=True
        )
        if lease := self._election.status().lease:
            await self._end(lease)
        await asyncio.gather(*self._ends, return_exceptions=True)
