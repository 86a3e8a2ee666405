"""ASGI middleware that gives an engine ROSE's routes where its vLLM has no endpoint plugins.

The server sends `lifespan` through its middleware once, when the engine is there and before the
first request. A vLLM that has loaded the endpoint as a plugin has left its mark in the server's
state by then, and nothing is done. Loaded by vLLM's own option,
`--middleware=rose.replica.mount.EndpointMount`.
"""

import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from rose.replica.endpoint import ReplicaEndpoint
from rose.replica.shortcut import STATE_NAME

_LOG = logging.getLogger("vllm.rose.replica")


class EndpointMount:
    """Mounts `ReplicaEndpoint` when the server starts, at most once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Mount at the server's start; hand everything on. A server that cannot does not start."""
        if scope["type"] == "lifespan" and not hasattr(scope["app"].state, STATE_NAME):
            try:
                await _mount(scope)
            except Exception as error:  # noqa: BLE001 -- uvicorn would serve on without lifespan
                _LOG.exception("ROSE's endpoint cannot be mounted")
                # The protocol: this answer to its first message ends the server.
                await receive()
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
        await self._app(scope, receive, send)


async def _mount(scope: Scope) -> None:
    app = scope["app"]
    endpoint = ReplicaEndpoint()
    endpoint.attach_router(app)
    await endpoint.init_state(app.state.engine_client, app.state, app.state.args)
