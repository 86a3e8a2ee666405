"""ASGI middleware that takes turns past the server's other middleware.

vLLM wraps every route in metrics, CORS and scaling checks; each costs a call for every chunk that
is sent. Loaded by vLLM's own option, `--middleware=rose.replica.shortcut.GenerateShortcut`; without
it the endpoint's routes work all the same.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

GENERATE_PATH = "/rose/v1/generate"
STATE_NAME = "rose_generate"


class GenerateShortcut:
    """Serves `GENERATE_PATH` by the application that the endpoint left in the server's state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a turn at once; hand everything else on."""
        if scope["type"] != "http" or scope["path"] != GENERATE_PATH or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        generate: ASGIApp | None = getattr(scope["app"].state, STATE_NAME, None)
        await (generate or self._app)(scope, receive, send)
