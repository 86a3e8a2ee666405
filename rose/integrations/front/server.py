"""HTTP server of the front: it answers control calls, and forwards all others to the gateway."""

import asyncio
from contextlib import suppress

import msgspec
from aiohttp import web

from rose.contract.gateway import ABORT, GatewayHealthReport
from rose.errors import RefusedError, RoseError, UnavailableError
from rose.gateway.apis.frontend import read_json
from rose.gateway.apis.wire import clean, error_body
from rose.gateway.errors import BadRequest, TurnAborted, TurnError
from rose.gateway.http_requests import (
    JSON,
    OPEN_ROUTES,
    Authenticator,
    Bodies,
    Route,
    answered,
    caller_of,
    json_answer,
    own_job,
    refusal_headers,
)
from rose.integrations.front import control_calls as calls
from rose.integrations.front.forwarding import Forwarding
from rose.integrations.front.settings import FrontSettings
from rose.integrations.front.updates import CheckpointUpdates
from rose.logs.process_log import announce
from rose.process.http_port import HEAD_S, Connections, LimitLog, connections_allowed

MAX_CONTROL_BYTES = 64 << 10
BODY_S, HEALTH_S = 20.0, 5.0
MOST_A_MINUTE = 60
GENERATE = "/generate"
WORKER = "rose"


class FrontServer:
    """HTTP routes of `rose front`: control calls of a trainer are answered here, others forwarded
    to the gateway.
    """

    def __init__(
        self,
        settings: FrontSettings,
        updates: CheckpointUpdates,
        forwarding: Forwarding,
        authenticator: Authenticator,
    ) -> None:
        self._settings = settings
        self._updates = updates
        self._forwarding = forwarding
        self._authenticator = authenticator
        self._paused = False
        self._minute, self._said = 0, 0
        clock = asyncio.get_running_loop().time
        self._limits = LimitLog(tell, clock)
        self._bodies = Bodies(MAX_CONTROL_BYTES, BODY_S, self._limits)
        allowed = settings.max_connections or connections_allowed()
        self.connections = Connections(allowed, HEAD_S, self._limits, clock, error_body)

    def application(self) -> web.Application:
        """Return the aiohttp application with the routes of the front; all other paths are
        forwarded to the gateway.
        """
        # `Bodies` bounds the bodies that are read here, the gateway the forwarded ones.
        app = web.Application(client_max_size=0)
        every, get, post = app.router.add_route, app.router.add_get, app.router.add_post
        for path in calls.UPDATES:
            post(path, self._update)
        post("/pull_weights", self._pull)
        # Engines differ in the method; slime flushes by GET.
        for path in calls.DONE:
            every("*", path, self._done)
        for path in calls.REFUSED:
            every("*", path, self._refused)
        for path in ("/health", "/health_generate", "/liveness"):
            get(path, self._health)
        for path in ("/server_info", "/get_server_info"):
            get(path, self._server_info)
        for path in ("/get_model_info", "/model_info"):
            get(path, self._model_info)
        for path in ("/get_weight_version", "/weight_version"):
            get(path, self._weight_version)
        get("/is_paused", self._is_paused)
        get("/get_world_size", self._world_size)
        get("/v1/loads", self._loads)
        get("/workers", self._workers)
        post("/workers", self._register)
        every("DELETE", "/workers/{worker}", self._unregister)
        # A route of Miles' own router.
        get("/list_workers", self._list_workers)
        post("/add_worker", self._unregister)
        post("/remove_worker", self._unregister)
        post("/abort_request", self._abort)
        every("*", "/{others:.*}", self._forward)
        return app

    async def answer(
        self,
        http: web.BaseRequest,
        routed: Route,
    ) -> web.StreamResponse:
        """Return a route's answer; failures become JSON errors in one form.

        Callers are authenticated first.
        """
        return await answered(http, routed, self._admit, _refusal, _fault)

    def _admit(self, http: web.BaseRequest) -> None:
        self._authenticator.admit(http)
        if http.path not in OPEN_ROUTES:
            own_job(caller_of(http), self._settings.trainer.job)

    # ---- updates ----

    async def _update(self, http: web.Request) -> web.Response:
        body = read_json(calls.decode_update, await self._bodies.read(http))
        if body.folder is None:
            raise RefusedError(calls.BY_FOLDERS)
        if body.load_format not in calls.FORMATS:
            raise RefusedError(
                f"load_format {body.load_format!r:.80} is not read here; save safetensors"
            )
        label = None if body.weight_version is None else str(body.weight_version)[:512]
        try:
            done = await self._updates.update(body.folder, label)
        except RoseError as error:
            self._complain(f"{body.folder!r:.300} is not in force: {error}")
            raise
        tell(f"{body.folder} is version {done.version}, and served")
        return json_answer(
            {
                "success": True,
                "status": "ok",
                "message": f"version {done.version} is served",
                "num_paused_requests": 0,
                "weight_version": done.label,
                "version": done.version,
            }
        )

    async def _pull(self, http: web.Request) -> web.Response:
        body = read_json(calls.decode_pull, await self._bodies.read(http))
        if body.target_version < 0:
            raise RefusedError("target_version is a version: at least 0")
        try:
            await self._updates.pull(
                body.local_checkpoint_dir, body.source_dir, body.target_version
            )
        except RoseError as error:
            self._complain(f"{body.source_dir!r:.300} is not pulled: {error}")
            raise
        return json_answer({"success": True, "message": "Success."})

    def _complain(self, line: str) -> None:
        """Print a line for the operator, at most 60 lines a minute."""
        minute = int(asyncio.get_running_loop().time() // 60)
        self._minute, self._said = minute, self._said + 1 if minute == self._minute else 1
        if self._said <= MOST_A_MINUTE:
            tell(line)

    # ---- what a fleet need not do, and what it cannot ----

    async def _done(self, http: web.Request) -> web.Response:
        if http.path in calls.PAUSES | calls.RESUMES:
            self._paused = http.path in calls.PAUSES
        return json_answer(calls.DONE[http.path])

    async def _refused(self, http: web.Request) -> web.Response:
        status, why = calls.REFUSED[http.path]
        error = BadRequest(f"{http.path}: {why}")
        error.status = status
        return _refusal(error)

    async def _abort(self, http: web.Request) -> web.StreamResponse:
        """Abort every turn that came through this front, or pass the abort of one request to the
        gateway.
        """
        raw = await self._bodies.read(http)
        if read_json(calls.decode_abort, raw or b"{}").abort_all:
            return json_answer({"aborted": self._forwarding.abort(GENERATE)})
        status, answer = await self._forwarding.post(http, ABORT, raw, HEALTH_S)
        return web.Response(status=status, body=answer, content_type=JSON)

    # ---- questions ----

    async def _health(self, http: web.Request) -> web.Response:
        """Answer 200 if the gateway answers and has at least one replica, else raise
        UnavailableError.

        Trainers begin after a 200.
        """
        status, raw = await self._forwarding.get("/health", HEALTH_S)
        replicas = 0
        with suppress(msgspec.DecodeError):
            replicas = msgspec.json.decode(raw, type=GatewayHealthReport).replicas
        if status != 200 or not replicas:
            raise UnavailableError(
                f"the gateway answers {status} and has {replicas} replicas; ask `rose status`"
            )
        return json_answer({"status": "ok", "replicas": replicas})

    async def _server_info(self, http: web.Request) -> web.Response:
        settings = self._settings
        model, label = str(settings.trainer.checkpoint), self._updates.in_force.label
        return json_answer(calls.server_info(model, label, settings.tp_size, settings.pp_size))

    async def _model_info(self, http: web.Request) -> web.Response:
        model = str(self._settings.trainer.checkpoint)
        return json_answer(
            {
                "model_path": model,
                "tokenizer_path": model,
                "is_generation": True,
                "weight_version": self._updates.in_force.label,
            }
        )

    async def _weight_version(self, http: web.Request) -> web.Response:
        now = self._updates.in_force
        return json_answer({"weight_version": now.label, "version": now.version})

    async def _is_paused(self, http: web.Request) -> web.Response:
        return json_answer({"is_paused": self._paused})

    async def _world_size(self, http: web.Request) -> web.Response:
        return json_answer({"world_size": self._settings.tp_size * self._settings.pp_size})

    async def _loads(self, http: web.Request) -> web.Response:
        running = self._forwarding.running(GENERATE)
        load = {"num_running_reqs": running, "num_waiting_reqs": 0, "num_total_reqs": running}
        return json_answer({"loads": [load]})

    # ---- the front as a router, whose only engine is itself ----

    async def _workers(self, http: web.Request) -> web.Response:
        worker = {
            "id": WORKER,
            "url": f"{http.scheme}://{http.host}",
            "worker_type": "regular",
            "is_healthy": True,
            "load": self._forwarding.running(GENERATE),
        }
        return json_answer({"workers": [worker], "total": 1})

    async def _register(self, http: web.Request) -> web.Response:
        asked = read_json(calls.decode_worker, await self._bodies.read(http))
        if asked.worker_type != "regular":
            raise RefusedError(
                f"a worker of type {asked.worker_type!r:.80} is not taken; prefill and decode are"
                " not split here"
            )
        return json_answer(
            {"status": "accepted", "worker_id": WORKER, "id": WORKER, "url": asked.url}
        )

    async def _unregister(self, http: web.Request) -> web.Response:
        return json_answer({"status": "accepted", "worker_id": WORKER})

    async def _list_workers(self, http: web.Request) -> web.Response:
        return json_answer({"urls": [f"{http.scheme}://{http.host}"]})

    # ---- all others ----

    async def _forward(self, http: web.Request) -> web.StreamResponse:
        answer = await self._forwarding.forward(http)
        if answer is not None:
            return answer
        if http.path == GENERATE:
            return json_answer(calls.aborted_turn(self._updates.in_force.label))
        return _refusal(TurnAborted("the turn was aborted"))


def tell(what: str, **fields: object) -> None:
    """Print one line and its fields to standard output, for the operator.

    A write that fails is ignored.
    """
    more = "".join(f" {name}={value}" for name, value in fields.items())
    announce("rose front", clean(f"{what}{more}"))


def _fault(http: web.BaseRequest, error: Exception) -> TurnError:
    line = f"the front failed at this request: {type(error).__name__}: {error}"
    tell(line)
    return TurnError(line)


def _refusal(error: TurnError) -> web.Response:
    """Return an HTTP error with the error's one line, in the fields that vLLM's and SGLang's
    clients read.
    """
    said = clean(str(error))
    fault = {"message": said, "type": error.kind, "param": None, "code": error.status}
    response = json_answer({"success": False, "message": said, "error": fault}, error.status)
    response.headers.update(refusal_headers(error))
    return response
