"""ReplicaEndpoint: vLLM endpoint plugin that serves the replica HTTP contract.

POST /rose/v1/generate        tokens in, stamped tokens out
POST /rose/v1/drain | admit   lease epochs open and close admission
POST /rose/v1/weights/apply   the next policy version
GET  /rose/v1/state
"""

import os
from argparse import Namespace
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.datastructures import State
from starlette.responses import JSONResponse, Response

from rose.replica.admission import Admission, StaleEpochError
from rose.replica.stream import TurnStream
from rose.replica.turns import TurnRunner
from rose.replica.weights import Weights
from rose.replica.wire import MAX_BODY_BYTES, ApplyBody, EpochBody, GenerateBody
from weight_transfer import WeightError, WrongBaseError

_GENERATE = msgspec.json.Decoder(GenerateBody)
_EPOCH = msgspec.json.Decoder(EpochBody)
_APPLY = msgspec.json.Decoder(ApplyBody)


class ReplicaEndpoint:
    """Named in `VLLM_PLUGINS` as `rose_replica`."""

    name = "rose_replica"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._admission = Admission()
        self._turns: TurnRunner | None = None
        self._weights: Weights | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; Starlette's own, since no schema of FastAPI's is needed."""
        app.add_route("/rose/v1/generate", self._generate, methods=["POST"])
        app.add_route("/rose/v1/drain", self._drain, methods=["POST"])
        app.add_route("/rose/v1/admit", self._admit, methods=["POST"])
        app.add_route("/rose/v1/weights/apply", self._apply, methods=["POST"])
        app.add_route("/rose/v1/state", self._state, methods=["GET"])

    async def init_state(
        self,
        engine_client: Any,  # noqa: ANN401 - vLLM's EngineClient
        state: State,
        args: Namespace,
    ) -> None:
        """Keep the engine; `args` are the server's own."""
        del state
        self._turns = TurnRunner(engine_client)
        self._weights = Weights(engine_client, str(args.model))

    async def _generate(self, request: Request) -> Response:
        if not self._admission.open:
            return _refusal(503, "draining", f"no turns now: {self._admission.reason}")
        raw = await request.body()
        if len(raw) > MAX_BODY_BYTES:
            return _refusal(413, "too_large", f"a body has at most {MAX_BODY_BYTES} bytes")
        try:
            body = _GENERATE.decode(raw)
        except msgspec.MsgspecError as error:
            return _refusal(400, "bad_request", str(error))
        assert self._turns is not None
        # An ASGI application is what a Response is to Starlette.
        return TurnStream(self._turns, body)  # type: ignore[return-value]

    async def _drain(self, request: Request) -> Response:
        try:
            body = _EPOCH.decode(await request.body())
            self._admission.close(body.epoch, body.reason)
        except (msgspec.MsgspecError, StaleEpochError) as error:
            return _refused(error)
        assert self._turns is not None
        return JSONResponse({"aborted": await self._turns.revoke_all()})

    async def _admit(self, request: Request) -> Response:
        try:
            self._admission.admit(_EPOCH.decode(await request.body()).epoch)
        except (msgspec.MsgspecError, StaleEpochError) as error:
            return _refused(error)
        return JSONResponse({"admitting": self._admission.open})

    async def _apply(self, request: Request) -> Response:
        assert self._weights is not None
        try:
            body = _APPLY.decode(await request.body())
            report = await self._weights.apply(body.manifest, body.chunks)
        except msgspec.MsgspecError as error:
            return _refused(error)
        except WrongBaseError as error:
            return _refusal(409, "wrong_base", str(error))
        except WeightError as error:
            return _refusal(422, "bad_version", str(error))
        if report["digest_ok"] and report["probe_ok"]:
            return JSONResponse(report)
        self._admission.quarantine("a policy version failed its proof")
        return JSONResponse(report, status_code=422)

    async def _state(self, request: Request) -> Response:
        del request
        assert self._turns is not None
        assert self._weights is not None
        return JSONResponse(
            {
                "replica_id": os.environ.get("ROSE_REPLICA_ID", ""),
                "role": os.environ.get("ROSE_ROLE", ""),
                "policy_version": self._weights.version,
                "admitting": self._admission.open,
                "epoch": self._admission.epoch,
                "running": self._turns.running,
                "waiting": 0,
                "tokens_total": self._turns.tokens_total,
            }
        )


def _refused(error: Exception) -> Response:
    if isinstance(error, StaleEpochError):
        return _refusal(409, "stale_epoch", str(error))
    return _refusal(400, "bad_request", str(error))


def _refusal(status: int, kind: str, message: str) -> Response:
    return JSONResponse({"error": {"type": kind, "message": message}}, status_code=status)
