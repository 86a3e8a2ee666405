"""Who may ask an engine's API process for what, told by method and exact path.

open     liveness, metrics, the model's name, a replica's state, turns of a lease
secret   control of the replica, and the few of vLLM's own routes that its node or a bench uses
others   answer 404: vLLM has routes for development that run any method of its workers

The secret is made for one life of an engine and given to it in its environment, which only its own
user can read. An engine without one lets nobody control it.
"""

import hmac
import os
from collections.abc import Mapping
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from rose.replica.asgi import refuse
from rose.replica.shortcut import GENERATE_PATH

SECRET: Final = "ROSE_REPLICA_SECRET"  # noqa: S105 -- the name of a variable
ROLES: Final = frozenset({"guest", "dedicated"})
_OPEN = frozenset(
    {
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/metrics/"),
        ("GET", "/v1/models"),
        ("GET", "/rose/v1/state"),
        ("POST", GENERATE_PATH),
    }
)
_WITH_SECRET = frozenset(
    {
        ("POST", "/rose/v1/admit"),
        ("POST", "/rose/v1/drain"),
        ("POST", "/rose/v1/weights/apply"),
        ("POST", "/rose/v1/weights/audit"),
        ("POST", "/sleep"),
        ("POST", "/v1/completions"),
    }
)


def bears_secret(scope: Scope) -> bool:
    """Whether a request bears the secret of this life, in one `Authorization: Bearer` header."""
    secret = os.environ.get(SECRET, "")
    said = [value for name, value in scope["headers"] if name == b"authorization"]
    if not secret or len(said) != 1:
        return False
    return hmac.compare_digest(said[0], b"Bearer " + secret.encode())


async def refuse_stranger(send: Send) -> None:
    """Answer a request for control that does not bear the secret."""
    await refuse(send, 401, "no_secret", "only who started this engine controls it")


class AccessFilter:
    """Lets through what is listed above; a process that is no replica is left alone.

    Loaded by vLLM's own option, `--middleware=rose.replica.access.AccessFilter`.
    """

    def __init__(self, app: ASGIApp, environ: Mapping[str, str] = os.environ) -> None:
        self._app = app
        self._replica = environ.get("ROSE_ROLE") in ROLES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on what may pass."""
        if not self._replica or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            # The protocol: a refusal of the connection before it is accepted.
            await send({"type": "websocket.close", "code": 1008})
        elif (asked := (scope["method"], scope["path"])) in _OPEN:
            await self._app(scope, receive, send)
        elif asked not in _WITH_SECRET:
            await refuse(send, 404, "not_found", "a replica does not serve this")
        elif not bears_secret(scope):
            await refuse_stranger(send)
        else:
            await self._app(scope, receive, send)
