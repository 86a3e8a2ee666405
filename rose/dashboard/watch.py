"""Watch of a scheduler process: takes snapshots, keeps history, renders pages and messages.

    each second while a page is watched, else every two ──► look, on the loop ──► sample, beside it
    a change of what may be lent ──► a look at once
    look ──► each viewer: what of its page changed since it was told last

A viewer that is slow skips what it missed, so nothing queues up for it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from elastic_scheduler.capacity.budget_hold import BudgetLeft
from rose.dashboard.advisor import Advisor
from rose.dashboard.history import SAMPLE_S, History
from rose.dashboard.journal import Journal
from rose.dashboard.model import Model, Moment
from rose.dashboard.page import Cell, Page, message_of
from rose.dashboard.pages import page_at, series_at
from rose.dashboard.past import RANGES, Past, PastReader
from rose.scheduler.service import AuditSink, SchedulerService

WATCHED_S: Final = 1.0
# After an act others may follow at once.
LEAST_S: Final = 0.1
# SLO budgets are over 30 days, and cost a walk over all hosts.
BUDGETS_EVERY_S: Final = 30.0
MOST_VIEWERS: Final = 32
# Pages that are being made; others are told to come again.
MOST_ASKED: Final = 32
MOST_PAGES: Final = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeaderInfo:
    """Addresses of the leading scheduler ("" while unknown) and of this process (`me`)."""

    leader: str
    me: str


class BusyError(Exception):
    """Error of a request for a page when too many pages are made or watched already."""


class Watch:
    """State of a process's dashboard: takes snapshots, keeps history, makes pages and messages.

    Use it on the event loop of the service; pages are made in one thread beside it.
    """

    def __init__(
        self,
        service: Callable[[], SchedulerService | None],
        standing: Callable[[], LeaderInfo],
        cluster: str = "",
        clock_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
        prometheus: str = "",
    ) -> None:
        """Raise ConfigError if `prometheus` is no address; "" for none."""
        self._service, self._standing = service, standing
        self._journal = Journal()
        self._cluster = cluster
        self._clock_s, self._wall_s = clock_s, wall_s
        self._since_s = wall_s()
        self._history = History()
        self._served: SchedulerService | None = None
        self._model: Model | None = None
        self._made_s = 0.0
        self._budget_left: Mapping[str, BudgetLeft] = {}
        self._budgeted_s: float | None = None
        # Pages of one snapshot, by address, which readers of one page share.
        self._paged: Model | None = None
        self._pages: dict[tuple[object, ...], Page | None] = {}
        self._news = asyncio.Condition()
        self._poked = asyncio.Event()
        self._looking = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "rose-dashboard")
        self._past = PastReader(prometheus, cluster) if prometheus else None
        # A Prometheus that is slow keeps no page without history waiting.
        self._asking = ThreadPoolExecutor(1, "rose-dashboard-history")
        self._viewers = self._asked = 0
        self._advisor = Advisor(prometheus, self.poke)

    @property
    def viewers(self) -> int:
        """Number of pages that are watched now."""
        return self._viewers

    def poke(self) -> None:
        """Ask, on the event loop, for a snapshot at once: something to show changed."""
        self._poked.set()

    def telling(self, sink: AuditSink) -> AuditSink:
        """Return an audit sink that feeds the given sink and the dashboard's journal.

        Call the returned function on the event loop.
        """

        def tell(event: str, fields: dict[str, object], by: str) -> None:
            sink(event, fields, by)
            if self._journal.heard(event, fields, by, self._wall_s()):
                self.poke()

        return tell

    async def run(self) -> None:
        """Take a snapshot each second while a page is watched, else every two, until cancelled."""
        while True:
            await self.look()
            period_s = WATCHED_S if self._viewers else SAMPLE_S
            try:
                async with asyncio.timeout(period_s):
                    await self._poked.wait()
                await asyncio.sleep(LEAST_S)
            except TimeoutError:
                pass
            self._poked.clear()

    async def look(self) -> None:
        """Take a snapshot of the service, add it to the history, and wake all viewers."""
        async with self._looking:
            now_s = self._clock_s()
            look, service = self._taken(now_s), self._service()
            if service is not self._served:
                # A new term begins with an empty history.
                self._served, self._history = service, History()
            history = self._history
            observed = look.observed
            if observed is not None:
                await self._beside(lambda: history.take(observed, now_s, look.at_s))
            self._model, self._made_s = Model(look, history), now_s
        async with self._news:
            self._news.notify_all()

    def close(self) -> None:
        """Stop the thread that makes pages."""
        self._advisor.close()
        for each in (self._thread, self._asking):
            each.shutdown(wait=False, cancel_futures=True)

    async def page(self, path: str, query: Mapping[str, str]) -> str | None:
        """Return the HTML of an address, None if there is no such page. Raises BusyError."""
        model = await self._fresh()
        await self._advise(model, path)
        past = await self._past_of(model, path, query)
        page = await self._bounded(partial(self._page, model, path, query, past))
        return None if page is None else page.html

    async def series(self, query: Mapping[str, str]) -> dict[str, object] | None:
        """Return the points of the charts of the fleet or a node, None for an unknown node.

        Raises BusyError.
        """
        model = await self._fresh()
        past = await self._past_of(model, "/series", query)
        return await self._bounded(lambda: series_at(model, query, past))

    async def messages(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes]:
        """Yield a server-sent message with the changed cells of an address after each snapshot.

        It never ends until closed, unless there is no such page. Raises BusyError for more than 32
        viewers.
        """
        if self._viewers >= MOST_VIEWERS:
            raise BusyError(f"{MOST_VIEWERS} pages are watched; close one")
        self._viewers += 1
        before: Mapping[str, Cell] = {}
        shown: Model | None = None
        try:
            await self._fresh()
            while True:
                async with self._news:
                    while self._model is shown:
                        await self._news.wait()
                shown = self._known()
                await self._advise(shown, path)
                past = await self._past_of(shown, path, query)
                update = await self._beside(partial(self._update, shown, path, query, past, before))
                if update is None:
                    return
                message, before = update
                yield message
        finally:
            self._viewers -= 1

    # ---- inside ----

    def _taken(self, now_s: float) -> Moment:
        service, standing = self._service(), self._standing()
        at_s = self._wall_s()
        due = self._budgeted_s is None or now_s >= self._budgeted_s + BUDGETS_EVERY_S
        seen = None if service is None else service.observed(budgets=due and self._viewers > 0)
        if seen is not None and seen.budget_left is not None:
            self._budget_left, self._budgeted_s = seen.budget_left, now_s
        return Moment(
            observed=seen,
            journal=self._journal.read(at_s),
            at_s=at_s,
            leader=standing.leader,
            me=standing.me,
            since_s=self._since_s,
            troubles=tuple(service.troubles()) if service is not None else (),
            advised=self._advisor.newest,
            budget_left=self._budget_left if seen is not None else {},
        )

    async def _advise(self, model: Model, path: str) -> None:
        """Compute advice for the first page while nothing is lent, unless it is new."""
        leads = model.look.observed is not None
        if path == "/" and leads and not model.seen.acts and self._advisor.due(self._wall_s()):
            usages = await self._beside(model.history.usages)
            self._advisor.ask(usages, model.targets_s, self._wall_s())

    async def _past_of(self, model: Model, path: str, query: Mapping[str, str]) -> Past | None:
        """Return the lines of the range that an address names, None without one.

        Raises BusyError.
        """
        names = {"/": "", "/node": query.get("name"), "/series": query.get("node", "")}
        node, span = names.get(path), query.get("range", "")
        if self._past is None or span not in RANGES or node is None:
            return None
        if node and model.node(node) is None:
            return None
        read = partial(self._past.read, node, span, self._wall_s())
        return await self._bounded(read, self._asking)

    def _update(
        self,
        model: Model,
        path: str,
        query: Mapping[str, str],
        past: Past | None,
        before: Mapping[str, Cell],
    ) -> tuple[bytes, Mapping[str, Cell]] | None:
        """Return a message for a viewer and its cells afterwards; None if there is no such page."""
        page = self._page(model, path, query, past)
        return None if page is None else (message_of(page, before, model.look.at_s), page.cells)

    def _known(self) -> Model:
        assert self._model is not None
        return self._model

    async def _fresh(self) -> Model:
        """Return the newest model, after taking a snapshot if it is older than a second."""
        if self._model is None or self._clock_s() > self._made_s + WATCHED_S:
            await self.look()
        return self._known()

    def _page(
        self, model: Model, path: str, query: Mapping[str, str], past: Past | None
    ) -> Page | None:
        """Return the page of an address, None if there is none, cached until the next snapshot."""
        if self._paged is not model:
            self._paged, self._pages = model, {}
        key = path, *sorted(query.items())
        if key in self._pages:
            return self._pages[key]
        ranges = () if self._past is None else tuple(RANGES)
        page = page_at(model, path, query, self._cluster, past, ranges)
        # Readers can make up addresses without end: beyond the first ones pages are not kept.
        if len(self._pages) < MOST_PAGES:
            self._pages[key] = page
        return page

    async def _bounded(self, make: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> T:
        if self._asked >= MOST_ASKED:
            raise BusyError(f"{MOST_ASKED} pages are being made; ask again")
        self._asked += 1
        try:
            return await self._beside(make, thread)
        finally:
            self._asked -= 1

    async def _beside(self, make: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread or self._thread, make)
