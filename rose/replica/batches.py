"""Batches: turns of one request. Each is a turn like any other, and their lines share the answer.

    BatchBody ──► turn 0 ──┐
                  turn 1 ──┤ lines of one step of the event loop ──► one piece of the answer
                  …      ──┘
    LeaveBody ──► those turns end, the others continue; a client that hangs up ends all of them

For a trainer's short turns the engine's server would otherwise spend more on requests and pieces
than on tokens.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from starlette.types import Receive, Send

from rose.contract.replica import BatchLine, StreamLine
from rose.replica.asgi import ClientGoneError
from rose.replica.engine import RequestRefusedError
from rose.replica.turns import ReplicaTurn, Turns, stream

_LOG = logging.getLogger("vllm.rose.replica")


class _Answer:
    """Pending lines of a batch; `left` turns have not sent their last yet."""

    def __init__(self, turns: int) -> None:
        self.left = turns
        self._lines: list[BatchLine] = []
        self._news = asyncio.Event()

    def add(self, lines: Sequence[BatchLine]) -> None:
        if lines:
            self._lines += lines
            self._news.set()

    def over(self) -> None:
        """Count one turn less."""
        self.left -= 1
        self._news.set()

    async def next(self) -> list[BatchLine]:
        """Return all lines so far, waiting for some; none if the last turns were cancelled."""
        await self._news.wait()
        self._news.clear()
        lines, self._lines = self._lines, []
        return lines


class TurnBatches:
    """Batches that are being answered, by their clients' names for them."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Turns, Mapping[int, ReplicaTurn]]] = {}

    def leave(self, name: str, places: Sequence[int]) -> None:
        """End some turns of a batch; unknown ones, and those that are over, are left alone."""
        found = self._open.get(name)
        if found is not None:
            served, turns = found
            served.leave([turns[place] for place in places if place in turns])

    async def serve(
        self,
        served: Turns,
        name: str,
        turns: Mapping[int, ReplicaTurn],
        refused: Sequence[BatchLine],
        receive: Receive,
        send: Send,
    ) -> None:
        """Stream opened turns by their places; a client that goes away ends all of them."""
        answer = _Answer(len(turns))
        answer.add(refused)
        this = self._open[name] = served, turns
        tasks = [asyncio.create_task(_run(served, answer, *each)) for each in turns.items()]
        try:
            with served.watched(turns.values(), receive):
                await stream(answer.next, lambda: not answer.left, send)
        finally:
            if self._open.get(name) is this:
                del self._open[name]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _run(served: Turns, answer: _Answer, place: int, turn: ReplicaTurn) -> None:
    """Run one turn from its beginning to its end."""
    try:
        await served.begin(turn)
        while not turn.ended:
            lines = await turn.next_lines()
            answer.add([BatchLine(place, line) for line in lines])
    except RequestRefusedError as error:
        answer.add([BatchLine(place, StreamLine(message=str(error)), error.status)])
    except ClientGoneError:
        # Nobody waits for it; the rest of it is ended below.
        return
    except Exception as error:  # noqa: BLE001 -- the others go on
        _LOG.exception("a turn of a batch failed")
        said = f"{type(error).__name__}: {error}"
        answer.add([BatchLine(place, StreamLine(finish_reason="error", message=said))])
    finally:
        answer.over()
        await served.close(turn)
