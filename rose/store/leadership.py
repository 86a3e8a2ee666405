"""Leadership: the shell of the election. It calls the store, and runs the work of a term.

The store is called beside the clock: a store that hangs does not keep a leader from stepping down.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from rose.clock import boot_clock_s
from rose.errors import RefusedError, UnavailableError
from rose.store.election import (
    LEADER,
    Action,
    AskLease,
    CallFailed,
    Campaign,
    CampaignEnded,
    Candidate,
    Election,
    ElectionTick,
    Event,
    GiveUpLease,
    KeepLease,
    Lead,
    LeaseGiven,
    LeaseKept,
    Look,
    Seen,
    StepDown,
    TermFailed,
    WriteRefused,
)
from rose.store.protocol import ABSENT, Store
from rose.store.wrappers import FencedStore, LeadershipLostError

TICK_S = 0.05
GIVE_UP_S = 1.0

Work = Callable[[FencedStore], Awaitable[None]]


class Leadership:
    """One process's part in the election.

    work: what a leader does; it is started with the term's store and cancelled when the term ends.
    One that raises `UnavailableError` gives the term up, `LeadershipLostError` finds it over;
    anything else that it raises ends `run`.
    on_event(event, **fields): takes `scheduler_leads`, `scheduler_steps_down`.
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
        """The leader's address, "" while nobody is known to lead."""
        return self._election.status().address

    @property
    def term(self) -> int:
        """The term in which this process leads, 0 while it stands by."""
        return self._election.status().term

    def leads(self, term: int | None = None) -> bool:
        """Return True while this process leads for certain, in the given term if there is one."""
        status = self._election.status()
        if self._resigned or (term is not None and term != status.term):
            return False
        return status.term != 0 and self._clock() < status.valid_until_s

    async def run(self) -> None:
        """Take part until cancelled; then the lead is given up at once."""
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
