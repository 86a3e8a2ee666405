"""The HTTP surface: docs/gateway.md. Each API's dialect reads and writes; the rest is common."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from rose.gateway import stats as metrics
from rose.gateway import tokens
from rose.gateway.ask import Ask, Dialect
from rose.gateway.delivery import Delivery
from rose.gateway.dialects import ChatDialect, CompletionDialect, SglangDialect, VllmDialect
from rose.gateway.dialects.wire import encode, read_json, vllm_error
from rose.gateway.dispatcher import Dispatcher, EventSink
from rose.gateway.errors import BadRequest, BodyTooLarge, TurnError
from rose.gateway.feed import TurnFeed
from rose.gateway.hedging import Hedging
from rose.gateway.model import ServedModel
from rose.gateway.origin import SESSION_HEADER
from rose.gateway.settings import GatewaySettings
from rose.gateway.shared import SharedTurn, SharedTurns
from rose.gateway.stats import GatewayStats
from rose.gateway.turn import TurnRunner
from rose.gateway.upstream import Upstream

SWEEP_S = 0.1
JSON = "application/json"


class _Names(msgspec.Struct):
    """Bodies of the routes that abort turns or finish sessions."""

    request_ids: list[str] = []
    rid: str | None = None
    session_id: str | None = None


_decode_names = msgspec.json.Decoder(_Names)


class GatewayServer:
    """One gateway: routes, shared turns and the sweeper. Start with `start`, end with `close`."""

    def __init__(
        self,
        settings: GatewaySettings,
        dispatcher: Dispatcher,
        upstream: Upstream,
        stats: GatewayStats,
        on_event: EventSink,
        model: ServedModel,
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._stats = stats
        self._model = model
        self._hedging = Hedging(dispatcher, stats, on_event)
        runner = TurnRunner(settings, dispatcher, upstream, stats, on_event, self._hedging)
        self._turns = SharedTurns(settings, dispatcher, runner, stats)
        self._sweeper: asyncio.Task[None] | None = None

    def application(self) -> web.Application:
        """The routes, with bounded bodies and errors as JSON."""
        app = web.Application(
            client_max_size=self._settings.max_body_bytes, middlewares=[_errors_as_json]
        )
        post, get = app.router.add_post, app.router.add_get
        dialects: list[Dialect] = [
            VllmDialect(self._model),
            SglangDialect(self._model),
            CompletionDialect(self._model),
            ChatDialect(self._model),
        ]
        for dialect in dialects:
            post(dialect.path, self._handler(dialect))
        post("/tokenize", self._tokenize)
        post("/detokenize", self._detokenize)
        post("/inference/v1/abort_requests", self._abort)
        post("/abort_request", self._abort)
        post("/finish_session", self._finish_session)
        get("/v1/models", self._models)
        get("/health", self._health)
        get("/metrics", self._metrics)
        get("/rose/v1/stats", self._show_stats)
        get("/rose/v1/explain/{subject:.+}", self._explain)
        return app

    def start(self) -> None:
        """Begin to sweep stalled and hopeless turns."""
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Refuse new turns, let running ones finish for `shutdown_s`, then cancel them."""
        await self._turns.close(self._settings.shutdown_s)
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._dispatcher.sweep()
            self._hedging.sweep()

    def _handler(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                return await self._serve(dialect, http)
            except web.HTTPRequestEntityTooLarge as error:
                large = BodyTooLarge(f"{error.text}; send a smaller body")
                return _refusal(large, dialect.error(large))
            except TurnError as error:
                return _refusal(error, dialect.error(error))

        return handle

    async def _serve(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        ask = await dialect.read(await http.read(), http.headers)
        delivery = Delivery(http, self._settings.slow_reader_s, self._stats)
        turns = self._open(ask)
        feeds = [turn.feed for turn in turns]
        with self._turns.reading(turns, ask.stream):
            if ask.stream:
                return await delivery.stream(dialect, ask, feeds)
            await _all_finished(feeds)
            return await delivery.whole(ask.answer.whole(feeds))

    def _open(self, ask: Ask) -> list[SharedTurn]:
        """All turns of a request, or, raising its TurnError, none."""
        opened: list[SharedTurn] = []
        try:
            for request in ask.turns:
                opened.append(self._turns.open(request))
        except TurnError:
            with self._turns.reading(opened, stream=False):
                raise
        return opened

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = await tokens.tokenize(self._model, await http.read())
        return web.Response(body=body, content_type=JSON)

    async def _detokenize(self, http: web.Request) -> web.Response:
        body = await tokens.detokenize(self._model, await http.read())
        return web.Response(body=body, content_type=JSON)

    async def _abort(self, http: web.Request) -> web.Response:
        """vLLM's `request_ids` and SGLang's `rid`: those turns end now, whoever reads them."""
        names = read_json(_decode_names, await http.read())
        wanted = names.request_ids if names.rid is None else [*names.request_ids, names.rid]
        aborted = [name for name in wanted if self._turns.cancel(name)]
        return web.json_response({"aborted": aborted})

    async def _finish_session(self, http: web.Request) -> web.Response:
        """A trajectory is over: nothing of it may go on running."""
        body = await http.read()
        names = read_json(_decode_names, body) if body else _Names()
        session = http.headers.get(SESSION_HEADER) or names.session_id
        if not session:
            raise BadRequest(f"name the session: header {SESSION_HEADER} or session_id")
        aborted = self._turns.finish_session(session)
        # A turn that was aborted leaves nothing behind, so whatever is known is forgotten here.
        self._dispatcher.forget(session)
        return web.json_response({"session_id": session, "aborted": aborted})

    async def _explain(self, http: web.Request) -> web.Response:
        """Where the turns of a request or trajectory were placed, and why."""
        subject = http.match_info["subject"]
        decisions = self._dispatcher.explained(subject)
        if not decisions:
            raise web.HTTPNotFound(reason=f"no choice is remembered for {subject[:200]!r}")
        # Ages, not times: the clock is this process's own.
        now_s = asyncio.get_running_loop().time()
        rows = [{**each._asdict(), "age_s": now_s - each.at_s} for each in decisions]
        return web.json_response({"subject": subject, "decisions": rows})

    async def _models(self, http: web.Request) -> web.Response:
        name = self._model.name
        card = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "rose",
            "root": name,
            "parent": None,
            "max_model_len": self._model.max_model_len,
            "permission": [],
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, http: web.Request) -> web.Response:
        """The process is well; `replicas` says whether turns would be placed.

        `unversioned` are stock engines: they stamp no versions and no gate holds them.
        """
        return web.json_response(
            {
                "status": "ok",
                "replicas": self._dispatcher.usable,
                "unversioned": self._dispatcher.attached,
            }
        )

    async def _metrics(self, http: web.Request) -> web.Response:
        text = metrics.exposition(
            self._stats, self._dispatcher.live_turns(), self._dispatcher.waiting
        )
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _show_stats(self, http: web.Request) -> web.Response:
        return web.json_response(
            metrics.snapshot(self._stats, self._dispatcher.live_turns(), self._dispatcher.waiting)
        )


async def _all_finished(feeds: list[TurnFeed]) -> None:
    """Return when all turns are over. Raises the first TurnError at once."""
    if len(feeds) == 1:
        return await feeds[0].finished()
    waits = [asyncio.ensure_future(feed.finished()) for feed in feeds]
    try:
        await asyncio.gather(*waits)
    finally:
        for wait in waits:
            wait.cancel()


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except TurnError as error:
        return _refusal(error, vllm_error(error))
    except web.HTTPException as error:
        fault = {
            "message": f"{request.method} {request.path}: {error.reason}",
            "type": error.reason,
            "param": None,
            "code": error.status,
        }
        body = encode({"error": fault})
        return web.Response(status=error.status, body=body, content_type=JSON)


def _refusal(error: TurnError, body: bytes) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else {}
    return web.Response(status=error.status, body=body, content_type=JSON, headers=headers)
