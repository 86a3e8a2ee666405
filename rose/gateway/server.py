"""The HTTP surface: docs/architecture.md, "gateway HTTP".

Requests with the same id and body share one turn. It is cancelled when all who asked are gone.
"""

import asyncio
import uuid
from dataclasses import dataclass

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from elastic_scheduler import AnswerBook, Conflict
from rose.gateway import stats as metrics
from rose.gateway import wire
from rose.gateway.dispatcher import Dispatcher, EventSink
from rose.gateway.errors import BadRequest, NoReplica, TurnError, UnknownModel
from rose.gateway.settings import GatewaySettings
from rose.gateway.stats import GatewayStats
from rose.gateway.turn import TurnRunner

SWEEP_S = 0.1
JSON = "application/json"


@dataclass(slots=True, eq=False)
class _SharedTurn:
    """A running or answered turn and how many connections wait for it."""

    task: "asyncio.Task[bytes]"
    watchers: int = 0


class GatewayServer:
    """One gateway: routes, shared turns and the sweeper. Start with `start`, end with `close`."""

    def __init__(
        self,
        settings: GatewaySettings,
        dispatcher: Dispatcher,
        session: aiohttp.ClientSession,
        stats: GatewayStats,
        on_event: EventSink,
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._stats = stats
        self._runner = TurnRunner(settings, dispatcher, session, stats, on_event)
        self._answers: AnswerBook[_SharedTurn] = AnswerBook(settings.answers_kept)
        self._running: set[asyncio.Task[bytes]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._closing = False

    def application(self) -> web.Application:
        """The routes, with bounded bodies and errors as JSON."""
        app = web.Application(
            client_max_size=self._settings.max_body_bytes, middlewares=[_errors_as_json]
        )
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/rose/v1/stats", self._show_stats)
        return app

    def start(self) -> None:
        """Begin to sweep stalled and hopeless turns."""
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Refuse new turns, let running ones finish for `shutdown_s`, then cancel them."""
        self._closing = True
        if self._running:
            await asyncio.wait(self._running, timeout=self._settings.shutdown_s)
        tasks: list[asyncio.Task[bytes] | asyncio.Task[None]] = [*self._running]
        if self._sweeper is not None:
            tasks.append(self._sweeper)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._dispatcher.sweep()

    async def _generate(self, http: web.Request) -> web.Response:
        body = await http.read()
        try:
            request = wire.decode_request(body)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"the body is not a generate request: {error}") from error
        request.check()
        if request.model not in (None, self._settings.model_name):
            raise UnknownModel(f"the model here is {self._settings.model_name}")
        shared = self._share(request, body, http.headers.get("X-Session-ID", ""))
        shared.watchers += 1
        try:
            answer = await asyncio.shield(shared.task)
        finally:
            shared.watchers -= 1
            if shared.watchers == 0 and not shared.task.done():
                self._answers.forget(request.request_id, shared)
                shared.task.cancel()
        return web.Response(body=answer, content_type=JSON)

    def _share(self, request: wire.GenerateRequest, body: bytes, session: str) -> _SharedTurn:
        """The turn of an earlier request with this id and body, or a new one."""
        request.request_id = request.request_id or uuid.uuid4().hex
        fingerprint = hash(body)
        known = self._answers.find(request.request_id, fingerprint)
        if isinstance(known, Conflict):
            raise BadRequest(f"{known.value}: {request.request_id}")
        if known is not None:
            self._stats.repeated += 1
            return known
        if self._closing:
            raise NoReplica("the gateway is shutting down; send the turn again later")
        self._dispatcher.check_admission(request.need(session))
        shared = _SharedTurn(asyncio.create_task(self._runner.run(request, session)))
        self._answers.open(request.request_id, fingerprint, shared)
        self._running.add(shared.task)
        shared.task.add_done_callback(lambda task: self._settle(request.request_id, shared))
        return shared

    def _settle(self, request_id: str, shared: _SharedTurn) -> None:
        task = shared.task
        self._running.discard(task)
        if task.cancelled():
            self._stats.failed += 1
        elif task.exception() is not None:
            self._stats.failed += 1
            self._answers.forget(request_id, shared)
        else:
            self._answers.close(request_id, shared)

    async def _models(self, http: web.Request) -> web.Response:
        model = {"id": self._settings.model_name, "object": "model", "owned_by": "rose"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, http: web.Request) -> web.Response:
        """The process is well; `replicas` says whether turns would be placed."""
        return web.json_response({"status": "ok", "replicas": self._dispatcher.usable})

    async def _metrics(self, http: web.Request) -> web.Response:
        text = metrics.exposition(
            self._stats, self._dispatcher.live_turns(), self._dispatcher.waiting
        )
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _show_stats(self, http: web.Request) -> web.Response:
        return web.json_response(
            metrics.snapshot(self._stats, self._dispatcher.live_turns(), self._dispatcher.waiting)
        )


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except TurnError as error:
        return _error(error.status, error.kind, str(error), error.retry_after_s)
    except web.HTTPRequestEntityTooLarge as error:
        return _error(413, "too_large", f"{error.text}; send a smaller body")
    except web.HTTPException as error:
        return _error(error.status, "http", f"{request.method} {request.path}: {error.reason}")


def _error(status: int, kind: str, message: str, retry_after_s: int = 0) -> web.Response:
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
    return web.Response(
        status=status, body=wire.encode_error(kind, message), content_type=JSON, headers=headers
    )
