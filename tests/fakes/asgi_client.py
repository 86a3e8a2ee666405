"""One ASGI exchange in memory: what a client sends, what it has received, when it leaves."""

import asyncio
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Message

SECRET = "only this test knows"
CONTROL = MappingProxyType({"Authorization": f"Bearer {SECRET}"})


class AsgiExchange:
    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: bytes,
        method: str = "POST",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._body = body
        self.status = 0
        self.sends = 0
        self.received = b""
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    def send_body(self) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": self._body})

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def _send(self, message: Message) -> None:
        self.sends += 1
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.received += message.get("body", b"")

    async def done(self) -> "AsgiExchange":
        await asyncio.wait_for(self.task, 2)
        return self

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.received.splitlines()]

    @property
    def json(self) -> Any:
        return json.loads(self.received)


def exchange(
    app: ASGIApp,
    path: str,
    body: object,
    method: str = "POST",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> AsgiExchange:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    begun = AsgiExchange(app, path, raw, method, headers)
    begun.send_body()
    return begun


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)
