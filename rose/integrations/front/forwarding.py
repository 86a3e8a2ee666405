"""Forwarding of all calls that are not the front's own, to the gateway and back, as they come.

Nothing is buffered: while one side is slow to read, the other side waits. A caller that hangs up
ends its turn at the gateway.
"""

import asyncio
from typing import Final

import aiohttp
from aiohttp import web
from yarl import URL

from rose.contract.gateway import JOB_HEADER
from rose.errors import UnavailableError

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE"})
CONNECT_S = 10.0
# Headers of one connection only (RFC 9110, 7.6.1), or written anew.
_OWN_HEADERS: Final = frozenset(
    {
        "connection",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


class _Passing:
    """State of one call that is being forwarded."""

    __slots__ = ("aborted", "begun", "path", "task")

    def __init__(self, path: str) -> None:
        self.path = path
        self.task: asyncio.Task[web.StreamResponse] | None = None
        self.begun = False
        self.aborted = False


class Forwarding:
    """Forwarder of HTTP calls to one gateway, in the name of `job`.

    silent_s: seconds after which an answer that stalls is given up.
    """

    def __init__(
        self, session: aiohttp.ClientSession, gateway: str, job: str, silent_s: float
    ) -> None:
        self._session = session
        self._base = gateway.rstrip("/")
        self._job = job
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_S, sock_read=silent_s
        )
        self._passing: set[_Passing] = set()

    def running(self, path: str) -> int:
        """Return the number of calls of this path that have not ended."""
        return sum(each.path == path for each in self._passing)

    def abort(self, path: str) -> int:
        """Cancel all calls of this path, which ends their turns at the gateway too; return their
        number.
        """
        ended = [each for each in self._passing if each.path == path and not each.aborted]
        for each in ended:
            each.aborted = True
            if each.task is not None:
                each.task.cancel()
        return len(ended)

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Send the front's own GET to the gateway; return status and body (at most 1 MiB).

        Raises UnavailableError.
        """
        try:
            async with self._session.get(
                f"{self._base}{path}",
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as answer:
                return answer.status, await answer.content.read(1 << 20)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(self._silent(error)) from error

    async def post(
        self, http: web.Request, path: str, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        """Send a POST to the gateway with the caller's Authorization header; return status and body
        (at most 1 MiB).

        Raises UnavailableError.
        """
        proof = {k: v for k, v in http.headers.items() if k.lower() == "authorization"}
        try:
            async with self._session.post(
                f"{self._base}{path}",
                data=body,
                headers={**proof, JOB_HEADER: self._job, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as answer:
                return answer.status, await answer.content.read(1 << 20)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(self._silent(error)) from error

    async def forward(self, http: web.Request) -> web.StreamResponse | None:
        """Forward a call to the gateway and stream its answer back; return None if `abort` ended
        the call before its answer began.

        Raises UnavailableError if the gateway does not answer, ConnectionError if the answer breaks
        off.
        """
        # Only the path of an absolute address counts: the gateway is the configured one.
        path = http.rel_url.raw_path_qs
        if http.method not in METHODS or not path.startswith("/"):
            raise web.HTTPMethodNotAllowed(http.method, METHODS)
        passing = _Passing(http.path)
        self._passing.add(passing)
        try:
            passing.task = asyncio.ensure_future(self._pass(http, path, passing))
            return await passing.task
        except asyncio.CancelledError:
            if not passing.aborted:
                raise
            if passing.begun:
                raise ConnectionResetError("the turn was aborted") from None
            return None
        finally:
            self._passing.discard(passing)

    async def _pass(self, http: web.Request, path: str, passing: _Passing) -> web.StreamResponse:
        headers = [(k, v) for k, v in http.headers.items() if k.lower() not in _OWN_HEADERS]
        headers = [(k, v) for k, v in headers if k.lower() != JOB_HEADER.lower()]
        headers.append((JOB_HEADER, self._job))
        try:
            async with self._session.request(
                http.method,
                URL(f"{self._base}{path}", encoded=True),
                headers=headers,
                data=http.content if http.can_read_body else None,
                timeout=self._timeout,
                allow_redirects=False,
            ) as answer:
                return await self._pass_back(http, answer, passing)
        except (aiohttp.ClientError, TimeoutError) as error:
            if passing.begun:
                raise ConnectionResetError("the gateway broke off") from error
            raise UnavailableError(self._silent(error)) from error

    async def _pass_back(
        self, http: web.Request, answer: aiohttp.ClientResponse, passing: _Passing
    ) -> web.StreamResponse:
        reply = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in answer.headers.items():
            if name.lower() not in _OWN_HEADERS:
                reply.headers.add(name, value)
        await reply.prepare(http)
        passing.begun = True
        async for part in answer.content.iter_any():
            await reply.write(part)
        await reply.write_eof()
        return reply

    def _silent(self, error: BaseException) -> str:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        return f"the gateway at {self._base} does not answer ({why}); start it, or give --gateway"
