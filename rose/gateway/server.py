"""HTTP server of the gateway (docs/gateway.md): each API has a frontend, the rest is common."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from types import MappingProxyType

import msgspec
from aiohttp import web

from rose.contract.gateway import (
    ABORT,
    EXPLAIN,
    FINISH_SESSION,
    JOB_HEADER,
    SESSION_HEADER,
    SESSIONS,
    STATS,
    VERSIONS,
    Aborted,
    Choosing,
    Explanation,
    GatewayHealthReport,
    JobVersion,
    NamesBody,
    SessionFinished,
    Versions,
)
from rose.contract.replica import POOLING
from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.gateway import pooling
from rose.gateway import stats as metrics
from rose.gateway.apis import (
    ChatFrontend,
    CompletionFrontend,
    MessagesFrontend,
    ResponsesFrontend,
    SglangFrontend,
    VllmFrontend,
)
from rose.gateway.apis import tokenize as tokens
from rose.gateway.apis.frontend import ApiFrontend, ApiRequest, job_of, read_json, session_of
from rose.gateway.apis.wire import clean, encode, error_body, vllm_error
from rose.gateway.backends.http_pool import Upstream
from rose.gateway.batch_jobs.folder import BatchFolder
from rose.gateway.batch_jobs.routes import BatchRoutes
from rose.gateway.batch_jobs.runner import BatchCall, BatchRunner
from rose.gateway.delivery import Delivery
from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.http_requests import (
    JSON,
    Authenticator,
    Bodies,
    Route,
    answered,
    caller_of,
    held_to,
    json_answer,
    own_job,
    refusal_headers,
    turn_error_of,
)
from rose.gateway.images import KeptImages
from rose.gateway.replicas.dispatcher import Dispatcher
from rose.gateway.sessions import KeptSessions
from rose.gateway.stats import GatewayHealth, GatewayStatus
from rose.gateway.text_codec import ServedModel
from rose.gateway.turns.hedging import Hedging
from rose.gateway.turns.runner import SharedTurn, SharedTurns, TurnRunner
from rose.gateway.turns.token_stream import TokenStream, all_finished
from rose.process.http_port import Connections, LimitLog, connections_allowed
from rose.security.callers import Caller
from rose.tracing import NO_SPANS, Spans, trace_of

SWEEP_S = 0.1
# Prompt tokens of one request that are read in one step of the event loop, some milliseconds; the
# rest
# of a turn counts as TURN_TOKENS.
STEP_TOKENS, TURN_TOKENS = 32_768, 512


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
COUNT_TOKENS = "/v1/messages/count_tokens"
_decode_names = msgspec.json.Decoder(NamesBody)


class GatewayServer:
    """HTTP server of one gateway: it maps routes to frontends, and holds the shared turns. End with
    `close`.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        upstream: Upstream,
        model: ServedModel,
        health: Callable[[], GatewayHealth],
        authenticator: Authenticator | None = None,
        spans: Spans = NO_SPANS,
        batch_folder: BatchFolder | None = None,
    ) -> None:
        """Create routes and turns. `health` returns the process's health now; `authenticator`
        decides who may call, None admits all. batch_folder: None for a gateway without batches.
        """
        self._dispatcher = dispatcher
        self._settings = settings = dispatcher.settings
        self._stats = dispatcher.stats
        self._on_event = on_event = dispatcher.on_event
        self._model = model
        self._hedging = Hedging(dispatcher)
        self._calls = pooling.WholeCalls(dispatcher, upstream)
        runner = TurnRunner(dispatcher, upstream, self._hedging, spans)
        self._turns = SharedTurns(dispatcher, runner)
        self._frontends: dict[str, ApiFrontend] = {}
        self._batch_folder, self.batches = batch_folder, None
        if batch_folder is not None:
            self.batches = BatchRunner(
                batch_folder,
                self._answer_of_batch,
                dispatcher.places,
                dispatcher.idle,
                settings.max_body_bytes,
                self._stats.batch_requests,
                on_event,
            )

        def owned(caller: Caller, job: str) -> str:
            return dispatcher.jobs.owner(own_job(caller, job))

        self._sessions = KeptSessions(
            settings.sessions_bytes,
            settings.session_idle_s,
            asyncio.get_running_loop().time,
            owned,
        )
        self._images = KeptImages(settings.images_bytes, owned)
        self._limits = LimitLog(on_event, asyncio.get_running_loop().time)
        self._bodies = Bodies(settings.max_body_bytes, settings.body_timeout_s, self._limits)
        self.connections = Connections(
            settings.max_connections or connections_allowed(),
            settings.head_timeout_s,
            self._limits,
            asyncio.get_running_loop().time,
            error_body,
        )
        self._health_now = health
        self._authenticator = authenticator or Authenticator(None, None, time.time, on_event)

    def application(self) -> web.Application:
        # `Bodies` bounds the bodies that are read.
        app = web.Application(client_max_size=0)
        post, get = app.router.add_post, app.router.add_get
        kinds = (VllmFrontend, SglangFrontend, CompletionFrontend, ChatFrontend, ResponsesFrontend)
        parts = self._model, self._settings.max_completions, self._sessions, self._images
        messages = MessagesFrontend(*parts)
        for frontend in (*(kind(*parts) for kind in kinds), messages):
            self._frontends[frontend.path] = frontend
            post(frontend.path, self._handler(frontend, partial(self._serve, frontend)))
        post(COUNT_TOKENS, self._handler(messages, partial(self._count, messages)))
        for path in POOLING:
            post(path, self._pool)
        post("/tokenize", self._tokenize)
        post("/detokenize", self._detokenize)
        post(ABORT, self._abort)
        post("/abort_request", self._abort)
        post(FINISH_SESSION, self._finish_session)
        get("/v1/models", self._models)
        get("/health", self._health)
        get("/metrics", self._metrics)
        get(STATS, self._show_stats)
        get(EXPLAIN + "{subject:.+}", self._explain)
        get(VERSIONS, self._versions)
        get(SESSIONS + "{session:.+}", self._session)
        if self.batches is not None and self._batch_folder is not None:
            BatchRoutes(
                self._batch_folder,
                self.batches,
                self._bodies,
                {*self._frontends, *POOLING},
                self._dispatcher.jobs.owner,
                self._settings.body_timeout_s,
            ).add_to(app.router)
        return app

    def status(self) -> GatewayStatus:
        """Return a snapshot of the numbers of turns, replicas and sessions now."""
        dispatcher = self._dispatcher
        return GatewayStatus(
            usable=dispatcher.usable,
            live_turns=dispatcher.jobs.live_turns(),
            running=len(self._turns),
            waiting=dispatcher.waiting,
            sessions_known=dispatcher.jobs.sessions_known,
            hedged_groups=len(self._hedging),
        )

    async def close(self) -> None:
        """Refuse new turns, let running ones finish for `shutdown_s`, then cancel them."""
        await self._turns.close(self._settings.shutdown_s)

    async def sweep(self) -> None:
        """Look for stalled turns, hopeless waits and useful second copies every SWEEP_S seconds,
        until cancelled.
        """
        while True:
            await asyncio.sleep(SWEEP_S)
            self._dispatcher.sweep()
            self._hedging.sweep()
            self._sessions.trim()

    def _handler(self, frontend: ApiFrontend, serve: Handler) -> Handler:
        """Return `serve` with its TurnErrors answered in the form of the API."""

        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                return await serve(http)
            except TurnError as error:
                trace = trace_of(http.headers)
                return _refusal(error, frontend.error(error), trace.headers() if trace else {})

        return handle

    async def _serve(self, frontend: ApiFrontend, http: web.Request) -> web.StreamResponse:
        caller = caller_of(http)
        ask = await frontend.read(await self._bodies.read(http), http.headers, caller)
        for request in ask.turns:
            held_to(caller, request)
        trace = ask.turns[0].origin.trace
        said = trace.headers() if trace else {}
        delivery = Delivery(http, self._settings.slow_reader_s, self._stats, said)
        if len(ask.turns) == 1:
            turn = self._turns.open(ask.turns[0])
            with self._turns.reading((turn,), ask.stream):
                return await _delivered(delivery, frontend, ask, [turn])
        async with self._reading(ask) as turns:
            return await _delivered(delivery, frontend, ask, turns)

    async def _answer_of_batch(self, call: BatchCall) -> tuple[int, bytes]:
        """Return the status and body that answer one request of a batch."""
        frontend = self._frontends.get(call.path)
        try:
            return HTTPStatus.OK, await self._answered_whole(call, frontend)
        except (RefusedError, UnavailableError, ConfigError) as error:
            said = turn_error_of(error)
        except Exception as error:  # noqa: BLE001 - a fault of this program ends one request only
            said = self._fault(call.path, error)
        return said.status, frontend.error(said) if frontend else vllm_error(said)

    async def _answered_whole(self, call: BatchCall, frontend: ApiFrontend | None) -> bytes:
        """Return the answer to one request of a batch; without a frontend it is a pooling route's.
        Raises TurnError.
        """
        caller, job = call.record.caller, call.record.job
        headers = {JOB_HEADER: job} if job else {}
        if frontend is None:
            return await self._pooled(call.path, call.body, headers, caller, call.placed)
        ask = await frontend.read(call.body, headers, caller)
        if ask.stream:
            raise BadRequest("stream: a batch answers whole; leave it out", "stream")
        for number, request in enumerate(ask.turns):
            held_to(caller, request)
            # One behind trainers' turns does not wait for long: it is sent again.
            request.batch = call.floor
            request.priority = call.placed(request.priority, first=not number)
        async with self._reading(ask) as turns:
            await all_finished(turns)
            await ask.answer.prepare(turns)
            return ask.answer.whole(turns)

    async def _count(self, messages: MessagesFrontend, http: web.Request) -> web.Response:
        """Answer with the number of tokens of a conversation."""
        self._check_job(http)
        body = await messages.count(await self._bodies.read(http))
        return web.Response(body=body, content_type=JSON)

    @asynccontextmanager
    async def _reading(self, ask: ApiRequest) -> AsyncIterator[list[SharedTurn]]:
        """Return a context manager that opens all turns of a request and counts this connection as
        their follower.

        If one turn is refused, the turns opened before it are left, and its TurnError is raised.
        """
        turns: list[SharedTurn] = []
        step_tokens = 0
        with ExitStack() as opening:
            for request in ask.turns:
                step_tokens += TURN_TOKENS + len(request.token_ids)
                if turns and step_tokens > STEP_TOKENS:
                    # Other requests run between the turns of a large one.
                    step_tokens = TURN_TOKENS + len(request.token_ids)
                    await asyncio.sleep(0)
                turn = self._turns.open(request)
                opening.enter_context(self._turns.reading((turn,), stream=False))
                turns.append(turn)
            whole = ExitStack()
            whole.enter_context(self._turns.reading(turns, ask.stream))
        with whole:
            yield turns

    async def answer(self, http: web.BaseRequest, routed: Route) -> web.StreamResponse:
        """Return the route's response, or any failure as an error response in vLLM's shape."""
        return await answered(
            http,
            routed,
            self._authenticator.admit,
            lambda error: _refusal(error, vllm_error(error)),
            lambda http, error: self._fault(http.path, error),
        )

    def _fault(self, path: str, error: Exception) -> TurnError:
        self._on_event("fault", path=clean(path)[:200], reason=repr(error)[:500])
        return TurnError("the gateway failed at this request; its log says how")

    async def _pool(self, http: web.Request) -> web.Response:
        """Answer a call of a pooling route, for a model that is not generative."""
        body, caller = await self._bodies.read(http), caller_of(http)
        answer = await self._pooled(http.path, body, http.headers, caller)
        return web.Response(body=answer, content_type=JSON)

    async def _pooled(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        caller: Caller,
        placed: Callable[[int], int] = int,
    ) -> bytes:
        """Return the answer of a call; `placed` changes its priority. Raises TurnError."""

        def owned(job: str) -> str:
            return self._dispatcher.jobs.resolve(own_job(caller, job))

        call = pooling.read(path, body, headers, self._model, owned, caller.scope)
        call.priority = placed(call.priority)
        return pooling.answer(await self._calls.run(call), self._model)

    async def _tokenize(self, http: web.Request) -> web.Response:
        self._check_job(http)
        body = await tokens.tokenize(self._model, await self._bodies.read(http))
        return web.Response(body=body, content_type=JSON)

    async def _detokenize(self, http: web.Request) -> web.Response:
        self._check_job(http)
        body = await tokens.detokenize(self._model, await self._bodies.read(http))
        return web.Response(body=body, content_type=JSON)

    def _check_job(self, http: web.Request) -> None:
        """Raise UnknownJob if the request's header names a job that is not registered."""
        if named := job_of(http.headers, None):
            self._dispatcher.jobs.resolve(named)

    def _job(self, http: web.Request, named: str | None) -> str:
        """Return the registered job of a request that names `named`, "" where jobs are labels.
        Raises TurnError.
        """
        return self._dispatcher.jobs.owner(own_job(caller_of(http), job_of(http.headers, named)))

    async def _abort(self, http: web.Request) -> web.Response:
        """Answer an abort of turns by id (vLLM's `request_ids`, SGLang's `rid`) with the ids that
        were aborted.
        """
        names = read_json(_decode_names, await self._bodies.read(http))
        job = self._job(http, names.job)
        wanted = names.request_ids if names.rid is None else [*names.request_ids, names.rid]
        scope = caller_of(http).scope
        aborted = [name for name in wanted if self._turns.cancel(scope + name, job)]
        return json_answer(Aborted(aborted))

    async def _finish_session(self, http: web.Request) -> web.Response:
        """Abort all turns of a session, forget the session, and answer with their number."""
        body = await self._bodies.read(http)
        names = read_json(_decode_names, body) if body else NamesBody()
        session = session_of(http.headers, names.session_id)
        if not session:
            raise BadRequest(f"name the session: header {SESSION_HEADER} or session_id")
        job, scope = self._job(http, names.job), caller_of(http).scope
        aborted = self._turns.finish_session(job, scope + session)
        # An aborted turn leaves nothing behind, so everything known is forgotten here.
        self._dispatcher.jobs.of(job).forget(scope + session)
        self._sessions.forget(caller_of(http), job, session)
        return json_answer(SessionFinished(session, aborted))

    async def _session(self, http: web.Request) -> web.Response:
        """Answer with the kept turns of a session as tokens; 404 for a session without any."""
        session = http.match_info["session"]
        job = self._job(http, http.query.get("job"))
        kept = self._sessions.trajectories(caller_of(http), job, session)
        if not kept:
            raise web.HTTPNotFound(reason=f"no turn of the session {session[:200]!r} is kept")
        parts = []
        for trajectory in tuple(kept):
            parts.append(msgspec.Raw(encode(trajectory.tokens())))
            # Other requests run between the trajectories of a long session.
            await asyncio.sleep(0)
        return json_answer({"session_id": session, "trajectories": parts})

    async def _explain(self, http: web.Request) -> web.Response:
        """Answer with the router's choices for a request's or session's turns, and their reasons;
        404 without any.
        """
        subject = http.match_info["subject"]
        job, scope = self._job(http, http.query.get("job")), caller_of(http).scope
        decisions = self._dispatcher.jobs.of(job).explained(scope + subject)
        if not decisions:
            raise web.HTTPNotFound(reason=f"no choice is remembered for {subject[:200]!r}")
        now_s = asyncio.get_running_loop().time()
        rows = [
            Choosing(now_s - each.at_s, each.request_id.removeprefix(scope), *each[2:])
            for each in decisions
        ]
        return json_answer(Explanation(subject, rows))

    async def _versions(self, http: web.Request) -> web.Response:
        """Answer with the announced version of each job and the version of each replica, of the
        caller's job or of all.
        """
        named = own_job(caller_of(http), job_of(http.headers, http.query.get("job")))
        job = self._dispatcher.jobs.owner(named) if named else ""
        announced = sorted(self._dispatcher.default_versions.announced.items())
        jobs = tuple(JobVersion(name, each.latest) for name, each in announced if job in ("", name))
        rows = [row.served() for row in self._dispatcher.entries if job in ("", row.job)]
        return json_answer(Versions(jobs, tuple(sorted(rows, key=lambda row: row.id))))

    async def _models(self, http: web.Request) -> web.Response:
        cards: list[dict[str, object]] = [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "rose",
                "root": self._model.name,
                "parent": None,
                "max_model_len": self._model.max_model_len,
                "permission": [],
            }
            for name in self._model.names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _health(self, http: web.Request) -> web.Response:
        now, turns = self._health_now(), self._dispatcher
        return json_answer(
            GatewayHealthReport(
                now.status, tuple(now.troubles), now.log_dropped, turns.usable, turns.attached
            )
        )

    def metrics_text(self) -> str:
        """Return the text of `/metrics`, in Prometheus' format."""
        return metrics.exposition(
            self._stats,
            self._dispatcher.jobs.live_turns(),
            self._dispatcher.waiting,
            self._health_now(),
        )

    async def _metrics(self, http: web.Request) -> web.Response:
        text = self.metrics_text()
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _show_stats(self, http: web.Request) -> web.Response:
        return json_answer(
            metrics.snapshot(
                self._stats, self._dispatcher.jobs.live_turns(), self._dispatcher.waiting
            )
        )


async def _delivered(
    delivery: Delivery, frontend: ApiFrontend, ask: ApiRequest, streams: Sequence[TokenStream]
) -> web.StreamResponse:
    if ask.stream and not ask.at_end:
        return await delivery.stream(frontend, ask, streams)
    await all_finished(streams)
    await ask.answer.prepare(streams)
    if ask.stream:
        return await delivery.stream(frontend, ask, streams)
    return await delivery.whole(ask.answer.whole(streams))


def _refusal(
    error: TurnError, body: bytes, more: Mapping[str, str] = MappingProxyType({})
) -> web.Response:
    headers = {**more, **refusal_headers(error)}
    return web.Response(status=error.status, body=body, content_type=JSON, headers=headers)
