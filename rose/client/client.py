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
from rose.contract.gateway import (
    FINISH_SESSION,
    SESSION_HEADER,
    NamesBody,
    SessionTrajectory,
    Versions,
)
from rose.contract.replica import Sampling

FINISH_SESSION_S = 5.0
_log = logging.getLogger(__name__)


class RolloutClient:
    """Asynchronous client of ROSE's gateways, for turns whole or streamed, groups and sessions.

    Use the client as an async context manager. Its one connection pool serves any number of turns
    of one event loop, and the client pickles as its arguments. Give every gateway's address: when a
    gateway dies, its turns continue at another one, or at the same one once it is back.
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
        """Create the client, without connecting. Raises ConfigError for an invalid address.

        timeout_s: bound on one turn with all its tries. credentials: shown to the gateways. job:
        the training run that the turns belong to; it may be left out if the gateways know only one.
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
        """Return a new client with the arguments in `settings`."""
        urls, timeout_s, job = settings.urls, settings.timeout_s, settings.job
        credentials = settings.credentials
        return cls(urls, timeout_s, retry=settings.retry, credentials=credentials, job=job)

    @property
    def settings(self) -> ClientSettings:
        """Settings of the client: addresses, timeouts, retry, credentials, job."""
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
        """Generate one turn and return it whole.

        All tries carry the same request id, so the turn is delivered once. Raises an error of
        `rose.client.errors`; all of them are RolloutError.
        """
        ask = ask_for(token_ids, sampling, **self._named(options))
        return await self._run(ask, self._open().whole)

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> TurnStream:
        """Return one turn as a stream of token chunks; entering the stream sends the request.

        When a gateway dies, the received tokens are kept and the turn continues from them.
        """
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
        """Return a Group that yields `members` samples of one prompt as they finish.

        After `need` whole turns (default: all) the others are cancelled. Member k has the request
        id and session id `GROUP/k`, and a seed in `sampling` becomes seed + k. `hedges`: number of
        second copies that the slowest members may have together; the first answer counts, which
        favours short answers a little. Raises RequestRefused for numbers that contradict each
        other.
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
        """Return a session for the turns of one trajectory, which share a prefix.

        They go to the replica that has it. Leaving the session's block reports the end to the
        gateways. session_id: default a random one. group_id: common to all trajectories that begin
        with the same prompt.
        """
        return Session(self, session_id or uuid.uuid4().hex, self._finish_session, group_id)

    def cancel(self, request_id: str) -> bool:
        """Cancel the running turn with this request id, whose caller gets TurnCancelled.

        Returns False for an id that is not running.
        """
        row = self._ledger.running.get(request_id)
        if row is not None:
            row.cancel()
        return row is not None

    async def versions(self, job: str = "") -> Versions:
        """Return the policy version that each replica serves, and the newest of each job.

        job: the one to report, by default the client's; "" means all, and an unregistered job has
        none. A trainer that waits until k replicas serve version v calls this repeatedly. Raises
        GatewayUnavailable, RequestRefused, AnswerBroken.
        """
        return await self._open().versions(job or self._settings.job)

    async def trajectories(self, session_id: str, job: str = "") -> tuple[SessionTrajectory, ...]:
        """Return the chat turns that the gateways keep of a session, as sequences of tokens with
        loss masks; empty for an unknown session.

        job: of the session, by default the client's. Call it before the session is finished. Raises
        GatewayUnavailable, RequestRefused, AnswerBroken.
        """
        return await self._open().trajectories(session_id, job or self._settings.job)

    def progress(self) -> Progress:
        """Return the running turns and the counts of ended ones since the client was created."""
        running = self._ledger.running
        return self._ledger.snapshot(asyncio.get_running_loop().time() if running else 0.0)

    def _named(self, options: TurnOptions) -> TurnOptions:
        return {**options, "job": options.get("job") or self._settings.job}

    def _open(self) -> Tries:
        if self._http is None:
            raise ClientClosed("use `async with RolloutClient(...)`: it is not open now")
        return self._tries

    async def _run(self, ask: ClientTurn, work: Callable[[RunningTurn], Awaitable[Turn]]) -> Turn:
        """Run `work` for a turn in a task of its own, enter the turn in the ledger, and return it.

        Raises TurnTimedOut after `timeout_s`, TurnCancelled after `cancel`, and RequestRefused for
        a request id that is running already.
        """
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
        """Report the end of a session to every gateway, once each; log a failure."""
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
