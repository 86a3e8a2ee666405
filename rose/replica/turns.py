"""The turns of this replica: each is known from its admission to its last line."""

import asyncio
from typing import Any

from starlette.types import Message, Receive, Send

from rose.replica.asgi import ClientGoneError, refuse, until_gone
from rose.replica.engine_request import RequestRefusedError, abort
from rose.replica.hold import Hold
from rose.replica.kv_ages import KvAges
from rose.replica.turn import Turn
from rose.replica.wire import GenerateBody


def _start() -> Message:
    """A fresh message each time: the server's middleware adds to its headers in place."""
    headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


class Turns:
    """Opens, serves and revokes turns."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - vLLM's AsyncLLM
        self._engine = engine
        self._live: set[Turn] = set()
        self._past_tokens = 0
        self._left = asyncio.Event()
        self.hold = Hold()
        self.ages = KvAges()

    @property
    def running(self) -> int:
        """Turns that have at least one token."""
        return sum(turn.tokens > 0 for turn in self._live)

    @property
    def waiting(self) -> int:
        """Turns without a token yet."""
        return sum(turn.tokens == 0 for turn in self._live)

    @property
    def tokens_total(self) -> int:
        """Output tokens since the engine started."""
        return self._past_tokens + sum(turn.tokens for turn in self._live)

    def open(self, body: GenerateBody) -> Turn:
        """Take on a turn; from here on a drain finds it."""
        turn = Turn(self._engine, body, self.ages)
        self._live.add(turn)
        return turn

    async def revoke_all(self) -> int:
        """End every turn; each stream first delivers the tokens it has. Returns how many."""
        turns = [turn for turn in self._live if not turn.revoked and not turn.ended]
        for turn in turns:
            turn.revoked = True
        self.hold.look_again()
        await abort(self._engine, [turn.request for turn in turns if turn.request is not None])
        return len(turns)

    async def all_ended(self, limit_s: float) -> bool:
        """Wait until no turn is in the engine; False when some are after `limit_s` seconds.

        Close the hold first, or new ones take their places.
        """
        try:
            async with asyncio.timeout(limit_s):
                while any(turn.begun and not turn.ended for turn in self._live):
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True

    async def serve(self, turn: Turn, receive: Receive, send: Send) -> None:
        """Stream a turn; a client that goes away ends it."""
        watch = asyncio.create_task(until_gone(receive))
        watch.add_done_callback(turn.client_left)
        watch.add_done_callback(lambda _: self.hold.look_again())
        try:
            await self.hold.passed(lambda: turn.over)
            await turn.start()
            await _stream(turn, send)
        except RequestRefusedError as error:
            kind = "bad_request" if error.status < 500 else "unavailable"
            await refuse(send, error.status, kind, str(error))
        except ClientGoneError:
            # Nobody is left to tell; what is left of the turn is ended below.
            return
        finally:
            watch.cancel()
            self._live.discard(turn)
            self._past_tokens += turn.tokens
            await turn.close()
            self._left.set()


async def _stream(turn: Turn, send: Send) -> None:
    # Headers go out with the first line: one wake-up less for the gateway.
    lines = await turn.next_lines()
    await send(_start())
    while not turn.ended:
        await send({"type": "http.response.body", "body": lines, "more_body": True})
        lines = await turn.next_lines()
    await send({"type": "http.response.body", "body": lines, "more_body": False})
