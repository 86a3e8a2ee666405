"""Turns from one or several gateways: `POST /inference/v1/generate`, whole or streamed."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, Unpack

import aiohttp
from msgspec import structs

from rose.client import wire
from rose.client.credentials import NOTHING_SHOWN, GatewayCredentials
from rose.client.errors import ClientClosed, RequestRefused, TurnCancelled, TurnTimedOut
from rose.client.retry import GatewayMonitor, GatewayRing, Tries
from rose.client.session import Group, Session
from rose.client.stream import ChunkSink, Ledger, Progress, RunningTurn, TurnStream
from rose.client.types import (
    ClientSettings,
    ClientTurn,
    GroupOptions,
    Retry,
    Turn,
    TurnOptions,
    ask_for,
    gateway_urls,
)
from rose.contract.gateway import FINISH_SESSION, SESSION_HEADER, NamesBody, Versions
from rose.contract.replica import Sampling

FINISH_SESSION_S = 5.0
_log = logging.getLogger(__name__)


class RolloutClient:
    """Async context manager; one connection pool, safe for any number of turns of one event loop.

    It pickles as its arguments. Give every gateway's address: when one dies, its turns continue at
    another, or at the same one once it is back.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        timeout_s: float = 300.0,
        *,
        retry: Retry | None = None,
        credentials: GatewayCredentials = NOTHING_SHOWN,
        job: str = "",
    ) -> None:
        """timeout_s: of a turn with all its tries. Raises ConfigError for an invalid address.

        credentials: for the gateways. job: the training run of these turns; it may be left out if
        there is only one.
        """
        self._settings = ClientSettings(
            gateway_urls(urls), timeout_s, retry=retry or Retry(), credentials=credentials, job=job
        )
        self._ledger = Ledger()
        self._http: aiohttp.ClientSession | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).of, (self._settings,)

    @classmethod
    def of(cls, settings: ClientSettings) -> Self:
        """Return a client with these settings."""
        urls, timeout_s, job = settings.urls, settings.timeout_s, settings.job
        credentials = settings.credentials
        return cls(urls, timeout_s, retry=settings.retry, credentials=credentials, job=job)

    @property
    def settings(self) -> ClientSettings:
        """Arguments that it was built from."""
        return self._settings

    async def __aenter__(self) -> Self:
        settings = self._settings
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_s)
        self._http = settings.credentials.session(settings.urls, limit=0, timeout=timeout)
        self._monitor = GatewayMonitor(settings, self._http)
        self._ring = GatewayRing(settings.urls)
        self._tries = Tries(settings, self._http, self._ring, self._monitor)
        return self

    async def __aexit__(self, *_: object) -> None:
        for row in [*self._ledger.running.values()]:
            row.cancel()
        if self._http is not None:
            await self._monitor.close()
            await self._http.close()
            self._http = None

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Turn:
        """Generate one turn. All tries carry the same request id: it is delivered once.

        Raises an error of `rose.client.errors`; all of them are RolloutError.
        """
        ask = ask_for(token_ids, sampling, **self._named(options))
        return await self._run(ask, self._open().whole)

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> TurnStream:
        """Generate token by token; when a gateway dies, the received tokens are kept."""
        ask = ask_for(token_ids, sampling, **self._named(options))

        async def run(sink: ChunkSink) -> Turn:
            return await self._run(ask, lambda row: self._open().streamed(row, sink))

        return TurnStream(run)

    def gather_group(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        members: int,
        *,
        group_id: str = "",
        need: int | None = None,
        hedges: int = 0,
        **options: Unpack[GroupOptions],
    ) -> Group:
        """Yield `members` samples of one prompt as they finish; after `need` turns cancel the rest.

        Member k is request and session `GROUP/k`; a seed of `sampling` becomes seed + k. The
        slowest ones may have `hedges` second copies, the first answer counts: that favours short
        answers a little.
        """
        if members < 1 or not 1 <= (need or members) <= members:
            raise RequestRefused("a group has at least one member, and needs at most all of them")
        if not 0 <= hedges <= members:
            raise RequestRefused("hedges: a group has at most one copy for each of its members")
        group = group_id or uuid.uuid4().hex
        belongs: TurnOptions = {"group_id": group}
        if hedges:
            belongs |= {"group_size": members, "hedges": hedges}

        async def start(index: int) -> Turn:
            seed = None if sampling.seed is None else sampling.seed + index
            name = f"{group}/{index}"
            names: TurnOptions = {"request_id": name, "session_id": name}
            mine: TurnOptions = {**options, **belongs, **names}
            return await self.generate(token_ids, structs.replace(sampling, seed=seed), **mine)

        return Group(start, members, need or members)

    def session(self, session_id: str = "", *, group_id: str = "") -> Session:
        """Open a trajectory: its turns go where its prefix is, and gateways learn of its end.

        group_id: of the trajectories that began with the same prompt.
        """
        return Session(self, session_id or uuid.uuid4().hex, self._finish_session, group_id)

    def cancel(self, request_id: str) -> bool:
        """End a running turn: its caller gets TurnCancelled. Returns False for an unknown id."""
        row = self._ledger.running.get(request_id)
        if row is not None:
            row.cancel()
        return row is not None

    async def versions(self, job: str = "") -> Versions:
        """Return the policy version that each replica serves, and the newest of each job.

        job: restricts the answer to one, by default the client's; an unregistered job has none. A
        trainer that waits until k replicas serve version v calls this repeatedly. Raises
        GatewayUnavailable, RequestRefused, AnswerBroken.
        """
        return await self._open().versions(job or self._settings.job)

    def progress(self) -> Progress:
        """Return counts of running and ended turns since the client was made."""
        running = self._ledger.running
        return self._ledger.snapshot(asyncio.get_running_loop().time() if running else 0.0)

    def _named(self, options: TurnOptions) -> TurnOptions:
        return {**options, "job": options.get("job") or self._settings.job}

    def _open(self) -> Tries:
        if self._http is None:
            raise ClientClosed("use `async with RolloutClient(...)`: it is not open now")
        return self._tries

    async def _run(self, ask: ClientTurn, work: Callable[[RunningTurn], Awaitable[Turn]]) -> Turn:
        """Run a turn in a task of its own, so that `cancel` ends the turn, not its waiter."""
        running = self._ledger.running
        if ask.request_id in running:
            raise RequestRefused(f"{ask.request_id} is running already; give each turn its own id")
        row = RunningTurn(ask, asyncio.get_running_loop().time())
        running[ask.request_id] = row
        turn: Turn | None = None
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                row.task = task = asyncio.ensure_future(work(row))
                turn = await task
        except TimeoutError:
            raise TurnTimedOut(
                f"{ask.request_id} took more than {self._settings.timeout_s:g} s, {row.tries} tries"
            ) from None
        except asyncio.CancelledError:
            if not row.cancelled or _current_is_cancelled():
                raise
            raise TurnCancelled(f"{ask.request_id} was cancelled") from None
        finally:
            self._ledger.close(row, None if turn is None else len(turn.token_ids))
        return turn

    async def _finish_session(self, session_id: str, job: str = "") -> None:
        """Report the end to every gateway once: one that misses it forgets idle sessions."""
        if self._http is None:
            return
        job = job or self._settings.job
        body = wire.encode(NamesBody(session_id=session_id, job=job or None))
        headers = {"Content-Type": "application/json", SESSION_HEADER: session_id}
        timeout = aiohttp.ClientTimeout(total=FINISH_SESSION_S)
        for url in self._settings.urls:
            try:
                async with self._http.post(
                    f"{url}{FINISH_SESSION}", data=body, headers=headers, timeout=timeout
                ):
                    pass
            except (aiohttp.ClientError, OSError) as error:
                _log.info("%s was not told that %s is over: %s", url, session_id, error)


def _current_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
