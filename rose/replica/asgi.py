"""The little of ASGI that the endpoint speaks itself: read a body, answer with JSON."""

import msgspec
from starlette.types import Receive, Send

_encode = msgspec.json.Encoder().encode
_JSON = (b"content-type", b"application/json")


class BodyTooLargeError(Exception):
    """A body is longer than the endpoint reads."""


class ClientGoneError(Exception):
    """The client closed its connection."""


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The whole body of a request. Raises BodyTooLargeError or ClientGoneError."""
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
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def reply(send: Send, status: int, answer: object) -> None:
    """Answer with JSON, at once and whole."""
    body = _encode(answer)
    headers = [_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, status: int, kind: str, message: str) -> None:
    """Answer with an error of the contract's shape."""
    await reply(send, status, {"error": {"type": kind, "message": message}})
