"""Replica endpoint: vLLM endpoint plugin that serves the replica HTTP contract.

POST /rose/v1/generate        tokens in, stamped tokens out
POST /rose/v1/generate_batch  several turns in one request; …/leave cancels some
POST /rose/v1/images          an image that turns then name by its hash
POST /rose/v1/drain | admit   lease epochs open and close admission
POST /rose/v1/weights/apply   the next policy version
POST /rose/v1/weights/audit   digests of all live weights
GET  /rose/v1/state

`generate` is the path of every turn, so it is a bare ASGI application.

`EndpointMount` is ASGI middleware that mounts these routes in a vLLM without endpoint plugins. The
server sends `lifespan` through its middleware once, when the engine is there and before the first
request. A vLLM that has loaded the endpoint as a plugin has left its mark in the server's state by
then, and nothing is done. Loaded by vLLM's own option,
`--middleware=rose.replica.endpoint.EndpointMount`.
"""

import asyncio
import logging
import os
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.datastructures import State
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from executor.vllm.compat import check_version
from rose.contract import replica as contract
from rose.contract import weights
from rose.contract.replica import MAX_BODY_BYTES, GenerateBody, StreamLine
from rose.errors import decoded
from rose.images import NOT_AN_IMAGE, Image, is_image
from rose.replica.admission import Admission, AdmissionError, EpochAheadError, StaleEpochError
from rose.replica.asgi import (
    ROLES,
    STATE_NAME,
    BodyTooLargeError,
    ClientGoneError,
    bears_secret,
    read_body,
    refuse,
    refuse_stranger,
    reply,
    trace_in,
)
from rose.replica.batches import TurnBatches
from rose.replica.control import GuestControl, HostBusyError
from rose.replica.engine import ReplicaEngine
from rose.replica.engine_update import ActivationError, WeightUpdater
from rose.replica.turns import ReplicaTurn, Turns
from rose.replica.warm_up import WarmUp
from weight_transfer import AdapterError, WeightError, WrongBaseError

_LOG = logging.getLogger("vllm.rose.replica")
_Asked = GenerateBody | contract.BatchBody | contract.LeaveBody
_BODY: msgspec.json.Decoder[_Asked] = msgspec.json.Decoder(GenerateBody)
_BODIES: dict[str, msgspec.json.Decoder[_Asked]] = {
    contract.GENERATE_BATCH: msgspec.json.Decoder(contract.BatchBody),
    contract.LEAVE_BATCH: msgspec.json.Decoder(contract.LeaveBody),
}


class GenerateApp:
    """ASGI application of the turn routes: it checks admission, then streams a turn's tokens or a
    batch's; `turns` and `weights` are set once the engine is up.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._batches = TurnBatches()
        self.turns: Turns | None = None
        self.weights: WeightUpdater | None = None

    def shut(self, job: str) -> str:
        """Return the reason why no turn of a job may begin: no lease, another job's lease, or
        another job's weights; "" if one may.
        """
        if not self._admission.open or self.turns is None:
            return f"no turns now: {self._admission.reason}"
        serves = self._admission.takes(job) and (self.weights is None or self.weights.serves(job))
        return "" if serves else f"no turns of {job} here"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one POST request: a turn, a batch of turns, or the cancellation of some turns of a
        batch.
        """
        if scope["path"] == contract.IMAGES:
            await self._hold_image(receive, send)
            return
        decoder = _BODIES.get(scope["path"], _BODY)
        try:
            body = decoded(decoder, await read_body(receive, MAX_BODY_BYTES))
        except ClientGoneError:
            # Nothing was begun, and the client is gone.
            return
        except BodyTooLargeError as error:
            await refuse(send, 413, "too_large", str(error))
            return
        except msgspec.MsgspecError as error:
            await refuse(send, 400, "bad_request", str(error))
            return
        if isinstance(body, contract.BatchBody):
            await self._serve_batch(body, receive, send)
        elif isinstance(body, contract.LeaveBody):
            self._batches.leave(body.batch, body.turns)
            await reply(send, 200, contract.Left())
        else:
            await self._serve(body, scope, receive, send)

    async def _serve(self, body: GenerateBody, scope: Scope, receive: Receive, send: Send) -> None:
        # Nothing is awaited from here until the turn is open: no drain can fall in between.
        if shut := self.shut(body.job):
            await refuse(send, 503, "draining", shut)
            return
        assert self.turns is not None
        if missing := self.turns.missing_image(body):
            await refuse(send, contract.NO_IMAGE, "no_image", missing)
            return
        await self.turns.serve(self.turns.open(body, trace_in(scope)), receive, send)

    async def _hold_image(self, receive: Receive, send: Send) -> None:
        """Keep the image in a request's body for turns that name it."""
        try:
            data = await read_body(receive, contract.MAX_IMAGE_BYTES)
        except ClientGoneError:
            return
        except BodyTooLargeError as error:
            await refuse(send, 413, "too_large", f"images: {error}")
            return
        if self.turns is None or not self._admission.open:
            await refuse(send, 503, "draining", self.shut(""))
        elif why := self.turns.no_images or ("" if is_image(data) else NOT_AN_IMAGE):
            await refuse(send, 400, "bad_request", why)
        else:
            image = await asyncio.to_thread(Image.of, data)
            self.turns.images.add(image)
            await reply(send, 200, contract.ImageHeld(image.sha256))

    async def _serve_batch(self, body: contract.BatchBody, receive: Receive, send: Send) -> None:
        # Nothing is awaited either until all turns are open.
        shut = [self.shut(turn.job) for turn in body.turns]
        if all(shut):
            await refuse(send, 503, "draining", shut[0])
            return
        assert self.turns is not None
        opened, refused = dict[int, ReplicaTurn](), list[contract.BatchLine]()
        for place, turn in enumerate(body.turns):
            if shut[place]:
                refused.append(contract.BatchLine(place, StreamLine(message=shut[place]), 503))
            elif missing := self.turns.missing_image(turn):
                line = StreamLine(message=missing)
                refused.append(contract.BatchLine(place, line, contract.NO_IMAGE))
            else:
                opened[place] = self.turns.open(turn)
        await self._batches.serve(self.turns, body.batch, opened, refused, receive, send)


_EPOCH = msgspec.json.Decoder(contract.EpochBody)
_APPLY = msgspec.json.Decoder(weights.ApplyBody)
Answer = tuple[int, msgspec.Struct]
_Handler = Callable[[bytes], Awaitable[Answer]]
# Status and kind of a refusal by its error, the narrower errors first. A refused version was not
# written: the replica serves on with the one that it has.
_REFUSALS: dict[type[Exception], tuple[int, str]] = {
    BodyTooLargeError: (413, "too_large"),
    msgspec.MsgspecError: (400, "bad_request"),
    StaleEpochError: (409, "stale_epoch"),
    EpochAheadError: (400, "bad_request"),
    AdmissionError: (409, "quarantined"),
    WrongBaseError: (409, "wrong_base"),
    AdapterError: (422, "unfit_adapter"),
    HostBusyError: (503, "host_busy"),
    WeightError: (422, "bad_version"),
}


class ReplicaEndpoint:
    """Endpoint plugin of vLLM that adds a replica's HTTP routes; named `rose_replica` in
    `VLLM_PLUGINS`, or mounted by `EndpointMount`.

    It adds nothing unless `ROSE_ROLE` makes a replica of the engine.
    """

    name = "rose_replica"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._active = os.environ.get("ROSE_ROLE") in ROLES
        self._admission = Admission()
        self._generate = GenerateApp(self._admission)
        self._turns: Turns | None = None
        self._weights: WeightUpdater | None = None
        self._kv_tokens = 0
        self._control = GuestControl()
        self._warm_up: WarmUp | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the replica's routes to vLLM's application, before vLLM's own; do nothing without
        ROSE_ROLE.

        Raises ExecutorError on an untested vLLM.
        """
        if not self._active:
            return
        from rose.replica.vllm import SURFACES

        check_version(SURFACES)
        self.attach(app)

    def attach(self, app: FastAPI) -> None:
        """Add the replica's routes to the application of any engine, before its own."""
        app.router.routes[:0] = [
            # An ASGI application as endpoint is called directly, without a Request around it.
            *(Route(path, self._generate, methods=["POST"]) for path in contract.TURNS),
            Route(contract.DRAIN, _Answering(self._drain), methods=["POST"]),
            Route(contract.ADMIT, _Answering(self._admit), methods=["POST"]),
            Route(weights.APPLY, _Answering(self._apply), methods=["POST"]),
            Route(weights.AUDIT, _Answering(self._audit), methods=["POST"]),
            Route(contract.STATE, _Answering(self._state, control=False), methods=["GET"]),
        ]

    async def init_state(
        self,
        engine_client: Any,  # noqa: ANN401 - vLLM's EngineClient
        state: State,
        args: Namespace,
    ) -> None:
        """Start serving turns with vLLM's engine client; do nothing without ROSE_ROLE.

        state: the server's state, in which GenerateShortcut finds the application. args: the
        server's arguments.
        """
        if not self._active:
            return
        from rose.replica.vllm import VllmEngine

        self.begin(VllmEngine(engine_client, str(args.model)), state)

    def begin(self, engine: ReplicaEngine, state: State) -> None:
        """Start serving turns with this engine, and start its warm-up, weight preparation and
        waking; `state` gets the application for GenerateShortcut.
        """
        setattr(state, STATE_NAME, self._generate)
        self._turns = self._generate.turns = Turns(engine)
        self._weights = WeightUpdater(engine, self._turns, self._admission, self._control)
        self._generate.weights = self._weights
        self._kv_tokens = engine.kv_tokens
        self._control.start_waking(engine)
        self._warm_up = WarmUp(engine, self._control)
        self._warm_up.start()
        self._weights.start()

    async def _drain(self, raw: bytes) -> Answer:
        body = decoded(_EPOCH, raw)
        self._admission.close(body.epoch, body.reason, body.offer)
        assert self._turns is not None
        return 200, contract.Drained(await self._turns.revoke_all(but=self._admission.jobs))

    async def _admit(self, raw: bytes) -> Answer:
        body = decoded(_EPOCH, raw)
        self._admission.admit(body.epoch, body.job, body.latest, body.offer)
        return 200, contract.Admitted()

    async def _apply(self, raw: bytes) -> Answer:
        assert self._weights is not None
        body = decoded(_APPLY, raw)
        try:
            report = await self._weights.apply(body.paths, body.chunks, body.on_update)
        except ActivationError as error:
            return 422, weights.Unproven(contract.Fault("unproven", str(error)))
        return 200, msgspec.convert(report, weights.UpdateApplied)

    async def _audit(self, raw: bytes) -> Answer:
        del raw
        assert self._weights is not None
        try:
            report = msgspec.convert(await self._weights.audit(), weights.Audited)
        except WeightError as error:
            return 503, contract.Refusal(contract.Fault("no_audit", str(error)))
        if report.flipped:
            await self._weights.distrust(f"live weights of {report.flipped[0]} are wrong")
            return 422, report
        return 200, report

    async def _state(self, raw: bytes) -> Answer:
        del raw
        assert self._turns is not None
        assert self._weights is not None
        assert self._warm_up is not None
        return 200, contract.ReplicaState(
            replica_id=os.environ.get("ROSE_REPLICA_ID", ""),
            role=os.environ.get("ROSE_ROLE", ""),
            policy_version=self._weights.version,
            proven=not self._admission.quarantined,
            admitting=self._admission.first.open,
            epoch=self._admission.first.epoch,
            running=self._turns.running,
            waiting=self._turns.waiting,
            tokens_total=self._turns.tokens_total,
            kv_tokens=self._kv_tokens,
            warm=self._warm_up.warm,
            warm_up=contract.WarmUpState(self._warm_up.failed, self._warm_up.said),
            job=self._weights.job,
            adapters={job: each.version for job, each in self._turns.adapters.items()},
        )


class _Answering:
    """ASGI application around one control handler: it passes the body's bytes to the handler and
    sends its (status, answer) as JSON, or the refusal of its error.

    control: True if callers need the secret. `AccessFilter` checks that too; a server without the
    filter relies on this check.
    """

    def __init__(self, handler: _Handler, *, control: bool = True) -> None:
        self._handler = handler
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._control and not bears_secret(scope):
            await refuse_stranger(send)
            return
        try:
            raw = await read_body(receive, contract.MAX_CONTROL_BYTES)
            status, answer = await self._handler(raw)
        except ClientGoneError:
            # Nothing was begun, and the client is gone.
            return
        except tuple(_REFUSALS) as error:
            status, kind = next(what for each, what in _REFUSALS.items() if isinstance(error, each))
            await refuse(send, status, kind, str(error))
        else:
            await reply(send, status, answer)


class EndpointMount:
    """ASGI middleware that mounts `ReplicaEndpoint` when the server starts, unless a plugin has
    done so.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Mount the endpoint at the lifespan message and pass every request on; if it cannot be
        mounted, the server does not start.
        """
        if scope["type"] == "lifespan" and not hasattr(scope["app"].state, STATE_NAME):
            try:
                await _mount(scope)
            except Exception as error:  # noqa: BLE001 -- uvicorn would serve on without lifespan
                _LOG.exception("ROSE's endpoint cannot be mounted")
                # By the protocol this answer to its first message ends the server.
                await receive()
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
        await self._app(scope, receive, send)


async def _mount(scope: Scope) -> None:
    app = scope["app"]
    endpoint = ReplicaEndpoint()
    endpoint.attach_router(app)
    await endpoint.init_state(app.state.engine_client, app.state, app.state.args)
