"""Simulated store: the contract of `rose.store.protocol` as a process of the simulation.

    client ── request ──► store        lost, late or double as the network likes
    client ◄── answer ──               a lost answer leaves open whether a write was done

It keeps its entries across crashes, as one that syncs does. Its leases run by its own clock and
start anew when it does, so that one may live longer than its holder believes, and never shorter.
History can be compacted: a watch that asks for what is gone is told so, and has to list again.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from rose.errors import UnavailableError
from rose.store import Delete, Expect, LeaseGoneError, Listing, Put, StoreChange, StoreEntry, Write
from rose.store.protocol import TxnStore, difference, note
from rose.store.wrappers import LEADER
from tests.chaos.simulated_grpc import LoopProcess
from tests.chaos.simulation import SKIPPED, SimulatedProcess, Simulation

STORE = "store"
ANSWER_S = 0.5
LEASE_TICK_S = 0.2
# Delay of a watch on a file; etcd pushes.
LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Txn:
    """Do the writes at once if all is as expected. `term`: of a leader, which the store ignores."""

    expect: tuple[Expect, ...]
    writes: tuple[Put | Delete, ...]
    term: int = 0


@dataclass(frozen=True, slots=True)
class Get:
    """Read a key."""

    key: str


@dataclass(frozen=True, slots=True)
class List:
    """List a prefix."""

    prefix: str


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Make a lease."""

    ttl_s: float


@dataclass(frozen=True, slots=True)
class KeepLease:
    """Let a lease live for another TTL."""

    lease: int


@dataclass(frozen=True, slots=True)
class RevokeLease:
    """End a lease now."""

    lease: int


@dataclass(frozen=True, slots=True)
class ChangesSince:
    """All changes of a prefix after a revision, as a watch sees them."""

    prefix: str
    revision: int


COMPACTED = "compacted"
LEASE_GONE = "lease gone"
Request = Txn | Get | RevokeLease | List | GrantLease | KeepLease | ChangesSince


@dataclass(frozen=True, slots=True)
class Ask:
    """A request with its number."""

    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a transaction; `value` is None if it was not done."""

    number: int
    value: object


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    until_s: float
    keys: set[str] = field(default_factory=set)


class SimulatedStore(SimulatedProcess):
    """The store. `before_write(sender, txn)` is called for each transaction that will be done."""

    def __init__(
        self, world: Simulation, before_write: Callable[[str, Txn], None] = lambda *_: None
    ) -> None:
        super().__init__(world, STORE)
        self.revision = 0
        self.entries: dict[str, StoreEntry] = {}
        self._history: list[StoreChange] = []
        self._compacted = 0
        self._leases: dict[int, _Lease] = {}
        self._numbers = itertools.count(1)
        self._before_write = before_write

    def started(self) -> None:
        for lease in self._leases.values():
            lease.until_s = self.now_s() + lease.ttl_s
        self.every(LEASE_TICK_S, self._expire)

    def heard(self, sender: str, message: object) -> None:
        if isinstance(message, Ask):
            self.send(sender, Answer(message.number, self._answer(sender, message.request)))

    def compact(self) -> None:
        """Forget all history up to now."""
        self._compacted = self.revision
        self._history.clear()

    def listing(self, prefix: str) -> Listing:
        """Return the answer to a list now."""
        found = sorted(key for key in self.entries if key.startswith(prefix))
        return Listing(prefix, tuple(self.entries[key] for key in found), self.revision)

    def _answer(self, sender: str, request: Request) -> object:
        match request:
            case Txn():
                return self._txn(sender, request)
            case Get():
                return self.entries.get(request.key)
            case RevokeLease():
                self._end(request.lease)
                return None
            case List():
                return self.listing(request.prefix)
            case GrantLease():
                number = next(self._numbers)
                self._leases[number] = _Lease(request.ttl_s, self.now_s() + request.ttl_s)
                return number
            case KeepLease():
                lease = self._leases.get(request.lease)
                if lease is None:
                    return 0.0
                lease.until_s = self.now_s() + lease.ttl_s
                return lease.ttl_s
            case ChangesSince():
                if request.revision < self._compacted:
                    return COMPACTED
                return tuple(
                    change
                    for change in self._history
                    if change.revision > request.revision and change.key.startswith(request.prefix)
                ), self.revision

    def _txn(self, sender: str, txn: Txn) -> int | str | None:
        for each in txn.expect:
            entry = self.entries.get(each.key)
            if (entry.revision if entry else 0) != each.revision:
                return None
        for write in txn.writes:
            if isinstance(write, Put) and write.lease and write.lease not in self._leases:
                return LEASE_GONE
        self._before_write(sender, txn)
        self._write(txn.writes)
        return self.revision

    def _write(self, writes: Sequence[Put | Delete]) -> None:
        self.revision += 1
        for write in writes:
            for lease in self._leases.values():
                lease.keys.discard(write.key)
            if isinstance(write, Delete):
                if self.entries.pop(write.key, None):
                    self._history.append(StoreChange(write.key, None, self.revision))
                continue
            self.entries[write.key] = StoreEntry(write.key, write.value, self.revision)
            self._history.append(StoreChange(write.key, write.value, self.revision))
            if write.lease:
                self._leases[write.lease].keys.add(write.key)

    def _expire(self) -> None:
        for number, lease in list(self._leases.items()):
            if self.now_s() >= lease.until_s:
                self._end(number)

    def _end(self, number: int) -> None:
        lease = self._leases.pop(number, None)
        if lease is not None and lease.keys:
            self._write([Delete(key) for key in sorted(lease.keys)])


class StoreClient:
    """One process's calls of the store. An answer that does not come is None after `ANSWER_S`."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._open: dict[int, Callable[[object, bool], None]] = {}

    def ask(self, request: Request, then: Callable[[object, bool], None]) -> None:
        """Call `then(value, known)` once; `known` False when no answer came."""
        number = (self._process.life << 32) | next(self._numbers)
        self._open[number] = then
        self._process.send(STORE, Ask(number, request))
        self._process.after(ANSWER_S, lambda: self._over(number, None, known=False))

    def heard(self, answer: Answer) -> None:
        """The store answered; what nobody waits for any more is dropped."""
        self._over(answer.number, answer.value, known=True)

    def _over(self, number: int, value: object, *, known: bool) -> object:
        then = self._open.pop(number, None)
        return SKIPPED if then is None else then(value, known)


class StoreStub(TxnStore):
    """The store as the product's coroutines see it: the contract of `rose.store.protocol`."""

    def __init__(self, process: LoopProcess, bugs: frozenset[str]) -> None:
        self._process = process
        self._client = StoreClient(process)
        self._bugs = bugs

    def heard(self, answer: Answer) -> None:
        """The store answered."""
        self._client.heard(answer)

    async def get(self, key: str) -> StoreEntry | None:
        return await self._ask(Get(key))

    async def list(self, prefix: str) -> Listing:
        listing: Listing = await self._ask(List(prefix))
        return listing

    @override
    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        term = next((each.revision for each in expect if each.key == LEADER), 0)
        if "no fencing" in self._bugs and term:
            expect = ()
        done = await self._ask(Txn(tuple(expect), tuple(writes), term))
        if done == LEASE_GONE:
            raise LeaseGoneError("the lease is over")
        return done

    async def watch(self, since: Listing) -> AsyncGenerator[StoreChange, None]:
        known, seen = {entry.key: entry.revision for entry in since.entries}, since.revision
        while True:
            changes: Sequence[StoreChange] = ()
            with suppress(UnavailableError):
                news = await self._ask(ChangesSince(since.prefix, seen))
                if news == COMPACTED and "a lost re-list after compaction" in self._bugs:
                    seen = (await self.list(since.prefix)).revision
                elif news == COMPACTED:
                    listing = await self.list(since.prefix)
                    changes, seen = difference(known, listing), listing.revision
                else:
                    changes, seen = news
            for change in changes:
                note(known, change)
                yield change
            await asyncio.sleep(LOOK_S)

    async def grant_lease(self, ttl_s: float) -> int:
        return int(await self._ask(GrantLease(ttl_s)))

    async def keep_lease(self, lease: int) -> float:
        return float(await self._ask(KeepLease(lease)))

    async def revoke_lease(self, lease: int) -> None:
        await self._ask(RevokeLease(lease))

    async def close(self) -> None:
        """Nothing to let go of."""

    async def _ask(self, request: Request) -> Any:
        answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def settle(value: object, known: bool) -> None:
            if answered.done():
                return
            if known:
                answered.set_result(value)
            else:
                answered.set_exception(UnavailableError("the store does not answer"))

        run = self._process.loop.run
        self._client.ask(request, lambda value, known: run(lambda: settle(value, known)))
        return await answered
