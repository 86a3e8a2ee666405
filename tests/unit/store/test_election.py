"""The election: one leads, a leader steps down before its lease can be over, late writes fail."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import pytest

from rose.errors import UnavailableError
from rose.store import (
    Expect,
    FencedStore,
    Leadership,
    LeadershipLostError,
    Put,
    StoreEntry,
    Write,
)
from rose.store.election import (
    LEADER,
    AskLease,
    CallFailed,
    Campaign,
    CampaignEnded,
    Candidate,
    Election,
    ElectionRole,
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
    WriteRefused,
    address_of,
)
from tests.fakes.memory_store import InMemoryStore
from tests.harness.waiting import PATIENCE_S, until_async

ME = Candidate("h:1", "x")


def stepped(*events: Event, at_s: float = 100.0) -> Election:
    """Return an election after a tick and these events, all at one time."""
    election = Election(ME, ttl_s=2.0)
    for event in (ElectionTick(), *events):
        election.step(event, at_s)
    return election


def elected() -> Election:
    return stepped(Seen(None), LeaseGiven(7, 100.0), CampaignEnded(41))


def test_one_that_finds_no_leader_campaigns_and_leads_under_the_revision_of_its_key() -> None:
    election = Election(ME, ttl_s=2.0)
    events = (ElectionTick(), Seen(None), LeaseGiven(7, 100.0), CampaignEnded(41))
    actions = [election.step(event, 100.0) for event in events]
    assert actions == [[Look()], [AskLease(2.0)], [Campaign(7)], [Lead(41)]]
    status = election.status()
    assert (status.role, status.address, status.term) == (ElectionRole.LEADER, "h:1", 41)
    assert status.valid_until_s == pytest.approx(101.8)


def test_one_that_finds_a_leader_follows_it_and_looks_again() -> None:
    election = stepped(Seen(StoreEntry(LEADER, Candidate("o:2", "y").value(), 3)))
    assert election.status().address == "o:2"
    assert election.step(ElectionTick(), 100.1) == []
    assert election.step(ElectionTick(), 100.2) == [Look()]


@pytest.mark.parametrize(
    ("term", "at_s"),
    [(None, 100.0), (41, 101.8)],
    ids=["lost", "answered too late"],
)
def test_a_campaign_that_is_not_won_gives_its_lease_up(term: int | None, at_s: float) -> None:
    election = stepped(Seen(None), LeaseGiven(7, 100.0))
    assert election.step(CampaignEnded(term), at_s) == [GiveUpLease(7)]
    assert election.status().role is ElectionRole.FOLLOWER


def test_a_lease_lives_from_when_it_was_asked_for_not_from_the_answer() -> None:
    election = elected()
    assert election.step(ElectionTick(), 100.5) == [KeepLease(7)]
    election.step(LeaseKept(2.0, 100.5), 101.4)
    assert election.status().valid_until_s == pytest.approx(102.3)


def test_a_leader_steps_down_by_its_own_clock_while_a_call_hangs() -> None:
    election = elected()
    assert election.step(ElectionTick(), 100.5) == [KeepLease(7)]
    assert election.step(ElectionTick(), 101.79) == []
    assert election.step(ElectionTick(), 101.8) == [
        StepDown("its lease could not be renewed"),
        GiveUpLease(7),
    ]
    # The answer comes at last: it makes nobody a leader.
    assert election.step(LeaseKept(2.0, 101.7), 101.9) == [Look()]
    assert election.status().role is ElectionRole.FOLLOWER


def test_a_leader_that_finds_its_key_of_a_term_that_is_over_gives_that_lease_up_again() -> None:
    """An outage of the store may keep it from being given up."""
    election = elected()
    election.step(ElectionTick(), 101.8)
    assert election.step(CallFailed(), 102.0) == []
    assert election.step(ElectionTick(), 102.1) == [Look()]
    assert election.step(Seen(StoreEntry(LEADER, ME.value(), 41)), 102.2) == [GiveUpLease(7)]
    assert election.step(ElectionTick(), 102.3) == [Look()]
    assert election.step(Seen(None), 102.3) == [AskLease(2.0)]


def test_a_leader_tries_again_after_a_failed_renewal() -> None:
    election = elected()
    election.step(ElectionTick(), 100.5)
    assert election.step(CallFailed(), 100.6) == []
    assert election.step(ElectionTick(), 100.7) == [KeepLease(7)]


@pytest.mark.parametrize("event", [LeaseKept(0.0, 100.5), WriteRefused(41)])
def test_a_leader_whose_lease_or_write_is_refused_steps_down_at_once(event: Event) -> None:
    election = elected()
    election.step(ElectionTick(), 100.5)
    actions = election.step(event, 100.5)
    assert isinstance(actions[0], StepDown)
    assert actions[1] == GiveUpLease(7)


def test_a_refused_write_of_an_older_term_changes_nothing() -> None:
    election = elected()
    assert election.step(WriteRefused(40), 100.1) == []
    assert election.status().role is ElectionRole.LEADER


def test_an_unreadable_leader_is_an_unknown_address() -> None:
    for value in (b"", b"\xff", b"[]", b'{"address": 3}', b"{}"):
        assert address_of(StoreEntry(LEADER, value, 1)) == ""


# ---- with a store ----


class Contender:
    """A process that takes part; `terms` are the stores that it was given to lead with."""

    def __init__(self, store: InMemoryStore, address: str, clock: Callable[[], float]) -> None:
        self.terms: list[FencedStore] = []
        self.leads = asyncio.Event()
        self.events: list[str] = []
        self.leadership = Leadership(
            store, address, self._work, lambda event, **_: self.events.append(event), clock
        )
        self.task = asyncio.create_task(self.leadership.run())

    async def _work(self, store: FencedStore) -> None:
        self.terms.append(store)
        self.leads.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.leads.clear()

    async def until(self, leads: bool) -> None:
        await until_async(lambda: self.leads.is_set() == leads, PATIENCE_S, f"leads: {leads}")

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


class Hanging(InMemoryStore):
    """A store that stops answering."""

    hangs = False

    async def keep_lease(self, lease: int) -> float:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().keep_lease(lease)

    async def revoke_lease(self, lease: int) -> None:
        if self.hangs:
            raise UnavailableError("it does not answer")
        await super().revoke_lease(lease)


async def test_a_leader_that_stops_is_followed_at_once_by_another() -> None:
    loop, store = asyncio.get_running_loop(), InMemoryStore()
    one = Contender(store, "one:1", loop.time)
    await one.until(leads=True)
    other = Contender(store, "other:1", loop.time)
    await until_async(lambda: other.leadership.address == "one:1", PATIENCE_S, "it follows")
    assert not other.leads.is_set()
    await one.stop()
    assert not one.leadership.leads()
    assert not one.terms[0].leads(), "what of its term is still under way does nothing more"
    await other.until(leads=True)
    assert other.leadership.address == "other:1"
    await other.stop()
    assert await store.get(LEADER) is None


async def test_work_that_finds_its_term_over_ends_the_term_and_not_the_process() -> None:
    loop, store = asyncio.get_running_loop(), InMemoryStore()
    terms: list[FencedStore] = []
    again = asyncio.Event()

    async def work(fenced: FencedStore) -> None:
        terms.append(fenced)
        if len(terms) == 1:
            raise LeadershipLostError("this process stood still")
        again.set()
        await asyncio.Event().wait()

    events: list[str] = []
    leadership = Leadership(
        store, "one:1", work, lambda event, **_: events.append(event), loop.time
    )
    running = asyncio.create_task(leadership.run())
    async with asyncio.timeout(PATIENCE_S):
        await again.wait()
    assert events == ["scheduler_leads", "scheduler_steps_down", "scheduler_leads"]
    assert leadership.leads()
    assert [term.leads() for term in terms] == [False, True]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_leader_cut_off_from_its_store_is_down_before_another_is_up() -> None:
    loop = asyncio.get_running_loop()
    store = Hanging(loop.time)
    one = Contender(store, "one:1", loop.time)
    await one.until(leads=True)
    other = Contender(store, "other:1", loop.time)
    store.hangs = True
    await one.until(leads=False)
    assert not other.leads.is_set()
    store.hangs = False
    await asyncio.wait(
        [asyncio.create_task(each.leads.wait()) for each in (one, other)],
        return_when=asyncio.FIRST_COMPLETED,
    )
    assert one.leads.is_set() != other.leads.is_set()
    await one.stop()
    await other.stop()


async def test_writes_of_a_term_that_is_over_fail_and_end_the_lead() -> None:
    store, lost = InMemoryStore(), asyncio.Event()
    term = await store.put(LEADER, ME.value())
    fenced = FencedStore(store, term, lambda: True, lost.set)
    first = await fenced.put("epochs/g0", b"1")
    assert await fenced.compare_and_swap("epochs/g0", first + 7, b"2") is None
    assert not lost.is_set(), "an expectation of the caller's that does not hold is no lost lead"
    newer = await store.put(LEADER, Candidate("o:2", "y").value())
    with pytest.raises(LeadershipLostError):
        await fenced.put("epochs/g0", b"3")
    assert lost.is_set()
    after = FencedStore(store, newer, lambda: True, lost.set)
    assert await after.compare_and_swap("epochs/g0", first, b"2") is not None


async def test_a_leader_that_is_not_sure_any_more_writes_nothing() -> None:
    store = InMemoryStore()
    term = await store.put(LEADER, ME.value())
    fenced = FencedStore(store, term, lambda: False, lambda: None)
    with pytest.raises(LeadershipLostError):
        await fenced.put("a", b"1")
    assert await store.get("a") is None


class Forgetful(InMemoryStore):
    """A store whose answers are lost: after the write was done, or before it."""

    lose = ""
    late: tuple[Sequence[Expect], Sequence[Write]] | None = None

    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        lose, self.lose = self.lose, ""
        if lose == "before":
            self.late = (expect, writes)
            raise UnavailableError("lost")
        done = await super().txn(expect, writes)
        if lose == "after":
            raise UnavailableError("lost")
        return done

    async def deliver_late(self) -> int | None:
        assert self.late is not None
        return await super().txn(*self.late)


@pytest.mark.parametrize("lose", ["before", "after"])
async def test_a_write_given_up_unanswered_is_never_done_after_a_later_one(lose: str) -> None:
    store = Forgetful()
    term = await store.put(LEADER, ME.value())
    fenced = FencedStore(store, term, lambda: True, lambda: None)
    store.lose = lose
    with pytest.raises(UnavailableError):
        await fenced.txn((), [Put("stop", b"old")])
    await fenced.put("stop", b"new")
    if lose == "before":
        assert await store.deliver_late() is None
    entry = await store.get("stop")
    assert entry is not None
    assert entry.value == b"new"
