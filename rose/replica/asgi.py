"""ASGI parts of a replica: body and answer helpers, the fast path of turns, the access filter.

`GenerateShortcut` takes turns past the server's other middleware. vLLM wraps every route in
metrics, CORS and scaling checks; each costs a call for every chunk that is sent. Loaded by vLLM's
own option, `--middleware=rose.replica.asgi.GenerateShortcut`; without it the endpoint's routes work
all the same.

`AccessFilter` decides which caller may use which route, by method and exact path:

open     liveness, metrics, the model's name, a replica's state, turns of a lease
leased   vLLM's routes of models that are not generative: open for the job of a lease
secret   control of the replica, and the few of vLLM's own routes that its node or a bench uses
others   answer 404: vLLM has routes for development that run any method of its workers

The secret is made for one life of an engine and passed to it in its environment, which only its own
user can read. An engine without one cannot be controlled.
"""

import hmac
import os
from collections.abc import Mapping
from typing import Final, Protocol
from urllib.parse import parse_qs

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from rose.contract.replica import (
    ADMIT,
    DRAIN,
    JOB_QUERY,
    POOLING,
    STATE,
    TURNS,
    Fault,
    Refusal,
)
from rose.contract.weights import APPLY, AUDIT
from rose.tracing import TraceContext, parsed

_encode = msgspec.json.Encoder().encode
_JSON = (b"content-type", b"application/json")


class BodyTooLargeError(Exception):
    """Error raised for a request body above the size limit."""


class ClientGoneError(Exception):
    """Error raised because the client closed its connection."""


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """Return the whole body of an ASGI request. Raises BodyTooLargeError above `max_bytes`, or
    ClientGoneError.
    """
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client left before its request was whole")
        part: bytes = message.get("body", b"")
        body = body + part if body else part
        if len(body) > max_bytes:
            raise BodyTooLargeError(f"a body has at most {max_bytes} bytes")
        if not message.get("more_body", False):
            return body


async def until_gone(receive: Receive) -> None:
    """Wait until the client of an ASGI request has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        continue


def trace_in(scope: Scope) -> TraceContext | None:
    """Return the trace context of the request's `traceparent` header; None if there is none,
    several, or an invalid one.
    """
    said = [value for name, value in scope["headers"] if name == b"traceparent"]
    if len(said) != 1:
        return None
    state = next((value for name, value in scope["headers"] if name == b"tracestate"), b"")
    return parsed(said[0].decode("latin-1"), state.decode("latin-1"))


async def reply(send: Send, status: int, answer: object) -> None:
    """Send a complete HTTP response with this status and the answer as JSON."""
    body = _encode(answer)
    headers = [_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, status: int, kind: str, message: str) -> None:
    """Send an HTTP error response in the contract's shape: error type and message as JSON."""
    await reply(send, status, Refusal(Fault(kind, message)))


STATE_NAME = "rose_generate"
_TURNS = frozenset(TURNS)


class GenerateShortcut:
    """ASGI middleware that serves POST requests to the `TURNS` paths directly by the endpoint's
    application, past all inner middleware.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a turn request by the endpoint's application if it is mounted; pass every other
        request on.
        """
        if scope["type"] != "http" or scope["path"] not in _TURNS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        generate: ASGIApp | None = getattr(scope["app"].state, STATE_NAME, None)
        await (generate or self._app)(scope, receive, send)


SECRET: Final = "ROSE_REPLICA_SECRET"  # noqa: S105 -- the name of a variable
ROLES: Final = frozenset({"guest", "dedicated"})
_OPEN = frozenset(
    {
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/metrics/"),
        ("GET", "/v1/models"),
        ("GET", STATE),
        *(("POST", path) for path in _TURNS),
    }
)
_LEASED = frozenset(("POST", path) for path in POOLING)
_WITH_SECRET = frozenset(
    {
        ("POST", ADMIT),
        ("POST", DRAIN),
        ("POST", APPLY),
        ("POST", AUDIT),
        ("POST", "/sleep"),
        ("POST", "/v1/completions"),
    }
)


def bears_secret(scope: Scope) -> bool:
    """Return True if a request has exactly one Authorization header, with the secret of this engine
    process; False without a secret.
    """
    secret = os.environ.get(SECRET, "")
    said = [value for name, value in scope["headers"] if name == b"authorization"]
    if not secret or len(said) != 1:
        return False
    return hmac.compare_digest(said[0], b"Bearer " + secret.encode())


async def refuse_stranger(send: Send) -> None:
    """Send a 401 response to a control request without the secret."""
    await refuse(send, 401, "no_secret", "only who started this engine controls it")


class Leased(Protocol):
    """Interface of the endpoint's application, which is kept in the server's state."""

    def shut(self, job: str) -> str:
        """Return the reason why no turn of a job may begin, "" if one may."""


class AccessFilter:
    """ASGI middleware that allows each route to the callers listed above; without ROSE_ROLE it
    passes everything on.

    Loaded by vLLM's own option, `--middleware=rose.replica.asgi.AccessFilter`.
    """

    def __init__(self, app: ASGIApp, environ: Mapping[str, str] = os.environ) -> None:
        self._app = app
        self._replica = environ.get("ROSE_ROLE") in ROLES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an allowed request on; answer 404, 401 or 503 to others, and close web sockets."""
        if not self._replica or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            # By the protocol this refuses the connection before it is accepted.
            await send({"type": "websocket.close", "code": 1008})
        elif (asked := (scope["method"], scope["path"])) in _OPEN:
            await self._app(scope, receive, send)
        elif asked in _LEASED:
            await self._leased(scope, receive, send)
        elif asked not in _WITH_SECRET:
            await refuse(send, 404, "not_found", "a replica does not serve this")
        elif not bears_secret(scope):
            await refuse_stranger(send)
        else:
            await self._app(scope, receive, send)

    async def _leased(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request of a pooling route on if a turn of its job could begin, else
        answer 503.
        """
        gate: Leased | None = getattr(scope["app"].state, STATE_NAME, None)
        job = parse_qs(scope.get("query_string", b"").decode("latin-1")).get(JOB_QUERY, [""])[0]
        shut = "no turns now: the engine starts" if gate is None else gate.shut(job)
        if shut:
            await refuse(send, 503, "draining", shut)
        else:
            await self._app(scope, receive, send)
