"""Events of an answer in `text/event-stream`, as vLLM writes it: `data: {…}`, at last `[DONE]`."""

from collections.abc import AsyncIterator

import aiohttp

from rose.client.errors import AnswerBroken
from rose.client.wire import StreamEvent, decode_event

# An event holds one step's tokens; anything near this is not one.
MAX_EVENT_BYTES = 1 << 20
DONE = b"[DONE]"


async def events(content: aiohttp.StreamReader) -> AsyncIterator[StreamEvent]:
    """Until `[DONE]` or the end of the stream. Raises AnswerBroken for what is no such stream."""
    rest = b""
    while data := await content.readany():
        lines = (rest + data if rest else data).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == DONE:
                return
            yield decode_event(payload)
        if len(rest) > MAX_EVENT_BYTES:
            raise AnswerBroken(f"an event above {MAX_EVENT_BYTES} bytes")
